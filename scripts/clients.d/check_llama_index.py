# requires: llama-index-llms-openai-like==0.8.1 pytest==9.2.0
"""LlamaIndex with its OpenAI-like model: completions, chats, streams, async, objects, tool calls."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pydantic
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

HI = [ChatMessage(role="user", content="Name three colours.")]


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def model(**given: Any) -> OpenAILike:
    return OpenAILike(
        model=os.environ["TERCET_MODEL"],
        api_base=os.environ["TERCET_URL"] + "/v1",
        api_key="-",
        temperature=0,
        max_tokens=100,
        max_retries=0,
        context_window=8192,
        **{"is_chat_model": True, "is_function_calling_model": True, **given},
    )


@pytest.mark.parametrize("is_chat_model", [True, False])
def test_completion(is_chat_model: bool) -> None:
    assert model(is_chat_model=is_chat_model).complete("The capital of France is").text


@pytest.mark.parametrize("is_chat_model", [True, False])
def test_completion_stream(is_chat_model: bool) -> None:
    assert len(list(model(is_chat_model=is_chat_model).stream_complete("The capital of France is"))) > 1


def test_chat() -> None:
    assert model().chat(HI).message.content


def test_chat_stream() -> None:
    whole = model().chat(HI).message.content
    assert list(model().stream_chat(HI))[-1].message.content == whole


def test_async_chat() -> None:
    assert asyncio.run(model().achat(HI)).message.content


def test_tool_call() -> None:
    def weather(city: str) -> str:
        """Tells the weather in a city."""
        return "sunny in " + city

    tool = FunctionTool.from_defaults(fn=weather)
    answer = model().chat_with_tools([tool], user_msg="How is the weather in Paris?", tool_required=True)
    (call, *_) = model().get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"


@pytest.mark.parametrize("should_use_structured_outputs", [True, False])
def test_object(should_use_structured_outputs: bool) -> None:
    llm = model(should_use_structured_outputs=should_use_structured_outputs)
    assert isinstance(llm.structured_predict(Person, PromptTemplate("Ada is 36 years old. Who is it?")), Person)
