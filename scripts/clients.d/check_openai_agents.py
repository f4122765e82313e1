# requires: openai-agents==0.24.0 pytest==9.2.0
"""OpenAI's library of agents: texts, streams, tools, objects, sessions, over chat completions and over responses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai.types.shared import Reasoning

URL, NAME = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]
SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 300}
"""Over responses, the library raises an error for an answer that is cut."""
ASK = "How is the weather in Paris?"


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    set_tracing_disabled(True)  # traces would go to OpenAI
    client = openai.AsyncOpenAI(base_url=URL, api_key="-", max_retries=0)
    yield request.param(model=NAME, openai_client=client)


def agent_of(model: Any, *, tools: Any = (), output_type: Any = None, **settings: Any) -> Agent:
    """The answer of the model after the result of a tool ends the run, whatever it says."""
    return Agent(
        "assistant",
        instructions="Be brief.",
        model=model,
        tools=list(tools),
        output_type=output_type,
        tool_use_behavior="stop_on_first_tool",
        model_settings=ModelSettings(**{**SETTINGS, **settings}),
    )


def answer(agent: Agent, text: str) -> Any:
    return asyncio.run(Runner.run(agent, text))


def test_text(model: Any) -> None:
    ran = answer(agent_of(model), "Say hello.")
    usage = ran.context_wrapper.usage
    assert ran.final_output and usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


def test_stream(model: Any) -> None:
    async def talk() -> tuple[str, str]:
        run = Runner.run_streamed(agent_of(model), "Say hello.")
        events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        return "".join(deltas), run.final_output

    text, output = asyncio.run(talk())
    assert text == output != ""


def test_required_tool(model: Any) -> None:
    ran = answer(agent_of(model, tools=[weather], tool_choice="required"), ASK)
    assert ran.final_output.startswith("It is sunny in ")


def test_named_tool_in_a_stream(model: Any) -> None:
    async def talk() -> Any:
        run = Runner.run_streamed(agent_of(model, tools=[weather], tool_choice="weather"), ASK)
        async for _ in run.stream_events():
            pass
        return run.final_output

    assert asyncio.run(talk()).startswith("It is sunny in ")


def test_object(model: Any) -> None:
    assert isinstance(answer(agent_of(model, output_type=Person), "Who is it?").final_output, Person)


def test_session_with_the_result_of_a_tool(model: Any) -> None:
    async def talk() -> tuple[Any, list[Any]]:
        session, agent = SQLiteSession("conversation"), agent_of(model, tools=[weather], tool_choice="required")
        await Runner.run(agent, ASK, session=session)
        ran = await Runner.run(agent, "And in Rome?", session=session)
        return ran.final_output, [item["type"] for item in await session.get_items() if "type" in item]

    output, kinds = asyncio.run(talk())
    assert output.startswith("It is sunny in ")
    assert [kind for kind in kinds if kind != "message"] == ["function_call", "function_call_output"] * 2


def test_settings_of_a_reasoning_model_without_storage(model: Any) -> None:
    settings: dict[str, Any] = {"store": False, "reasoning": Reasoning(effort="low", summary="auto")}
    if isinstance(model, OpenAIResponsesModel):
        settings |= {"response_include": ["reasoning.encrypted_content"], "truncation": "disabled"}
    assert answer(agent_of(model, **settings), "Say hello.").final_output


def test_a_conversation_that_the_server_stores() -> None:
    set_tracing_disabled(True)
    model = OpenAIResponsesModel(NAME, openai_client=openai.AsyncOpenAI(base_url=URL, api_key="-", max_retries=0))

    async def talk() -> tuple[Any, Any]:
        agent = agent_of(model)
        first = await Runner.run(agent, "Say hello.")
        return first, await Runner.run(agent, "Say it again.", previous_response_id=first.last_response_id)

    first, second = (ran.context_wrapper.usage for ran in asyncio.run(talk()))
    assert second.input_tokens > first.total_tokens
