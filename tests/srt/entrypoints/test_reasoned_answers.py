"""Reasoning before an answer that has a grammar, and in an answer that continues a message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import VOCAB_SIZE, Site, byte_tokenizer

from tercet.srt.grammar_spec import ANYTHING, ReasoningSpan

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
THINK, UNTHINK = 1, 2
JSON_WAYS = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"regex": r"\{\}"},
    {"ebnf": 'root ::= "{}"'},
    {"structured_outputs": {"json": SCHEMA}},
]


def site_of(parser: str) -> Site:
    """A server of a model whose marks are tokens."""
    site = Site(reasoning_parser=parser)
    tokenizer = byte_tokenizer()
    tokenizer.token_to_id = {"<think>": THINK, "</think>": UNTHINK}.get  # type: ignore[method-assign]
    site.manager.inputs.tokenizer = tokenizer
    return site


@pytest.fixture
def site() -> Iterator[Site]:
    site = site_of("deepseek-r1")
    yield site
    site.close()


def message_of(site: Site, **fields: Any) -> tuple[Any, Any]:
    """Content and reasoning, which must be the same in a stream."""
    message = site.good(CHAT, {**ASK, **fields})["choices"][0]["message"]
    choices = [event["choices"][0] for event in site.stream(CHAT, {**ASK, **fields})]
    deltas = [choice["delta"] for choice in choices if choice["index"] == 0]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    return message["content"], message.get("reasoning_content")


def span_of(site: Site) -> ReasoningSpan | None:
    return site.scheduler.received[-1].options.reasoning


@pytest.mark.parametrize("fields", JSON_WAYS)
def test_a_grammar_begins_after_the_reasoning(site: Site, fields: dict[str, Any]) -> None:
    site.scheduler.say("I think", "</think>", "{}")
    assert message_of(site, n=2, **fields) == ("{}", "I think")
    assert span_of(site) == ReasoningSpan((THINK,), (UNTHINK,), inside=True)
    assert site.scheduler.received[-1].options.sampling.grammar is not None
    site.good(CHAT, ASK)
    assert span_of(site) is None, "without a grammar"


def test_the_reasoning_may_have_a_limit(site: Site) -> None:
    site.scheduler.say("I think", "</think>", "{}")
    limited = ReasoningSpan((THINK,), (UNTHINK,), inside=True, max_tokens=5)
    for fields in ({}, *JSON_WAYS, {"tools": TOOLS, "tool_choice": "required"}):
        assert message_of(site, **fields, thinking_token_budget=5)[1] == "I think"
        assert span_of(site) == limited
    options = site.scheduler.received[-1].options
    assert options.grammar == options.sampling.grammar
    site.good(CHAT, {**ASK, "thinking_token_budget": 0})
    options = site.scheduler.received[-1].options
    assert options.reasoning is not None and options.reasoning.max_tokens == 0 and options.grammar == ANYTHING
    thinking = {"type": "enabled", "budget_tokens": 5}
    site.good("/v1/messages", {**ASK, "max_tokens": 9, "thinking": thinking})
    assert span_of(site) == limited
    site.good(CHAT, {**ASK, "thinking_token_budget": 5, "chat_template_kwargs": {"mood": "</think>"}})
    assert span_of(site) is None and site.scheduler.received[-1].options.grammar is None, "there is no reasoning"


def test_where_reasoning_can_have_no_limit(site: Site) -> None:
    plain, granite = Site(), site_of("granite")  # marks that are no tokens
    beyond = site_of("qwen3")  # the token has no logit
    beyond.manager.inputs.tokenizer.token_to_id = {"</think>": VOCAB_SIZE}.get  # type: ignore[union-attr, method-assign]
    body = {**ASK, "thinking_token_budget": 5}
    for one in (plain, granite, beyond):
        error = one.refused(CHAT, body)
        assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_field")
        one.good("/v1/messages", {**ASK, "max_tokens": 2, "thinking": {"type": "enabled", "budget_tokens": 5}})
        assert span_of(one) is None, "clients send a budget to every model"
        one.close()
    assert "separate_reasoning" in site.refused(CHAT, {**body, "separate_reasoning": False})["message"]
    assert "at least 0" in site.refused(CHAT, {**body, "thinking_token_budget": -1})["message"]
    thinking = {"type": "enabled", "budget_tokens": -1}
    error = site.refused("/v1/messages", {**ASK, "max_tokens": 2, "thinking": thinking})
    assert (error["param"], error["message"]) == (
        "thinking.budget_tokens",
        "thinking.budget_tokens must be at least 0, got -1",
    )


def test_a_response_with_a_format_has_reasoning_and_text(site: Site) -> None:
    site.scheduler.say("I think", "</think>", "{}")
    schema = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    output = site.good(RESPONSES, {"input": "hi", "text": {"format": schema}})["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["text"] == "{}" and span_of(site) is not None


def test_a_response_counts_the_tokens_of_its_reasoning(site: Site) -> None:
    site.scheduler.say("I", " think", "</think>", "Hi")  # the third token has the id UNTHINK
    whole, last = site.good(RESPONSES, {"input": "hi"}), site.stream(RESPONSES, {"input": "hi"})[-1]["response"]
    assert whole["usage"] == last["usage"]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 3} and whole["usage"]["output_tokens"] == 4


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tools": [{**TOOLS[0], "function": {"name": "f", "strict": True}}]}]
)
def test_a_constrained_call_comes_after_the_reasoning(site: Site, fields: dict[str, Any]) -> None:
    site.scheduler.say("I think", "</think>", CALL)
    message = site.good(CHAT, {**ASK, "tools": TOOLS, **fields})["choices"][0]["message"]
    assert message["reasoning_content"] == "I think" and message["tool_calls"][0]["function"]["name"] == "f"
    assert span_of(site) == ReasoningSpan((THINK,), (UNTHINK,), inside=True)


def test_the_prompt_can_open_and_close_the_reasoning(site: Site) -> None:
    qwen3 = site_of("qwen3")
    for one, mood, inside in (
        (qwen3, "", False),
        (qwen3, "<think>\n", True),
        (qwen3, "<think>\n\n</think>\n\n", None),
        (site, "</think>", None),
    ):
        one.good(CHAT, {**ASK, **JSON_WAYS[0], "chat_template_kwargs": {"mood": mood}})
        span = span_of(one)
        assert (None if span is None else span.inside) is inside
    qwen3.close()


def test_a_continued_message_is_content_or_reasoning(site: Site) -> None:
    parts = [{"type": "text", "text": text} for text in ("<think>I</thi", "nk>", "It is")]
    for said, expected in (("It is", ("{}", None)), ("<think>I", (None, "{}")), (parts, ("{}", None))):
        messages = [*ASK["messages"], {"role": "assistant", "content": said}]
        site.scheduler.say("{}")
        body = {"messages": messages, "continue_final_message": True}
        content, reasoning = message_of(site, **body)
        assert (content or None, reasoning) == expected
        site.good(CHAT, {**body, **JSON_WAYS[0]})
        assert (span_of(site) is None) == (expected[1] is None)


def test_without_separation_the_whole_answer_follows_the_grammar(site: Site) -> None:
    site.scheduler.say("{}")
    assert message_of(site, separate_reasoning=False, **JSON_WAYS[0]) == ("{}", None)
    assert span_of(site) is None


@pytest.mark.parametrize("parser", ["deepseek-r1", "granite", "gpt-oss", "qwen3"])
@pytest.mark.parametrize("fields", [*JSON_WAYS, {"tools": TOOLS, "tool_choice": "required"}])
def test_without_a_token_that_ends_the_reasoning_the_grammar_begins_at_once(
    parser: str, fields: dict[str, Any]
) -> None:
    site = Site(reasoning_parser=parser)
    site.scheduler.say(CALL if "tools" in fields else "{}")
    body = {**ASK, **fields, "chat_template_kwargs": {"mood": "<think>\n"}}
    message = site.good(CHAT, body)["choices"][0]["message"]
    assert (message["content"] or json.dumps([call["function"]["name"] for call in message["tool_calls"]])) in (
        "{}",
        '["f"]',
    )
    assert message.get("reasoning_content") is None and span_of(site) is None
    site.close()


def test_a_structural_tag_has_room_for_reasoning_whose_end_is_no_token() -> None:
    site = Site(reasoning_parser="qwen3")
    site.scheduler.say("<think>I</think>", "Hi")
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
    fields = {"response_format": {"type": "structural_tag", **tag}}
    assert message_of(site, **fields) == ("Hi", "I") and span_of(site) is None
    site.close()
