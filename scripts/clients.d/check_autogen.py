# requires: autogen-ext[openai]==0.7.5 autogen-agentchat==0.7.5 pytest==9.2.0
"""AutoGen: texts, streams, objects, tools, an agent, and a team of agents, over chat completions."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pydantic
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import CreateResult, ModelFamily, ModelInfo, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

URL, NAME = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]
INFO = ModelInfo(
    vision=False, function_calling=True, json_output=True, structured_output=True, family=ModelFamily.UNKNOWN
)
ASK = [UserMessage(content="Ada is 36 years old. Name three colours.", source="user")]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


async def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city}."


def client() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=NAME, base_url=URL, api_key="-", model_info=INFO, temperature=0, max_tokens=80
    )


def create(**options: Any) -> CreateResult:
    return asyncio.run(client().create(ASK, **options))


def test_text() -> None:
    result = create()
    assert result.content and result.usage.completion_tokens > 0


def test_log_probabilities() -> None:
    assert create(extra_create_args={"logprobs": True, "top_logprobs": 2}).logprobs


def test_stream() -> None:
    async def parts() -> list[Any]:
        return [part async for part in client().create_stream(ASK, include_usage=True)]

    found = asyncio.run(parts())
    assert len(found) > 2 and found[-1].usage.completion_tokens > 0


def test_json() -> None:
    assert create(json_output=True).content


def test_object_by_schema() -> None:
    content = create(json_output=Person).content
    assert isinstance(content, str) and Person.model_validate_json(content)


def test_tool_call() -> None:
    tools = [FunctionTool(weather, description="Tells the weather.", strict=True)]
    calls = create(tools=tools, tool_choice="required").content
    assert not isinstance(calls, str) and calls[0].name == "weather"


def test_agent_with_a_tool() -> None:
    async def run() -> Any:
        agent = AssistantAgent(
            "a", model_client=client(), tools=[weather], model_client_stream=True, reflect_on_tool_use=True
        )
        return await agent.run(task="How is the weather in Paris?")

    assert asyncio.run(run()).messages[-1].to_text()


def test_agent_with_an_object() -> None:
    async def run() -> Any:
        return await AssistantAgent("a", model_client=client(), output_content_type=Person).run(task="Ada is 36.")

    assert isinstance(asyncio.run(run()).messages[-1].content, Person)


def test_team() -> None:
    async def run() -> Any:
        agents = [AssistantAgent(name, model_client=client()) for name in ("writer", "critic")]
        team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(4))
        return await team.run(task="Write a poem.")

    assert len(asyncio.run(run()).messages) >= 4
