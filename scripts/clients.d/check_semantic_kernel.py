# requires: semantic-kernel==1.45.0 pytest==9.2.0
"""Microsoft's Semantic Kernel: texts, streams, objects, functions, an agent and embeddings."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import openai
import pydantic
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.functions import KernelArguments, kernel_function

URL, NAME = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


class Weather:
    @kernel_function
    def weather(self, city: str) -> str:
        """Tells the weather of a city."""
        return f"It is sunny in {city}."


def service() -> OpenAIChatCompletion:
    return OpenAIChatCompletion(ai_model_id=NAME, async_client=openai.AsyncOpenAI(api_key="-", base_url=URL))


def settings(**more: Any) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=80, **more)


def history() -> ChatHistory:
    said = ChatHistory(system_message="Be brief.")
    said.add_user_message("Ada is 36 years old. Name three colours.")
    return said


def answers(kernel: Kernel | None = None, **more: Any) -> list[Any]:
    options = {} if kernel is None else {"kernel": kernel}
    return asyncio.run(service().get_chat_message_contents(history(), settings(**more), **options))


def test_several_texts() -> None:
    found = answers(number_of_responses=2, logprobs=True, top_logprobs=2, seed=1)
    assert len(found) == 2 and all(answer.content for answer in found)


def test_stream() -> None:
    async def parts() -> list[Any]:
        return [part async for part in service().get_streaming_chat_message_contents(history(), settings())]

    assert len(asyncio.run(parts())) > 2


def test_object_by_schema() -> None:
    assert Person.model_validate_json(answers(response_format=Person)[0].content)


def test_function_call() -> None:
    kernel = Kernel()
    kernel.add_plugin(Weather(), "local")
    choice = FunctionChoiceBehavior.Required(auto_invoke=False)
    call = answers(kernel, function_choice_behavior=choice)[0].items[0]
    assert isinstance(call, FunctionCallContent) and call.function_name == "weather"


def test_agent() -> None:
    async def run() -> Any:
        arguments = KernelArguments(settings=settings())
        agent = ChatCompletionAgent(service=service(), plugins=[Weather()], instructions="Answer.", arguments=arguments)
        return await agent.get_response("How is the weather in Paris?")

    assert asyncio.run(run()).content is not None


def test_embeddings() -> None:
    client = openai.AsyncOpenAI(api_key="-", base_url=URL)
    found = asyncio.run(OpenAITextEmbedding(ai_model_id=NAME, async_client=client).generate_embeddings(["a", "b"]))
    assert len(found) == 2
