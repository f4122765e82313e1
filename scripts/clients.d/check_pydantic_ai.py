# requires: pydantic-ai-slim[openai]==2.68.0 pytest==9.2.0
"""pydantic-ai: texts, streams, objects by tool call and by schema, over chat completions and over responses."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, NAME = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]
SETTINGS: Any = {"temperature": 0, "max_tokens": 120}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param(NAME, provider=OpenAIProvider(base_url=URL, api_key="-"))


def test_text(model: Any) -> None:
    ran = Agent(model, instructions="Be brief.", model_settings=SETTINGS).run_sync("Name three colours.")
    assert ran.output and ran.usage.output_tokens > 0


def test_stream(model: Any) -> None:
    async def talk() -> list[str]:
        async with Agent(model, model_settings=SETTINGS).run_stream("Name three colours.") as stream:
            return [text async for text in stream.stream_text(delta=True, debounce_by=None)]

    assert len(asyncio.run(talk())) > 1


def test_conversation(model: Any) -> None:
    agent = Agent(model, model_settings=SETTINGS)
    first = agent.run_sync("My name is Ada.")
    assert agent.run_sync("What is my name?", message_history=first.all_messages()).output


def test_object_by_tool_call(model: Any) -> None:
    agent = Agent(model, output_type=ToolOutput(Person, strict=True), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Ada is 36 years old. Who is it?").output, Person)


def test_object_by_schema(model: Any) -> None:
    agent = Agent(model, output_type=NativeOutput(Person, strict=True), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Ada is 36 years old. Who is it?").output, Person)


def test_tool_of_the_agent(model: Any) -> None:
    """The tool is offered; the model may answer without it."""
    agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def weather(city: str) -> str:
        return f"It is sunny in {city}."

    assert agent.run_sync("How is the weather in Paris?").output
