"""Structural tags, by what the grammar that they become takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


def call(arguments: dict[str, Any]) -> dict[str, Any]:
    return tag(arguments, "<f>\n", "\n</f>")


A, B = ({"type": "const_string", "value": text} for text in "AB")
DEFS: dict[str, Any] = {"$defs": {"n": {"type": "integer"}}}


def after_thought(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [{"type": "optional", "content": THOUGHT}, form]}


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
    (tag({"type": "regex", "pattern": "[a-z]+"}, end=""), ["<t>abc"], ["abc", "<t>", "<t>a</t>"]),
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
    (
        {"type": "triggered_tags", "triggers": ["<t>", "<x>"], "tags": [tag(NUMBER)]},
        ["a <x> b <t>1</t>"],
        ["<x><t>x"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag(NUMBER)], "separator": ""},
        ["", "<t>1</t><t>2</t>"],
        ["<t>1</t>,"],
    ),
    ({"type": "json_schema", "json_schema": True}, ["1", '{"a": [null]}'], ["", "a"]),
    ({"type": "regex", "pattern": "a\nb"}, ["a\nb"], ["anb", "ab"]),
    ({"type": "regex", "pattern": re.escape("a\nb/")}, ["a\nb/"], ["a\\nb/", "ab/"]),
    ({"type": "regex", "pattern": "[\\\n/]"}, ["\n", "/"], ["\\", "n"]),
    (tag(TEXT, end="\n."), ["<t>a\nb\n."], ["<t>a\nb\nc", "<t>an."]),
    (after_thought({"type": "or", "elements": [A, tag(NUMBER)]}), ["A", "<t>7</t>", "so</think>A"], ["so A", "B"]),
    (after_thought({"type": "sequence", "elements": [{"type": "star", "content": A}, B]}), ["AAB", "B"], ["A", "so B"]),
    (after_thought({"type": "sequence", "elements": [A, B]}), ["AB", "B</think>AB"], ["B", "A</think>AB"]),
    (after_thought(tag(A, begin="")), ["A</t>", "so[/THINK]A</t>"], ["so A</t>"]),
    (
        after_thought({"type": "tags_with_separator", "tags": [tag(NUMBER)], "separator": "", "at_least_one": True}),
        ["<t>1</t>", "so</think><t>1</t>"],
        ["so <t>1</t>"],
    ),
    (call(xml({})), ["<f>\n\n</f>"], ["<f>\n<parameter=a>\n1\n</parameter>\n</f>"]),
    (
        call(xml({"a": {"type": "string"}, "b": {"$ref": "#/$defs/n"}}, required=["b"], **DEFS)),
        [
            "<f>\n<parameter=b>\n1\n</parameter>\n</f>",
            "<f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n1\n</parameter>\n</f>",
        ],
        [
            "<f>\n\n</f>",
            "<f>\n<parameter=a>\nx\n</parameter>\n</f>",
            "<f>\n<parameter=b>\nx\n</parameter>\n</f>",
        ],
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), CASES)
def test_a_format_takes_what_it_says(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(form)
    for text in good:
        assert takes(grammar, text), text
    for text in bad:
        assert not takes(grammar, text), text


def test_a_pattern_that_ends_within_an_escape_is_refused() -> None:
    ends = {"type": "regex", "pattern": "a\\"}
    regex = spec_of(regex=ends["pattern"])
    for form in (ends, tag(ends), {"type": "sequence", "elements": [ends, ends]}):
        with pytest.raises(InvalidRequest, match=r"structural_tag cannot be used: .* ends with"):
            grammar_of(form)
    with pytest.raises(InvalidRequest, match=r"regex cannot be used: .* ends with"):
        make_compiler("llguidance", VOCABULARY).compile(regex)
    assert takes(grammar_of({"type": "regex", "pattern": r"a\\"}), "a\\")


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
        ({**tag(TEXT), "end": ["</t>", "a<special>"]}, "must be at its beginning"),
        ({**tag(TEXT), "end": ["</t>", 1]}, "end must be a text or a list"),
        ({"type": "const_string", "value": ""}, "value must be a text that is not empty"),
        ({"type": "triggered_tags", "triggers": [5], "tags": []}, "triggers must be texts"),
        ({"type": "tags_with_separator", "tags": [], "separator": ""}, "tags must not be empty"),
        ({"type": "any_text", "more": 1}, "unknown field 'more'"),
        (tag({"type": "any_text", "excludes": ["x"]}), "must be among the ends"),
        ({"type": "sequence", "elements": [TEXT, NUMBER]}, "any_text must be the last element"),
        (
            {"type": "sequence", "elements": [{"type": "sequence", "elements": [TEXT]}, NUMBER]},
            "any_text must be the last",
        ),
        ({"type": "star", "content": TEXT}, "any_text must be the last element"),
        (
            {"type": "sequence", "elements": [{"type": "triggered_tags", "triggers": ["<t>"], "tags": []}, NUMBER]},
            "triggered_tags must be the last element",
        ),
        ({"type": "triggered_tags", "triggers": ["<x>"], "tags": [tag(NUMBER)]}, "begins with none of the triggers"),
        ({"type": "triggered_tags", "triggers": [""], "tags": []}, "triggers must be texts"),
        ({"type": "tags_with_separator", "tags": [NUMBER], "separator": ""}, "must have type tag"),
        ({"type": "json_schema", "json_schema": 1}, "a JSON schema must be an object"),
        ({"structures": [{"begin": "a"}], "triggers": [], "format": TEXT}, "exactly one of"),
        ({"structures": [{"opening": "a"}], "triggers": []}, "but begin, schema and end, got {'opening': 'a'}"),
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


def test_an_empty_special_text_marks_nothing() -> None:
    given = json.dumps({"format": tag(TEXT)})
    assert lark_of(given, {"": 5}, {}) == lark_of(given, {}, {})


DEEPER: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "or": lambda form: {"type": "or", "elements": [form]},
    "sequence": lambda form: {"type": "sequence", "elements": [form]},
    "optional": lambda form: {"type": "optional", "content": form},
    "tag": lambda form: tag(form, end=""),
    "separated": lambda form: {"type": "tags_with_separator", "tags": [tag(form)], "separator": ""},
    "triggered": lambda form: {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag(form, end="")]},
    "repeated": lambda form: {"type": "sequence", "elements": [{"type": "star", "content": form}]},
}


@pytest.mark.parametrize("kind", DEEPER)
def test_a_deep_format_is_refused(kind: str) -> None:
    form: dict[str, Any] = NUMBER
    for _ in range(100):
        form = DEEPER[kind](form)
    with pytest.raises(InvalidRequest, match="nested at most"):
        grammar_of(form)
    with pytest.raises(ValueError, match="nested at most"):
        lark_of(json.dumps({"format": form}), {}, {})
