# requires: instructor==1.17.0 openai==2.45.0 pytest==9.2.0
"""instructor over the openai library: its modes that constrain an answer, a list, a partial stream, and async."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import instructor
import openai
import pydantic
import pytest

URL, MODEL = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]
MESSAGES: list[Any] = [{"role": "user", "content": "Ada is 36 years old. Who is it?"}]
GIVEN: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120, "max_retries": 0}
MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_object(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="-"), mode=mode)
    assert isinstance(client.chat.completions.create(response_model=Person, **GIVEN), Person)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_object_that_grows(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="-"), mode=mode)
    parts = list(client.chat.completions.create_partial(response_model=Person, **GIVEN))
    assert parts[-1].name is not None and parts[-1].age is not None


def test_the_raw_answer_comes_with_the_object() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="-"), mode=instructor.Mode.JSON_SCHEMA)
    person, raw = client.chat.completions.create_with_completion(response_model=Person, **GIVEN)
    assert isinstance(person, Person) and raw.usage.completion_tokens > 0


def test_async() -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=URL, api_key="-") as inner:
            client = instructor.from_openai(inner, mode=instructor.Mode.JSON_SCHEMA)
            return await client.chat.completions.create(response_model=Person, **GIVEN)

    assert isinstance(asyncio.run(ask()), Person)
