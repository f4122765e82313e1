"""Structural tags, by what the grammar that they become takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_cases import SPECIAL, VOCABULARY, allowed, spec_of, takes

from tercet.managers.grammar import Grammar, compile_and_check
from tercet.managers.grammar_backends import make_compiler
from tercet.managers.structural_tag import lark_of
from tercet.srt.errors import InvalidRequest

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
ENDS = ["</think>", "[/THINK]"]
THOUGHT = {"type": "tag", "begin": "", "content": {"type": "any_text", "excludes": ENDS}, "end": ENDS}
SPACE = {"type": "regex", "pattern": r"\s{0,4}"}
OLDER = {
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"},
    ],
}


def tag(content: dict[str, Any], begin: str = "<t>", end: str = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def xml(properties: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, **keywords}
    return {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}


def grammar_of(form: dict[str, Any]) -> Grammar:
    given = form if "structures" in form or "format" in form else {"type": "structural_tag", "format": form}
    return compile_and_check(
        make_compiler("llguidance", VOCABULARY), spec_of(structural_tag=given), VOCABULARY.num_words
    )


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        OLDER,
        ["", "free text", 'so: <f=a>1</f> and <f=b>"x"</f>.', "<f"],
        ["<f=c>", "<f=a>x", "<f=b>1</f>", "<f=a>1</f"],
    ),
    ({"type": "const_string", "value": 'a "quote"\n/'}, ['a "quote"\n/'], ["a", ""]),
    ({"type": "regex", "pattern": "a/b+"}, ["a/b", "a/bb"], ["a"]),
    (tag(NUMBER), ["<t>12</t>"], ["12", "<t>12", "<t>x</t>"]),
    (tag(TEXT), ["<t></t>", "<t>a < b </ t</t>"], ["<t>a", "<t>a</t>b"]),
    (tag(TEXT, end=""), ["<t>", "<t>any"], ["any"]),
    (tag({"type": "regex", "pattern": "[a-z<]*"}), ["<t>abc</t>", "<t><<</t>"], ["<t>1</t>", "<t>a"]),
    (
        {"type": "sequence", "elements": [tag(TEXT, "<think>", "</think>"), NUMBER]},
        ["<think>so</think>7"],
        ["7", "<think>so</think>x"],
    ),
    ({"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "none"}]}, ["1", "none"], ["", "1none"]),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": {"type": "sequence", "elements": [THOUGHT, SPACE]}},
                {"type": "plus", "content": tag(NUMBER)},
            ],
        },
        ["so</think>\n\n<t>7</t>", "so[/THINK]<t>7</t><t>8</t>", "<t>7</t>", "so <t>1</t></think><t>7</t>"],
        ["so</think>", "so <t>7", "<t>so</think><t>7</t>"],
    ),
    (
        tag({"type": "json_schema", "style": "qwen_xml", "json_schema": CITY}, "<f>\n", "\n</f>"),
        [
            "<f>\n<parameter=city>\nany <text>\n</parameter>\n</f>",
            "<f>\n<parameter=city>\nx\n</parameter>\n<parameter=days>\n3\n</parameter>\n</f>",
            "<f>\n<parameter=city>\nx\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</f>",
        ],
        ["<f>\n<parameter=days>\n3\n</parameter>\n</f>", "<f>\n</f>", "<f>\n<parameter=city>\nx\n</parameter></f>"],
    ),
    (
        tag({"type": "json_schema", "style": "qwen_xml", "json_schema": {"type": "object"}}, "<f>\n", "\n</f>"),
        ["<f>\n\n</f>", "<f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</f>"],
        ["<f>\n<parameter=>\n1\n</parameter>\n</f>"],
    ),
    ({"type": "star", "content": tag(NUMBER)}, ["", "<t>1</t><t>2</t>"], ["<t>"]),
    (
        {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag(NUMBER)], "at_least_one": True},
        ["<t>1</t>", "a <t>1</t> b <t>2</t>"],
        ["", "a", "<t>x"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<t>"],
            "tags": [tag(NUMBER)],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["a <t>1</t>"],
        ["a", "<t>1</t>b"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag(NUMBER)], "separator": ", "},
        ["", "<t>1</t>", "<t>1</t>, <t>2</t>"],
        ["a", "<t>1</t>,", "<t>1</t><t>2</t>"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag(NUMBER)],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<t>1</t>"],
        ["", "<t>1</t>\n<t>2</t>"],
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), CASES)
def test_a_format_takes_what_it_says(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(form)
    for text in good:
        assert takes(grammar, text), text
    for text in bad:
        assert not takes(grammar, text), text


def test_a_special_token_in_a_tag_is_that_token() -> None:
    matcher = grammar_of(tag(NUMBER, begin="a<special>")).start()
    assert allowed(matcher, special=True) == {ord("a")}
    matcher.accept(ord("a"))
    assert allowed(matcher, special=True) == {SPECIAL}
    matcher.accept(SPECIAL)
    assert ord("1") in allowed(matcher, special=True)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "frog"}, "a format must have a type of"),
        ({"type": "const_string"}, "const_string has no field 'value'"),
        ({"type": "json_schema", "json_schema": {}, "style": "glm_xml"}, "style must be json or qwen_xml"),
        ({"type": "json_schema", "json_schema": False}, "allows no value"),
        (xml({"x": {"type": "string", "maxLength": 3}}), "qwen_xml does not enforce all"),
        (xml({"x": {}}, additionalProperties=True), "qwen_xml does not enforce all"),
        (xml({"x": {}}, required=5), "qwen_xml does not enforce all"),
        (xml({"x": {"enum": 5}}), "enum must be an array"),
        (xml({"x": {"enum": "ab"}}), "enum must be an array"),
        ({"type": "or", "elements": []}, "elements of or must not be empty"),
        (tag({"type": "any_text", "excludes": 5}), "excludes must be a list"),
        ({"type": "any_text", "excludes": ["x"]}, "must be among the ends"),
        ({"type": "tag", "begin": "a", "content": TEXT, "end": [1]}, "end must be a text or a list"),
        (tag(TEXT, end="a<special>"), "must be at its beginning"),
        ({"type": "any_text", "more": 1}, "unknown field 'more'"),
        ({"type": "sequence", "elements": [TEXT, NUMBER]}, "must be the last element"),
        ({"type": "triggered_tags", "triggers": ["<x>"], "tags": [tag(NUMBER)]}, "begins with none of the triggers"),
        ({"type": "triggered_tags", "triggers": [""], "tags": []}, "triggers must be texts"),
        ({"type": "tags_with_separator", "tags": [NUMBER], "separator": ""}, "must have type tag"),
        ({"type": "json_schema", "json_schema": 1}, "a JSON schema must be an object"),
        ({"structures": [{"begin": "a"}], "triggers": [], "format": TEXT}, "exactly one of"),
        ({"structures": [{"opening": "a"}], "triggers": []}, "a structure must have"),
        ({"structures": 1, "triggers": []}, "structures must be a list"),
    ],
)
def test_a_wrong_format_is_refused(form: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match="structural_tag cannot be used: ") as caught:
        grammar_of(form)
    assert says in caught.value.message


def test_a_grammar_without_special_tokens_is_plain_text() -> None:
    form = {"type": "tag", "begin": "<special>", "content": TEXT, "end": ""}
    assert '"<special>" TEXT' in lark_of(json.dumps({"format": form}), {}, {})
    assert "<[257]> TEXT" in lark_of(json.dumps({"format": form}), {"<special>": 257}, {})


def test_a_deep_format_is_refused() -> None:
    form: dict[str, Any] = NUMBER
    for _ in range(100):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(InvalidRequest, match="nested at most"):
        grammar_of(form)
