# requires: haystack-ai==3.4.1 pytest==9.2.0
"""Haystack: texts, streams, objects, tools, an agent and embeddings, over chat completions and over responses."""

from __future__ import annotations

import os
from typing import Any

import pydantic
from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

SERVER: dict[str, Any] = {
    "api_base_url": os.environ["TERCET_URL"] + "/v1",
    "api_key": Secret.from_token("-"),
    "model": os.environ["TERCET_MODEL"],
}
ASK = [ChatMessage.from_user("Ada is 36 years old. Name three colours.")]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


@tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city}."


def chat(streaming_callback: Any = None, **settings: Any) -> OpenAIChatGenerator:
    settings = {"temperature": 0, "max_tokens": 80, **settings}
    return OpenAIChatGenerator(**SERVER, streaming_callback=streaming_callback, generation_kwargs=settings)


def responses(streaming_callback: Any = None, **settings: Any) -> OpenAIResponsesChatGenerator:
    settings = {"max_output_tokens": 80, **settings}
    return OpenAIResponsesChatGenerator(**SERVER, streaming_callback=streaming_callback, generation_kwargs=settings)


def test_several_texts() -> None:
    replies = chat(n=2, logprobs=True, top_logprobs=1).run(ASK)["replies"]
    assert len(replies) == 2 and all(reply.text for reply in replies)


def test_stream() -> None:
    parts: list[Any] = []
    (reply,) = chat(parts.append, stream_options={"include_usage": True}).run(ASK)["replies"]
    assert reply.text and len(parts) > 2 and reply.meta["usage"]["completion_tokens"] > 0


def test_object_by_schema() -> None:
    (reply,) = chat(response_format=Person).run(ASK)["replies"]
    assert Person.model_validate_json(reply.text)


def test_tool_call() -> None:
    (reply,) = chat(tool_choice="required").run(ASK, tools=[weather], tools_strict=True)["replies"]
    assert reply.tool_calls[0].tool_name == "weather"


def test_agent() -> None:
    agent = Agent(chat_generator=chat(), tools=[weather], max_agent_steps=3)
    assert agent.run(messages=[ChatMessage.from_user("How is the weather in Paris?")])["messages"]


def test_embeddings() -> None:
    assert OpenAITextEmbedder(**SERVER).run("a")["embedding"]
    documents = OpenAIDocumentEmbedder(**SERVER).run([Document(content="a"), Document(content="b")])["documents"]
    assert all(document.embedding for document in documents)


def test_responses() -> None:
    (reply,) = responses().run(ASK)["replies"]
    assert reply.text


def test_responses_with_a_tool_as_a_stream() -> None:
    (reply,) = responses(lambda _: None, tool_choice="required").run(ASK, tools=[weather])["replies"]
    assert reply.tool_calls[0].tool_name == "weather"
