"""The openai library, unmodified, against a live server with scripted answers: tools, reasoning, responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live_site import LiveSite, live_site

openai = pytest.importorskip("openai", reason="the extra `test` has the openai library")

TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FLAT_TOOLS: list[Any] = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
HI: list[Any] = [{"role": "user", "content": "hi"}]
SAID = ("<think>w", "hy</think>", "Ok", '<tool_call>{"name": "f", "argu', 'ments": {"x"', ": 1}}", "</tool_call>")


@pytest.fixture(scope="module")
def live() -> Iterator[LiveSite]:
    with live_site(reasoning_parser="qwen3", response_store_mib=1) as site:
        yield site


@pytest.fixture
def client(live: LiveSite) -> Iterator[Any]:
    live.scheduler.delay_s = 0.0
    live.scheduler.say(*SAID)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_a_chat_with_tools(client: Any, live: LiveSite) -> None:
    message = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices[0].message
    assert (message.content, message.reasoning_content) == ("Ok", "why")
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"x": 1}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    client.chat.completions.create(model="tiny", messages=[*HI, message, result], tools=TOOLS)
    assert f"<tool>42({call.id})" in live.scheduler.prompt_texts()[-1]


def test_a_streamed_chat_with_tools(client: Any) -> None:
    with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"x": 1}'


def test_a_response(client: Any, live: LiveSite) -> None:
    response = client.responses.create(model="tiny", input="hi", tools=FLAT_TOOLS)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Ok" and response.usage.output_tokens == len(SAID)
    call = response.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    client.responses.create(model="tiny", input=[*HI, *response.output, result], tools=FLAT_TOOLS)
    assert f"<tool>42(f)({call.call_id})" in live.scheduler.prompt_texts()[-1]


def test_a_streamed_response(client: Any) -> None:
    with client.responses.stream(model="tiny", input="hi", tools=FLAT_TOOLS) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    assert response.output_text == "Ok" and response.output[-1].arguments == '{"x": 1}'


@pytest.mark.parametrize("made_by", ["create", "parse"])
def test_answers_can_be_sent_back_in_every_form(client: Any, live: LiveSite, made_by: str) -> None:
    """`parse` adds the parsed values, and `model_dump` writes every field that the library knows."""
    strict_chat = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    output = getattr(client.responses, made_by)(
        model="tiny", input="hi", tools=[{**FLAT_TOOLS[0], "strict": True}]
    ).output
    chat = getattr(client.chat.completions, made_by)(model="tiny", messages=HI, tools=strict_chat)
    message = chat.choices[0].message
    live.scheduler.say("Fine")
    returned = {"type": "function_call_output", "call_id": output[-1].call_id, "output": "42"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    for items in (output, [item.model_dump() for item in output], [item.to_dict() for item in output]):
        assert client.responses.create(model="tiny", input=[*HI, *items, returned]).output_text == "Fine"
    for one in (message, message.model_dump(), message.to_dict()):
        again = client.chat.completions.create(model="tiny", messages=[*HI, one, result])
        assert again.choices[0].message.content == "Fine"


def test_an_error(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="none is made in the background"):
        client.responses.create(model="tiny", input="hi", background=True)


def test_a_response_can_be_aborted_by_its_id(client: Any, live: LiveSite) -> None:
    live.scheduler.delay_s = 0.05
    live.scheduler.words, live.scheduler.stop_after = ("a",), None
    with client.responses.create(model="tiny", input="hi", stream=True) as stream:
        events = iter(stream)
        name = next(events).response.id
        aborted = client.post("/../abort_request", body={"rid": name}, cast_to=dict[str, Any])
        assert aborted == {"aborted": True}
        last = list(events)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")


def test_stored_responses(client: Any, live: LiveSite) -> None:
    first = client.responses.create(model="tiny", input="hi", tools=FLAT_TOOLS)
    assert client.responses.retrieve(first.id) == first
    call = first.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    second = client.responses.create(model="tiny", input=[result], previous_response_id=first.id)
    assert live.scheduler.prompt_texts()[-1].endswith(f"<tool>42(f)({call.call_id})\n<assistant>")
    assert (second.previous_response_id, second.store) == (first.id, True)
    everything = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in everything] == ["message", *(item.type for item in first.output), result["type"]]
    assert [item.to_dict() for item in everything[1:-1]] == [item.to_dict() for item in first.output]
    newest_first = list(client.responses.input_items.list(second.id, limit=3))
    assert newest_first == everything[::-1]
    with client.responses.stream(model="tiny", input="more", previous_response_id=second.id) as stream:
        last = stream.get_final_response()
    stored = client.responses.retrieve(last.id)
    assert (stored.output_text, stored.usage) == (last.output_text, last.usage)
    assert client.responses.delete(first.id) is None
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model="tiny", input="hi", previous_response_id=first.id)
    assert unknown.value.code == "previous_response_not_found"
