"""Every honoured field of /v1/messages and /v1/messages/count_tokens has its effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_adapters import PIRATE, WITH_PIRATE
from fake_http import TEMPLATE, Site, with_template
from field_tables import LIMITS, RETENTION
from field_walks import STREAM, Effect, Seen, Table, Walk, check, sampling

from tercet.srt.entrypoints.anthropic.messages_protocol import (
    ContentBlock,
    CountTokensBody,
    InputMessage,
    MessagesBody,
    MessagesTool,
    MessagesToolChoice,
    Metadata,
    OutputConfig,
    OutputFormat,
    ResultPart,
    Thinking,
)
from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.openapi import body_types

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
USER: dict[str, Any] = {"role": "user", "content": "a"}
BASE: dict[str, Any] = {"messages": [USER], "max_tokens": 2}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


def calls_of(seen: Seen) -> list[Any]:
    return [block for block in seen.answer["content"] if block["type"] == "tool_use"]


def refuses(text: str) -> Effect:
    return lambda seen: text in seen.answer["error"]["message"]


def counts(more: int) -> Effect:
    """The prompt has this many tokens more than that of BASE."""
    return lambda seen: seen.answer["input_tokens"] == len("<user>a\n<assistant>") + more


BODY: Table = {
    "model": ("gpt", lambda seen: seen.answer["error"]["code"] == "model_not_found"),
    "system": ("S", lambda seen: seen.prompt.startswith("<system>S\n<user>a")),
    "tools": ([TOOL], lambda seen: len(calls_of(seen)) == 2),
    "tool_choice": ({"type": "none"}, lambda seen: "<tools>" not in seen.prompt and calls_of(seen) == []),
    "thinking": ({"type": "adaptive"}, lambda seen: seen.prompt.endswith("<assistant>!")),
    "output_config": ({"effort": "high"}, lambda seen: seen.prompt.endswith("(high)")),
    "chat_template_kwargs": ({"mood": "!"}, lambda seen: seen.prompt.endswith("<assistant>!")),
    "lora_path": ("pirate", lambda seen: seen.req.options.adapter == PIRATE.ref),
    "max_tokens": sampling("max_new_tokens", 5),
    "stream": STREAM,
    "stop_sequences": (["x"], lambda seen: seen.req.options.sampling.stop == ["x"]),
    "temperature": sampling("temperature", 0.5),
    "top_p": sampling("top_p", 0.25),
    "top_k": sampling("top_k", 3),
    "metadata": ({"user_id": "me"}, lambda seen: seen.req.options.tenant == "me"),
    "cache_salt": ("pepper", lambda seen: seen.req.options.cache_salt == "pepper"),
    **LIMITS,
    **RETENTION,
}
COUNTED: Table = {
    "model": BODY["model"],
    "system": ("S", counts(len("<system>S\n"))),
    "tools": ([TOOL], lambda seen: seen.answer["input_tokens"] > 40),
    "tool_choice": ({"type": "any"}, refuses("there are no tools")),
    "thinking": ({"type": "enabled"}, counts(1)),
    "output_config": ({"effort": "low"}, counts(len("(low)"))),
    "chat_template_kwargs": ({"mood": "!"}, counts(1)),
    "lora_path": ("nobody", refuses("nobody")),
}
MESSAGE: Table = {
    "role": ("system", lambda seen: seen.prompt.startswith("<system>a")),
    "content": ("b", lambda seen: seen.prompt.startswith("<user>b")),
}
BLOCK: Table = {
    "type": ("image", refuses("'image' is not supported")),
    "text": ("b", lambda seen: seen.prompt.startswith("<user>b")),
    "thinking": ("why", lambda seen: "<assistant>[why]" in seen.prompt),
    "id": ("c1", lambda seen: "<tool_call>c1 f{}" in seen.prompt),
    "name": ("g", lambda seen: "<tool_call>c g{}" in seen.prompt),
    "input": ({"x": 1}, lambda seen: '<tool_call>c f{"x": 1}' in seen.prompt),
    "tool_use_id": ("c1", lambda seen: "<tool>(c1)" in seen.prompt),
    "content": ("42", lambda seen: "<tool>42(c)" in seen.prompt),
    "is_error": (True, lambda seen: "<tool>Error: (c)" in seen.prompt),
}
PART: Table = {
    "type": ("image", refuses("'image' is not supported")),
    "text": ("b", lambda seen: "<tool>b" in seen.prompt),
}
IN_TOOL: Table = {
    "type": ("web_search_20250305", refuses("web_search")),
    "name": ("g", lambda seen: seen.prompt.startswith('<tools>{"name": "g"')),
    "description": ("D", lambda seen: '"description": "D"' in seen.prompt),
    "input_schema": ({"type": "object", "title": "T"}, lambda seen: '"title": "T"' in seen.prompt),
    "strict": (True, lambda seen: seen.req.options.sampling.structural_tag is not None),
}
CHOICE: Table = {
    "type": ("some", refuses("some")),
    "name": ("g", refuses("'g'")),
    "disable_parallel_tool_use": (True, lambda seen: len(calls_of(seen)) == 1),
}
THINKING: Table = {
    "type": ("some", refuses("some")),
    "display": (
        "omitted",
        lambda seen: seen.answer["content"][0] == {"type": "thinking", "thinking": "", "signature": ""},
    ),
}
CONFIG: Table = {
    "effort": ("high", BODY["output_config"][1]),
    "format": (SCHEMA, lambda seen: seen.req.options.sampling.json_schema == '{"type":"object"}'),
}
FORMAT: Table = {
    "type": ("text", refuses("'text'")),
    "schema": ({"title": "T"}, lambda seen: seen.req.options.sampling.json_schema == '{"title":"T"}'),
}


def body(name: str, value: Any) -> dict[str, Any]:
    tools = {"tools": [TOOL]} if name == "tool_choice" else {}
    return {**BASE, **tools, name: value}


def count_body(name: str, value: Any) -> dict[str, Any]:
    return {"messages": [USER], name: value}


def in_message(name: str, value: Any) -> dict[str, Any]:
    return body("messages", [{**USER, name: value}, USER])


def in_block(name: str, value: Any) -> dict[str, Any]:
    block, role = {"type": "text", "text": "a"}, "user"
    if name == "thinking":
        block, role = {"type": "thinking"}, "assistant"
    elif name in ("id", "name", "input"):
        block, role = CALL, "assistant"
    elif name in ("tool_use_id", "content", "is_error"):
        block = {"type": "tool_result", "tool_use_id": "c"}
    return body("messages", [{"role": role, "content": [{**block, name: value}]}, USER])


def in_part(name: str, value: Any) -> dict[str, Any]:
    return in_block("content", [{"type": "text", "text": "a", name: value}])


def in_tool(name: str, value: Any) -> dict[str, Any]:
    return body("tools", [{**TOOL, name: value}])


def in_choice(name: str, value: Any) -> dict[str, Any]:
    kind = {"type": "tool", "name": "f"} if name == "name" else {"type": "auto"}
    return body("tool_choice", {**kind, name: value})


WALKS = [
    Walk(PATH, MessagesBody, BODY, body),
    Walk(COUNT, CountTokensBody, COUNTED, count_body),
    Walk(PATH, InputMessage, MESSAGE, in_message),
    Walk(PATH, ContentBlock, BLOCK, in_block),
    Walk(PATH, ResultPart, PART, in_part),
    Walk(PATH, MessagesTool, IN_TOOL, in_tool),
    Walk(PATH, MessagesToolChoice, CHOICE, in_choice),
    Walk(PATH, Thinking, THINKING, lambda name, value: body("thinking", {"type": "enabled", name: value})),
    Walk(PATH, OutputConfig, CONFIG, lambda name, value: body("output_config", {name: value})),
    Walk(PATH, OutputFormat, FORMAT, lambda name, value: body("output_config", {"format": {**SCHEMA, name: value}})),
    Walk(PATH, Metadata, {"user_id": ("me", BODY["metadata"][1])}, lambda name, value: body("metadata", {name: value})),
]
LABELS = {"signature", "eager_input_streaming", "budget_tokens"}
"""Fields without an effect. test_reasoned_answers.py has `budget_tokens`."""


@pytest.fixture
def site() -> Iterator[Site]:
    """Two tokens say reasoning and two calls."""
    site = Site(reasoning_parser="qwen3", **WITH_PIRATE)
    site.scheduler.words = ("<think>h</think>", "m" + '<tool_call>{"name": "f"}</tool_call>' * 2)
    site.manager.inputs.tokenizer = with_template(TEMPLATE + "{% if enable_thinking and thinking %}!{% endif %}")
    yield site
    site.close()


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.cls.__name__)
def test_every_honoured_field_arrives(site: Site, walk: Walk) -> None:
    check(site, walk, labels=LABELS)


def test_every_type_of_object_is_walked() -> None:
    here = [one for one in ENDPOINTS if one.path.startswith(PATH)]
    assert {walk.cls for walk in WALKS} == set(body_types(here))


def test_a_label_changes_nothing(site: Site) -> None:
    thought = {"type": "thinking", "thinking": "why"}
    turns = [USER, {"role": "assistant", "content": [thought]}, USER]
    plain = {"messages": turns, "max_tokens": 2, "tools": [TOOL], "thinking": {"type": "enabled"}}
    labelled = {
        **plain,
        "messages": [USER, {"role": "assistant", "content": [{**thought, "signature": "s"}]}, USER],
        "tools": [{**TOOL, "eager_input_streaming": True}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    answers = [site.good(PATH, one) for one in (plain, labelled)]
    assert len({*site.scheduler.prompt_texts()}) == 1 and answers[0]["usage"] == answers[1]["usage"]
