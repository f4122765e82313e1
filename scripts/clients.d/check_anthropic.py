# requires: anthropic==2.14.0 pytest==9.2.0
"""The anthropic library: sync, async, streams, errors, tools, `.parse`, the count of tokens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest

URL, MODEL = os.environ["TERCET_URL"], os.environ["TERCET_MODEL"]
HI: list[Any] = [{"role": "user", "content": "Name three colours."}]
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}]
GREEDY: Any = {"temperature": 0}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=URL, api_key="-", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "messages": HI, "max_tokens": 16, "extra_body": GREEDY, **fields})


def test_message(client: anthropic.Anthropic) -> None:
    answer = ask(client, system="Be brief.")
    assert answer.content[0].type == "text" and answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens") and 0 < answer.usage.output_tokens <= 16


def test_stream_equals_whole(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    with client.messages.stream(model=MODEL, messages=HI, max_tokens=16, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_raw_events(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in ask(client, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_count_of_tokens(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.").input_tokens
    usage = ask(client, system="Be brief.").usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_models(client: anthropic.Anthropic) -> None:
    (only,) = client.models.list(limit=1)
    assert only == client.models.retrieve(only.id)
    assert (only.id, only.type, only.display_name) == (MODEL, "model", MODEL) and only.created_at.year > 2000


def test_stop_sequence(client: anthropic.Anthropic) -> None:
    answer = ask(
        client, messages=[{"role": "user", "content": "Count from 1 to 9."}], stop_sequences=["4"], max_tokens=40
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "4") and "4" not in answer.content[0].text


def test_continued_answer(client: anthropic.Anthropic) -> None:
    begun = [*HI, {"role": "assistant", "content": "Red, green,"}]
    count = client.messages.count_tokens(model=MODEL, messages=begun).input_tokens
    assert count > client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    assert ask(client, messages=begun).content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_required_call_and_its_result(client: anthropic.Anthropic, choice: Any) -> None:
    answer = ask(client, messages=ASK, tools=TOOLS, tool_choice=choice, max_tokens=60)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use" and call.type == "tool_use" and isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny"}]}
    turns = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert ask(client, messages=turns, tools=TOOLS).stop_reason is not None


def test_streamed_call(client: anthropic.Anthropic) -> None:
    fields: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 60}
    whole = ask(client, **fields)
    with client.messages.stream(model=MODEL, extra_body=GREEDY, **fields) as stream:
        final = stream.get_final_message()
    assert [(one.name, one.input) for one in final.content] == [(one.name, one.input) for one in whole.content]


def test_parse(client: anthropic.Anthropic) -> None:
    question: list[Any] = [{"role": "user", "content": "Anna is 30 years old. Describe her as JSON."}]
    answer = client.messages.parse(
        model=MODEL, messages=question, max_tokens=80, output_format=Person, extra_body=GREEDY
    )
    assert isinstance(answer.parsed_output, Person)


def test_async() -> None:
    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key="-", max_retries=0) as client:
            several = [
                client.messages.create(model=MODEL, messages=HI, max_tokens=8, extra_body=GREEDY) for _ in range(3)
            ]
            return [one.content[0].text for one in await asyncio.gather(*several)]

    assert len({*asyncio.run(run())}) == 1


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(client, max_tokens=-1)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        ask(client, model="no-such-model")
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        ask(client, messages=[{"role": "user", "content": [image]}])
