# requires: smolagents[openai]==1.26.0 pytest==9.2.0
"""smolagents: texts, streams, objects by schema, and agents whose tools the server constrains."""

from __future__ import annotations

import os

import pytest
from smolagents import ChatMessageStreamDelta, OpenAIModel, ToolCallingAgent, tool

URL, NAME = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]
ASK = [{"role": "user", "content": [{"type": "text", "text": "Name three colours."}]}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture
def model() -> OpenAIModel:
    return OpenAIModel(NAME, api_base=URL, api_key="-", temperature=0, max_tokens=100)


@tool
def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Name of the city.
    """
    return f"It is sunny in {city}."


def test_text(model: OpenAIModel) -> None:
    answer = model(ASK)
    assert answer.content and answer.token_usage is not None and answer.token_usage.output_tokens > 0


def test_stream(model: OpenAIModel) -> None:
    parts = list(model.generate_stream(ASK))
    assert all(isinstance(part, ChatMessageStreamDelta) for part in parts)
    assert sum(1 for part in parts if part.content) > 1 and parts[-1].token_usage is not None


def test_stop_strings(model: OpenAIModel) -> None:
    answer = model(ASK, stop_sequences=["e", "a"])
    assert answer.content is not None and not set("ea") & set(answer.content)


def test_object_by_schema(model: OpenAIModel) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = model(ASK, response_format=schema)
    assert answer.content is not None and '"age"' in answer.content


def test_tool_call(model: OpenAIModel) -> None:
    """The library asks for a call with `tool_choice: required`."""
    answer = model(ASK, tools_to_call_from=[weather])
    assert answer.tool_calls and answer.tool_calls[0].function.name == "weather"


def test_agent(model: OpenAIModel) -> None:
    """Each step is a call of a tool. The model may never find the final answer, which then comes without a tool."""
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
    assert agent.run("How is the weather in Paris?") is not None
    assert agent.memory.steps
