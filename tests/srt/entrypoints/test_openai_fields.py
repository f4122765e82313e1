"""The types that OpenAI publishes with its library: each of their fields is honoured or refused by name here."""

from __future__ import annotations

from typing import Any

import pytest
from fake_http import Site

openai = pytest.importorskip("openai", reason="the extra `test` has the openai library")

from openai.types import chat, completion_create_params  # noqa: E402  (after importorskip)
from openai.types.chat import completion_create_params as chat_create_params  # noqa: E402
from openai.types.responses import ToolChoiceAllowedParam, ToolChoiceFunctionParam  # noqa: E402
from openai.types.responses import response_create_params as responses_create_params  # noqa: E402
from openai.types.shared_params import FunctionDefinition  # noqa: E402

from tercet.srt.entrypoints.openai.chat_protocol import ChatBody, Message, TextPart  # noqa: E402
from tercet.srt.entrypoints.openai.completion_protocol import CompletionBody  # noqa: E402
from tercet.srt.entrypoints.openai.protocol import StreamOptions  # noqa: E402
from tercet.srt.entrypoints.openai.responses_protocol import ResponsesBody, ResponsesToolChoice  # noqa: E402
from tercet.srt.entrypoints.openai.tool_protocol import (  # noqa: E402
    AllowedTools,
    Function,
    GivenToolCall,
    NamedTool,
    ToolChoice,
)
from tercet.srt.entrypoints.wire import Wire, fields_of  # noqa: E402

HI = {"role": "user", "content": "hi"}
BODIES: list[tuple[type[Wire], Any, str, dict[str, Any]]] = [
    (
        ChatBody,
        chat_create_params.CompletionCreateParamsStreaming,
        "/v1/chat/completions",
        {"messages": [HI], "max_tokens": 1},
    ),
    (
        CompletionBody,
        completion_create_params.CompletionCreateParamsStreaming,
        "/v1/completions",
        {"prompt": "a", "max_tokens": 1},
    ),
    (
        ResponsesBody,
        responses_create_params.ResponseCreateParamsStreaming,
        "/v1/responses",
        {"input": "a", "max_output_tokens": 1},
    ),
]
PARTS: list[tuple[type[Wire], Any]] = [
    (StreamOptions, chat.ChatCompletionStreamOptionsParam),
    (Function, FunctionDefinition),
    (GivenToolCall, chat.ChatCompletionMessageFunctionToolCallParam),
    (ToolChoice, chat.ChatCompletionNamedToolChoiceParam),
    (ToolChoice, chat.ChatCompletionAllowedToolChoiceParam),
    (AllowedTools, chat.ChatCompletionAllowedToolsParam),
    (NamedTool, chat.ChatCompletionNamedToolChoiceParam),
    (ResponsesToolChoice, ToolChoiceFunctionParam),
    (ResponsesToolChoice, ToolChoiceAllowedParam),
    (TextPart, chat.ChatCompletionContentPartTextParam),
    (TextPart, chat.ChatCompletionContentPartImageParam),
    (TextPart, chat.ChatCompletionContentPartInputAudioParam),
    (TextPart, chat.ChatCompletionContentPartRefusalParam),
    *(
        (Message, getattr(chat, f"ChatCompletion{role}MessageParam"))
        for role in ("Assistant", "User", "System", "Developer", "Tool", "Function")
    ),
]


def published(typed_dict: Any) -> set[str]:
    """The fields of a TypedDict, inherited ones included. Reading their types would take seconds."""
    return set(typed_dict.__required_keys__ | typed_dict.__optional_keys__)


@pytest.mark.parametrize(("ours", "theirs"), [(one[0], one[1]) for one in BODIES] + PARTS)
def test_every_published_field_is_declared(ours: type[Wire], theirs: Any) -> None:
    fields = published(theirs)
    assert fields, theirs
    assert fields <= {field.name for field in fields_of(ours)}


def test_marks_of_prefixes_are_taken_because_prefixes_are_cached_anyway(site: Site) -> None:
    marks: dict[str, Any] = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    tool = {"type": "function", "function": {"name": "f"}}
    message = {**HI, "content": [{"type": "text", "text": "hi", **marks}], "cache_control": marks["cache_control"]}
    body = {"messages": [message], "tools": [{**tool, "cache_control": marks["cache_control"]}], "max_tokens": 1}
    site.good("/v1/chat/completions", body)
    site.good("/v1/chat/completions", {"messages": [HI], "tools": [tool], "max_tokens": 1})
    item = {"role": "user", "content": [{"type": "input_text", "text": "hi", **marks}]}
    site.good("/v1/responses", {"input": [item], "max_output_tokens": 1})
    first, plain, _ = site.scheduler.prompt_texts()
    assert first == plain
    marks["cache_control"]["ttl"] = "1h"
    message = {**HI, "content": [{"type": "text", "text": "hi", **marks}]}
    site.good("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
    asks_more = {"type": "text", "text": "hi", "cache_control": {"type": "persistent"}}
    error = site.refused("/v1/chat/completions", {"messages": [{**HI, "content": [asks_more]}]})
    assert "cache_control is not supported" in error["message"]


@pytest.mark.parametrize(("ours", "theirs", "path", "base"), BODIES)
def test_every_published_field_is_honoured_or_refused_by_name(
    site: Site, ours: type[Wire], theirs: Any, path: str, base: dict[str, Any]
) -> None:
    """A value that is wrong for every field: nothing takes it in silence. test_fields_arrive.py has the effects."""
    for name in published(theirs):
        error = site.refused(path, {**base, name: [[{"not": "a value"}]]})
        assert (error["param"] or "").split("[")[0].split(".")[0] == name, (name, error)
    assert site.scheduler.received == []


@pytest.mark.parametrize("message_type", [chat.ChatCompletionMessage, chat.ParsedChatCompletionMessage])
def test_what_model_dump_gives_back_is_taken(site: Site, message_type: Any) -> None:
    """The commonest agent loop: the whole message of an answer goes into the next request."""
    answer = chat.ChatCompletion.model_validate(
        site.good("/v1/chat/completions", {"messages": [HI], "max_tokens": 1, "return_token_ids": True})
    )
    message = message_type.model_validate(answer.choices[0].message.model_dump()).model_dump()
    assert {"refusal", "annotations", "audio", "function_call", "tool_calls"} <= set(message)
    site.good("/v1/chat/completions", {"messages": [HI, message, HI], "max_tokens": 1})
    assert site.scheduler.prompt_texts()[-1] == "<user>hi\n<assistant>one\n<user>hi\n<assistant>"
