"""Which calls an answer may have, in which format they are written, and which of its marks are text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_http import TEMPLATE, Site, byte_tokenizer, with_template

from tercet.srt.grammar_spec import ReasoningSpan
from tercet.srt.text.tokenizer import Tokenizer
from tercet.srt.text.tokenizer_parts import TokenizerParts

PATH = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>{"name": "f"}</tool_call>'
PLAIN = "{{ messages[0].content }}"


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


@contextmanager
def serving(**settings: Any) -> Iterator[Site]:
    site = Site(**settings)
    try:
        yield site
    finally:
        site.close()


def form_of(site: Site) -> Any:
    tag = site.scheduler.received[-1].options.sampling.structural_tag
    return None if tag is None else json.loads(tag)["format"]


def message_of(site: Site, **fields: Any) -> dict[str, Any]:
    return dict(site.good(PATH, {**HI, **fields})["choices"][0]["message"])


def test_no_call_is_read_where_none_is_allowed() -> None:
    with serving(tool_call_parser="gpt-oss", reasoning_parser="gpt-oss") as site:
        text = '<|channel|>commentary to=functions.f<|message|>{"x": 1}<|end|>'
        site.scheduler.say(text)
        assert message_of(site, tools=[tool("f")])["tool_calls"]
        message = message_of(site, tools=[tool("f")], tool_choice="none")
        assert "tool_calls" not in message and message["content"] == text


def test_the_format_depends_on_the_functions_that_must_follow_their_schemas() -> None:
    bounded = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 3}}}
    tools = [tool("f", strict=True), tool("g", parameters=bounded)]
    with serving(tool_call_parser="qwen3_coder") as site:
        for choice, own_format in (("auto", True), ("required", False), (tool("f"), True), (tool("g"), False)):
            site.good(PATH, {**HI, "tools": tools, "tool_choice": choice})
            assert ("<function=" in json.dumps(form_of(site))) is own_format, choice


def test_allowed_functions_can_be_called_several_times_if_that_is_asked_for(site: Site) -> None:
    for parallel in (True, False):
        body = {**HI, "tools": [tool("f"), tool("g")], "tool_choice": allowed("required", "f")}
        site.good(PATH, {**body, "parallel_tool_calls": parallel})
        assert form_of(site)["stop_after_first"] is not parallel


def test_a_choice_that_is_too_large_is_named(site: Site) -> None:
    large = {"type": "object", "properties": {f"x{i}": {"type": "string"} for i in range(10000)}}
    body = {**HI, "tools": [tool("f", parameters=large, strict=True), tool("g")], "tool_choice": allowed("auto", "f")}
    assert site.refused(PATH, body)["param"] == "tool_choice"


@pytest.mark.parametrize("choice", ["required", allowed("auto", "f")])
def test_a_constrained_call_is_read_as_it_is_written_and_not_in_the_channels_of_the_reasoning(choice: Any) -> None:
    """The grammar of the call has no room for channels."""
    with serving(tool_call_parser="hermes", reasoning_parser="gpt-oss") as site:
        site.scheduler.say(CALL)
        assert message_of(site, tools=[tool("f"), tool("g")], tool_choice=choice)["tool_calls"]


def test_a_function_that_is_allowed_twice_excludes_the_others(site: Site) -> None:
    site.good(PATH, {**HI, "tools": [tool("f"), tool("g")], "tool_choice": allowed("auto", "f", "f")})
    assert len(form_of(site)["tags"]) == 1


def test_functions_that_are_allowed_need_no_grammar_in_a_format_that_has_none() -> None:
    with serving(tool_call_parser="hermes", reasoning_parser="gpt-oss") as site:
        body = {**HI, "tools": [tool("f"), tool("g")], "tool_choice": allowed("auto", "f")}
        assert site.post(PATH, body).status_code == 200


@pytest.mark.parametrize(
    ("name", "status"), [("f" * 128, 200), ("f" * 129, 400), ("get_1.x-y", 200), ("é", 400), ("f\n", 400)]
)
def test_the_name_of_a_function(site: Site, name: str, status: int) -> None:
    answer = site.post("/tokenize", {**HI, "tools": [tool(name)]})
    assert answer.status_code == status, answer.text


def test_tools_need_a_tokenizer() -> None:
    with serving(skip_tokenizer_init=True) as site:
        error = site.refused(PATH, {**HI, "tools": [tool("f")]})
        assert error["param"] == "tools" and "--skip-tokenizer-init" in error["message"]


def test_hermes_needs_no_template_with_tools() -> None:
    with serving(tool_call_parser="hermes") as site:
        site.manager.inputs.tokenizer = with_template(PLAIN)
        assert site.good("/tokenize", {**HI, "tools": [tool("f")]})["count"] > len("hi")
    with serving(tool_call_parser="mistral") as site:
        site.manager.inputs.tokenizer = with_template(PLAIN)
        assert site.refused("/tokenize", {**HI, "tools": [tool("f")]})["param"] == "tools"


def test_the_template_for_tools_shows_the_format(site: Site) -> None:
    templates = {"default": PLAIN, "tool_use": "{{ tools[0].function.name }}[TOOL_CALLS]" + PLAIN}
    parts = TokenizerParts(byte_tokenizer().backend, {}, frozenset({256}), templates)
    site.manager.inputs.tokenizer = Tokenizer(parts)
    site.scheduler.say("[TOOL_CALLS]f{}")
    assert message_of(site, tools=[tool("f")])["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_ends_that_are_special_tokens_are_no_text() -> None:
    """They are shown to the parser, and left out of the content."""
    with serving(tool_call_parser="qwen3_coder") as site:
        tokenizer = with_template("{{ tools }}{{ messages }}", "<tool_call>", "</tool_call>", "<pad>")
        site.manager.inputs.tokenizer = tokenizer
        site.scheduler.say("a</tool_call>b")
        body = {"messages": [{"role": "user", "content": "."}], "tools": [tool("f")]}
        assert site.good(PATH, body)["choices"][0]["message"]["content"] == "ab"
        assert sorted(site.scheduler.received[-1].options.shown_tokens) == [258, 259]


@pytest.mark.parametrize(("known", "has_span"), [(1, False), (2, True)])
def test_each_end_of_reasoning_must_be_a_token(known: int, has_span: bool) -> None:
    """Otherwise the scheduler could miss the end, and the grammar would never begin."""
    ends = ("Here is my response:", "Here's my response:")[:known]
    with serving(reasoning_parser="granite") as site:
        tokenizer = byte_tokenizer()
        tokenizer.token_to_id = {text: i for i, text in enumerate(ends, 1)}.get  # type: ignore[method-assign]
        site.manager.inputs.tokenizer = tokenizer
        site.good(PATH, {**HI, "response_format": {"type": "json_object"}})
        span = site.scheduler.received[-1].options.reasoning
        assert span == (ReasoningSpan((), (1, 2)) if has_span else None)


@pytest.mark.parametrize(
    ("skip", "content", "shown_tokens"), [(True, "ab", [259, 258]), (False, "a<|python_end|>b", [])]
)
def test_an_end_that_is_a_special_token_is_content_only_if_these_are(
    skip: bool, content: str, shown_tokens: list[int]
) -> None:
    with serving(tool_call_parser="pythonic") as site:
        site.manager.inputs.tokenizer = with_template(TEMPLATE, "<|python_start|>", "<|python_end|>")
        site.scheduler.say("a<|python_end|>b")
        (choice,) = site.good(PATH, {**HI, "tools": [tool("f")], "skip_special_tokens": skip})["choices"]
        assert choice["message"]["content"] == content
        assert site.scheduler.received[-1].options.shown_tokens == shown_tokens


@pytest.mark.parametrize("kind", ["object", ["object"], ["null", "object"]])
def test_parameters_are_an_object(site: Site, kind: Any) -> None:
    site.good(PATH, {**HI, "tools": [tool("f", parameters={"type": kind})]})
