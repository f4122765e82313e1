"""Every honoured field of /v1/responses has its effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_adapters import PIRATE, WITH_PIRATE
from fake_http import CONTEXT_LEN, Site
from field_tables import LIMITS, RETENTION
from field_walks import NO_EFFECT, STREAM, Effect, Seen, Table, Walk, check, sampling, tokenizer

from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.openai.responses_protocol import (
    InputItem,
    InputPart,
    NamedResponsesTool,
    ReasoningConfig,
    ResponsesBody,
    ResponsesFunction,
    ResponsesStreamOptions,
    ResponsesTool,
    ResponsesToolChoice,
    TextConfig,
)
from tercet.srt.entrypoints.openapi import body_types

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f"}
BASE: dict[str, Any] = {"input": "a", "max_output_tokens": 2}


def calls_of(seen: Seen) -> list[Any]:
    return [item for item in seen.answer["output"] if item["type"] == "function_call"]


BODY: Table = {
    "input": ("b", lambda seen: seen.prompt.startswith("<user>b")),
    "model": ("gpt", lambda seen: seen.answer["error"]["code"] == "model_not_found"),
    "instructions": ("S", lambda seen: seen.prompt.startswith("<system>S\n<user>a")),
    "stream": STREAM,
    "max_output_tokens": sampling("max_new_tokens", 5),
    "temperature": sampling("temperature", 0.5),
    "top_p": sampling("top_p", 0.25),
    "frequency_penalty": sampling("frequency_penalty", 0.5),
    "presence_penalty": sampling("presence_penalty", 0.5),
    "tools": ([TOOL], lambda seen: len(calls_of(seen)) == 2),
    "tool_choice": ("none", lambda seen: "<tools>" not in seen.prompt and calls_of(seen) == []),
    "parallel_tool_calls": (False, lambda seen: len(calls_of(seen)) == 1),
    "metadata": ({"a": "b"}, lambda seen: seen.answer["metadata"] == {"a": "b"}),
    "user": ("me", lambda seen: seen.answer["user"] == seen.req.options.tenant == "me"),
    "safety_identifier": ("me", lambda seen: seen.answer["safety_identifier"] == "me"),
    "prompt_cache_key": ("k", lambda seen: seen.answer["prompt_cache_key"] == "k"),
    **LIMITS,
    **RETENTION,
    "lora_path": ("pirate", lambda seen: seen.req.options.adapter == PIRATE.ref),
    "cache_salt": ("pepper", lambda seen: seen.req.options.cache_salt == "pepper"),
    "chat_template_kwargs": ({"mood": "!"}, lambda seen: seen.prompt.endswith("<assistant>!")),
    "text": ({"format": {"type": "nonsense"}}, lambda seen: seen.answer["error"]["param"].startswith("text.format")),
    "store": (False, lambda seen: seen.answer["store"] is False),
    "previous_response_id": (
        "resp_x",
        lambda seen: seen.answer.get("error") and seen.answer["error"]["code"] == "previous_response_not_found",
    ),
    "truncation": ("auto", lambda seen: len(seen.ids) == CONTEXT_LEN - 1),
    "reasoning": ({"effort": "high"}, lambda seen: seen.prompt.endswith("(high)")),
}
ITEM: Table = {
    "type": ("reasoning", lambda seen: seen.answer["error"]["param"] == "input[0].role"),
    "role": ("developer", lambda seen: seen.prompt.startswith("<system>a")),
    "content": ("b", lambda seen: seen.prompt.startswith("<user>b")),
    "call_id": ("c1", lambda seen: "<tool_call>c1 f{}" in seen.prompt),
    "name": ("g", lambda seen: "<tool_call>c g{}" in seen.prompt),
    "arguments": ('{"x": 1}', lambda seen: '<tool_call>c f{"x": 1}' in seen.prompt),
    "namespace": ("n", lambda seen: "<tool_call>c n__f{}" in seen.prompt),
    "output": ("42", lambda seen: "<tool>42(c)" in seen.prompt),
    "summary": ([{"type": "summary_text", "text": "why"}], lambda seen: "[why]" in seen.prompt),
}
PART: Table = {
    "type": ("input_image", lambda seen: "input_image" in seen.answer["error"]["message"]),
    "text": ("b", lambda seen: seen.prompt.startswith("<user>b")),
}
RESPONSES_TOOL: Table = {
    "type": ("web_search", lambda seen: "web_search" in seen.answer["error"]["message"]),
    "name": ("g", lambda seen: seen.prompt.startswith('<tools>{"name": "g"}')),
    "description": ("D", lambda seen: '"description": "D"' in seen.prompt),
    "parameters": ({"type": "object"}, lambda seen: '"parameters": {"type": "object"}' in seen.prompt),
    "strict": (True, lambda seen: seen.req.options.sampling.structural_tag is not None),
}
IN_NAMESPACE: Table = {
    "type": ("web_search", lambda seen: "web_search" in seen.answer["error"]["message"]),
    "name": ("g", lambda seen: seen.prompt.startswith('<tools>{"name": "n__g"')),
    **{name: RESPONSES_TOOL[name] for name in ("description", "parameters", "strict")},
}
RESPONSES_TOOL["tools"] = ([TOOL], lambda seen: seen.prompt.startswith('<tools>{"name": "n__f"}'))
REFUSES_G: tuple[str, Effect] = ("g", lambda seen: "'g'" in seen.answer["error"]["message"])
REFUSES_CUSTOM: tuple[str, Effect] = ("custom", lambda seen: "custom" in seen.answer["error"]["message"])
NAMED_TOOL: Table = {"type": REFUSES_CUSTOM, "name": REFUSES_G}
CHOICE: Table = {
    "type": REFUSES_CUSTOM,
    "name": REFUSES_G,
    "mode": ("required", lambda seen: '"tags_with_separator"' in seen.req.options.sampling.structural_tag),
    "tools": ([TOOL], lambda seen: seen.answer["error"] is None),
}


def body(name: str, value: Any) -> dict[str, Any]:
    tools = {"tools": [TOOL]} if name in ("tool_choice", "parallel_tool_calls") else {}
    too_long = {"input": "x" * CONTEXT_LEN} if name == "truncation" else {}
    return {**BASE, **tools, **too_long, name: value}


def in_item(name: str, value: Any) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": "a", name: value}]
    if name in ("call_id", "name", "arguments", "namespace"):
        items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", name: value}]
    elif name == "output":
        items = [{"type": "function_call_output", "call_id": "c", name: value}]
    elif name == "summary":
        items = [{"type": "reasoning", name: value}, {"role": "assistant", "content": "a"}]
    return body("input", items)


def in_part(name: str, value: Any) -> dict[str, Any]:
    return in_item("content", [{"type": "input_text", "text": "a", name: value}])


def in_tool(name: str, value: Any) -> dict[str, Any]:
    if name == "tools":
        return body("tools", [{"type": "namespace", "name": "n", name: value}])
    return body("tools", [{**TOOL, name: value}])


def in_namespace(name: str, value: Any) -> dict[str, Any]:
    return in_tool("tools", [{**TOOL, name: value}])


def in_choice(name: str, value: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"type": "function", "name": "f", name: value}
    if name in ("mode", "tools"):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [TOOL], name: value}
    return body("tool_choice", choice)


def in_named(name: str, value: Any) -> dict[str, Any]:
    return in_choice("tools", [{**TOOL, name: value}])


WALKS = [
    Walk(PATH, ResponsesBody, BODY, body),
    Walk(PATH, InputItem, ITEM, in_item),
    Walk(PATH, InputPart, PART, in_part),
    Walk(PATH, ResponsesTool, RESPONSES_TOOL, in_tool),
    Walk(PATH, ResponsesFunction, IN_NAMESPACE, in_namespace),
    Walk(PATH, NamedResponsesTool, NAMED_TOOL, in_named),
    Walk(PATH, ResponsesToolChoice, CHOICE, in_choice),
    Walk(PATH, TextConfig, {"format": BODY["text"]}, lambda _, value: body("text", value)),
    Walk(PATH, ReasoningConfig, {"effort": BODY["reasoning"]}, lambda _, value: body("reasoning", value)),
]


@pytest.fixture
def site() -> Iterator[Site]:
    """Two tokens say two calls."""
    site = Site(response_store_mib=1, **WITH_PIRATE)
    site.scheduler.words = ("h", "m" + '<tool_call>{"name": "f"}</tool_call>' * 2)
    site.manager.inputs.tokenizer = tokenizer()
    yield site
    site.close()


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.cls.__name__)
def test_every_honoured_field_arrives(site: Site, walk: Walk) -> None:
    check(site, walk, labels=NO_EFFECT - set(BODY) | {"id", "status"})


def test_every_type_of_object_is_walked() -> None:
    here = [one for one in ENDPOINTS if one.path == PATH]
    assert {walk.cls for walk in WALKS} | {ResponsesStreamOptions} == set(body_types(here))


def test_what_libraries_of_agents_ask_about_reasoning(site: Site) -> None:
    """A summary if the server has one, and reasoning in a form that they can send back."""
    fields = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    assert site.good(PATH, {**BASE, **fields})["reasoning"]["summary"] == "auto"
    for other in ({"reasoning": {"summary": "detailed"}}, {"include": ["message.output_text.logprobs"]}):
        assert site.refused(PATH, {**BASE, **other})["code"] == "unsupported_field"
