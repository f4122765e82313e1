"""Tools that the model may call, beside a grammar of the answer: the answer is calls, or it follows that grammar."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site

from tercet.srt.entrypoints.openai import chat
from tercet.srt.entrypoints.openai.tools import constrained
from tercet.srt.entrypoints.routing import SMALL_BODY_BYTES

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'


def tool(**fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def elements(site: Site) -> list[Any]:
    """The ways that the last answer had."""
    form = json.loads(site.scheduler.received[-1].options.sampling.structural_tag or "")["format"]
    assert form["type"] == "or"
    return list(form["elements"])


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        (FORMAT, {"type": "json_schema", "json_schema": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"json_schema": json.dumps(SCHEMA)}, {"type": "json_schema", "json_schema": SCHEMA}),
        ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"type": "regex", "pattern": "a|b"}),
    ],
)
@pytest.mark.parametrize("strict", [None, True])
def test_an_answer_is_calls_or_follows_the_grammar(
    site: Site, fields: dict[str, Any], other: dict[str, Any], strict: bool | None
) -> None:
    body = {**ASK, "tools": [tool(strict=strict)], **fields}
    site.scheduler.say(CALL)
    (choice,) = site.good(CHAT, body)["choices"]
    calls, given = elements(site)
    assert given == other and calls["stop_after_first"] is False
    (tag,) = calls["tags"]
    assert ("properties" in tag["content"]["json_schema"]) is bool(strict)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "b"}'}
    site.scheduler.say('{"x": 1}')
    assert site.good(CHAT, body)["choices"][0]["message"] == {"role": "assistant", "content": '{"x": 1}'}


def test_a_response_is_calls_or_has_its_format(site: Site) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    body = {"input": "hi", "tools": [{"type": "function", "name": "f", "strict": True}], "text": {"format": schema}}
    site.good(RESPONSES, {**body, "parallel_tool_calls": False})
    calls, given = elements(site)
    assert given["json_schema"] == SCHEMA and calls["stop_after_first"] is True


def test_without_calls_the_grammar_is_the_clients(site: Site) -> None:
    for fields in ({"tools": [tool()], "tool_choice": "none"}, {"tools": []}, {}):
        site.good(CHAT, {**ASK, **FORMAT, **fields})
        sampling = site.scheduler.received[-1].options.sampling
        assert sampling.structural_tag is None and json.loads(sampling.json_schema or "") == SCHEMA
    tag = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
    site.good(CHAT, {**ASK, "tools": [tool()], "response_format": tag})
    assert json.loads(site.scheduler.received[-1].options.sampling.structural_tag or "") == tag, (
        "it says what calls are"
    )


def test_a_required_call_has_no_text_in_a_format(site: Site) -> None:
    """The client instructor sends both to /v1/responses."""
    for fields in (FORMAT, {"response_format": {"type": "json_object"}}):
        site.good(CHAT, {**ASK, "tools": [tool()], "tool_choice": "required", **fields})
    schema = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    choice = {"type": "function", "name": "f"}
    site.good(
        RESPONSES,
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": choice,
            "text": {"format": schema},
        },
    )
    for received in site.scheduler.received:
        form = json.loads(received.options.sampling.structural_tag or "")["format"]
        assert form["type"] == "tags_with_separator" and received.options.sampling.json_schema is None
    assert len(site.scheduler.received) == 3


def test_what_cannot_stand_beside_calls_is_refused(site: Site) -> None:
    tag = {"type": "structural_tag", "structures": [], "triggers": ["<a>"]}
    for fields, param, says in (
        (
            {"json_schema": json.dumps(SCHEMA), "tool_choice": "required"},
            "json_schema",
            "beside a required call: both constrain",
        ),
        ({"response_format": tag, "tool_choice": "required"}, "response_format", "beside a required call"),
        ({"response_format": tag, "tools": [tool(strict=True)]}, "response_format", "beside strict functions or"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", "not possible beside tools"),
        ({"json_schema": "{"}, "json_schema", "not JSON"),
        ({"json_schema": "[" * 10_000}, "json_schema", "not JSON"),
        ({"regex": "bad"}, "regex", "bad"),
    ):
        error = site.refused(CHAT, {**ASK, "tools": [tool()], **fields})
        assert error["param"] == param and says in error["message"]
    assert site.scheduler.received == []


@pytest.mark.parametrize(
    ("fields", "param"), [(FORMAT, "response_format"), ({"tool_choice": "required"}, "tool_choice"), ({}, "tools")]
)
def test_a_too_large_grammar_names_a_field_that_the_client_has_sent(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    large = {"type": "object", "properties": {f"x{i}": {"type": "string"} for i in range(10000)}}
    error = site.refused(CHAT, {**ASK, "tools": [tool(strict=True, parameters=large)], **fields})
    assert error["param"] == param and f"{param} must be at most 131072 bytes" in error["message"]


def test_another_wrong_field_keeps_its_name(site: Site) -> None:
    error = site.refused(CHAT, {**ASK, "tools": [tool(strict=True)], "temperature": -1})
    assert error["param"] == "temperature" and error["message"].startswith("temperature must")


def test_a_large_schema_is_decoded_in_a_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noting(*given: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return constrained(*given)

    monkeypatch.setattr(chat, "constrained", noting)
    for size in (0, SMALL_BODY_BYTES):
        text = json.dumps({**SCHEMA, "title": "x" * size})
        site.post(CHAT, {**ASK, "tools": [tool()], "json_schema": text})
    assert threads == [True, False]


@pytest.mark.parametrize("parser", ["llama3_json", "pythonic", "gemma", "gpt-oss"])
def test_a_format_whose_calls_no_grammar_tells_from_json_is_refused(parser: str) -> None:
    site = Site(tool_call_parser=parser)
    error = site.refused(CHAT, {**ASK, "tools": [tool()], **FORMAT})
    assert error["param"] == "response_format" and parser in error["message"] and "tool_choice none" in error["message"]
    site.good(CHAT, {**ASK, "tools": [tool()], "tool_choice": "none", **FORMAT})
    site.close()


def test_the_choice_comes_after_reasoning_only_if_a_token_ends_it() -> None:
    site = Site(reasoning_parser="deepseek-r1")
    site.scheduler.say(CALL)
    message = site.good(CHAT, {**ASK, "tools": [tool()], **FORMAT})["choices"][0]["message"]
    assert message["tool_calls"] and message.get("reasoning_content") is None
    site.close()
