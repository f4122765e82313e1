# requires: litellm==1.106.2 mcp==2.3.0 pytest==9.2.0
"""litellm, with the provider `hosted_vllm` and with `openai`: chats, streams, text, tools, schemas, errors."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import litellm
import pydantic
import pytest

URL, NAME = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]
HI = [{"role": "user", "content": "Name three colours."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(params=["hosted_vllm", "openai"])
def server(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{NAME}",
        "api_base": URL,
        "api_key": "-",
        "max_retries": 0,
        "temperature": 0,
        "max_tokens": 80,
    }


def test_chat(server: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HI, **server)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0


def test_stream(server: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **server))
    whole = litellm.stream_chunk_builder(chunks, messages=HI)
    assert whole.choices[0].message.content == litellm.completion(messages=HI, **server).choices[0].message.content


def test_async_stream(server: dict[str, Any]) -> None:
    async def talk() -> str:
        stream = await litellm.acompletion(messages=HI, stream=True, **server)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(talk())


def test_text(server: dict[str, Any]) -> None:
    assert litellm.text_completion(prompt="The capital of France is", **server).choices[0].text


def test_logprobs(server: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HI, logprobs=True, top_logprobs=2, **server)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_tool_call_and_its_result(server: dict[str, Any]) -> None:
    message = litellm.completion(messages=HI, tools=TOOLS, tool_choice="required", **server).choices[0].message
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    again = litellm.completion(messages=[*HI, message.model_dump(), result], tools=TOOLS, **server)
    assert again.choices[0].finish_reason


def test_schema(server: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HI, response_format=Person, **server)
    Person.model_validate_json(answer.choices[0].message.content)


def test_response(server: dict[str, Any]) -> None:
    given = {name: server[name] for name in ("model", "api_base", "api_key", "temperature")}
    answer = litellm.responses(input="Hello!", max_output_tokens=16, **given)
    assert answer.output[0].content[0].text


def test_a_long_prompt_is_a_context_window_error(server: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 10000}], **server)


def test_a_wrong_value_is_a_bad_request(server: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=HI, **{**server, "temperature": -1})
