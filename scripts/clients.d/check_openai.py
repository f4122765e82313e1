# requires: openai==3.54.0 pytest==9.2.0
"""The openai library: sync, async, streams, errors, log probabilities, tools, `.parse`, responses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

URL, MODEL = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]
HI: list[Any] = [{"role": "user", "content": "Name three colours."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}]
FLAT_TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=URL, api_key="-", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=16, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 16


def test_chat_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=16, temperature=0)
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=16, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, n=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=30, temperature=0, stop="7")
    assert answer.choices[0].finish_reason == "stop" and "7" not in answer.choices[0].text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4 and all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in content)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=3, logprobs=2, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and "".join(logprobs.tokens) == answer.choices[0].text


def test_conversation_of_returned_messages(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=8, temperature=0).choices[0].message
    messages: list[Any] = [*HI, first, {"role": "user", "content": "Another one?"}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8).choices
    messages[1] = first.model_dump()
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8).choices


def test_required_tool_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=60
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages: list[Any] = [*ASK, answer.choices[0].message, result]
    again = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=8)
    assert again.choices[0].finish_reason


def test_named_tool_call_stream(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=named, temperature=0, max_tokens=60
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert set(message.tool_calls[0].function.parsed_arguments) == {"city"}


def test_parse(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Ada is 36 years old. Who is it? Answer in JSON."}]
    answer = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Person, temperature=0, max_tokens=80
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_parse_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HI, response_format=Person, temperature=0, max_tokens=80
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Person)


def test_json_object(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Write a small JSON object."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, response_format={"type": "json_object"}, temperature=0, max_tokens=200
    )
    choice = answer.choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        json.loads(choice.message.content)


def test_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=16, store=False)
    assert response.output_text and response.usage.output_tokens <= 16


def test_response_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hello!", max_output_tokens=64, temperature=0) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds


def test_response_tool_call(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input=ASK, tools=FLAT_TOOLS, tool_choice="required", temperature=0, max_output_tokens=60
    )
    call = next(item for item in response.output if item.type == "function_call")
    assert set(json.loads(call.arguments)) == {"city"}


def test_response_parse(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL, input="Who is Ada?", text_format=Person, temperature=0, max_output_tokens=80
    )
    assert isinstance(response.output_parsed, Person)


def test_stored_responses(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(input="Hello!", instructions="Be brief.", **options)
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(input="Another one?", previous_response_id=first.id, **options)
    sent: Any = [
        {"role": "user", "content": "Hello!"},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "Another one?"},
    ]
    whole = client.responses.create(input=sent, store=False, **options)
    assert second.output_text == whole.output_text and second.usage.input_tokens == whole.usage.input_tokens
    items = list(client.responses.input_items.list(second.id, limit=1, order="asc"))
    assert [item.role for item in items] == ["user", "assistant", "user"] and items[1] == first.output[0]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with client.responses.stream(input="More", previous_response_id=second.id, **options) as stream:
        last = stream.get_final_response()
    stored = client.responses.retrieve(last.id)
    assert (stored.previous_response_id, stored.output_text) == (second.id, last.output_text)


def test_an_unknown_previous_response(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model=MODEL, input="Hello!", previous_response_id="resp_1")
    assert unknown.value.code == "previous_response_not_found"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="word " * 10000)
    assert too_long.value.code == "context_length_exceeded"


def test_async() -> None:
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=URL, api_key="-", max_retries=0) as client:

            async def one(stream: bool) -> str:
                answer: Any = await client.chat.completions.create(
                    model=MODEL, messages=HI, max_tokens=8, temperature=0, stream=stream
                )
                if not stream:
                    return answer.choices[0].message.content
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])

            return await asyncio.gather(*(one(stream=bool(i % 2)) for i in range(8)))

    assert len(set(asyncio.run(talk()))) == 1


def test_a_closed_stream_frees_the_server(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="Count: 1", max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"


def test_raw_response_has_the_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=1)
    assert raw.headers["x-request-id"] and raw.parse().id
