"""Structural tags that require calls, compiled by xgrammar, accept what the readers of the formats read."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from grammar_cases import VOCABULARY, spec_of, takes
from parsed_answers import parse_answer

from tercet.managers.grammar import Grammar
from tercet.managers.grammar_backends import make_compiler
from tercet.srt.text.answer.answer_parser import AnswerFormat
from tercet.srt.text.answer.answer_text import Arguments, CallStart
from tercet.srt.text.answer.constraint import (
    calls_or,
    format_under_grammar,
    may_call,
    may_stand_beside_calls,
    must_call,
)
from tercet.srt.text.answer.tool_formats import TOOL_FORMATS
from tercet.srt.text.answer.tools import Functions

xgrammar = pytest.importorskip("xgrammar", reason="only --grammar-backend xgrammar needs it")

FUNCTIONS = Functions(
    {
        "f": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "g": {},
    }
)
ONE = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"city": "P"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=city>\nP\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"city": "P"}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"city": "P"}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"city": "P"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "qwen3_coder": ONE["qwen3_coder"]
    + "\n<tool_call>\n<function=g>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": ONE["llama3_json"] + '; {"name": "g", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "g", "arguments": {}}]',
    "deepseek_v3": ONE["deepseek_v3"].replace(
        "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


@functools.cache
def compiler() -> Any:
    vocabulary = [chr(i) for i in range(32, 127)] + ["\n", "<eos>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1]))


def accepts(tag: dict[str, Any], text: str) -> bool:
    """Whether the text is a whole answer under the structural tag."""
    matcher = xgrammar.GrammarMatcher(
        compiler().compile_structural_tag(json.dumps(tag)), terminate_without_stop_token=True
    )
    return bool(matcher.accept_string(text) and matcher.is_terminated())


def compile_exact(tag: dict[str, Any]) -> Grammar:
    return make_compiler("llguidance", VOCABULARY).compile(spec_of(structural_tag=tag))


def num_calls(name: str, text: str) -> int:
    form = AnswerFormat(tools=name, functions=FUNCTIONS)
    return sum(isinstance(part, CallStart) for part in parse_answer(form, text))


def test_every_format_with_a_grammar_has_a_case() -> None:
    assert set(ONE) == {name for name, form in TOOL_FORMATS.items() if form.grammar is not None}
    assert {format_under_grammar(name, FUNCTIONS, []) for name in set(TOOL_FORMATS) - set(ONE)} == {"hermes"}
    assert all(format_under_grammar(name, FUNCTIONS, FUNCTIONS) == name for name in ONE)
    assert not any(may_stand_beside_calls(name) for name in set(TOOL_FORMATS) - set(ONE))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"type": "string", "maxLength": 3}}},
        {"properties": []},
        {"properties": {"x": {"type": "string", "format": "date"}}},
        {"properties": {"x": {}}, "additionalProperties": True},
        {"properties": {"x": {}}, "required": ["y"]},
        {"properties": {"x": {}}, "required": [{}]},
        {"properties": {"x": {}}, "minProperties": 1},
        {"properties": {"x": True}},
        {"properties": {"x": {"type": "string", "enum": ["a", None]}}},
        {"properties": {"x": {"enum": ["a", "b"], "const": "a"}}},
        {"properties": {"x": {"type": ["string", "null"], "enum": ["a", "null"]}}},
        {"properties": {"x": {"enum": ["a", "12"]}}},
        {"properties": {"x": {"type": 1, "const": "a"}}},
        {"properties": {"x": {"type": "array", "items": {"const": "</parameter>"}}}},
        {"properties": {"x\ny": {}}},
    ],
)
def test_a_schema_that_a_format_cannot_enforce_is_written_as_in_hermes(schema: dict[str, Any]) -> None:
    functions = Functions({"f": schema, "g": {"properties": {"x": {"type": ["string", "null"], "maxLength": 3}}}})
    assert format_under_grammar("qwen3_coder", functions, ["f", "g"]) == "hermes"
    assert format_under_grammar("qwen3_coder", functions, ["g"]) == "qwen3_coder"
    assert format_under_grammar("mistral", functions, ["f", "g"]) == "mistral", "it writes JSON"


def test_the_labels_of_a_schema_change_nothing() -> None:
    texts = dict.fromkeys(["title", "description", "default", "$comment", "$schema"], "a")
    labels = {**texts, "examples": ["a"], "deprecated": True, "readOnly": True, "writeOnly": True}
    schema = {"type": "object", "properties": {"x": {"type": "string", **labels}}, **labels}
    assert format_under_grammar("qwen3_coder", Functions({"f": schema}), ["f"]) == "qwen3_coder"


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string", "enum": ["", "null", "a</b>\n"]}, ["", "null", "a</b>\n"]),
        ({"enum": ["", "a\n", "nul"]}, ["", "a\n", "nul"]),
        ({"type": ["string", "null"], "enum": ["12", None]}, ["12", None]),
        ({"type": ["string", "null"], "enum": ["a", "b"]}, ["a", "b"]),
        ({"const": "1.5x"}, ["1.5x"]),
    ],
)
def test_qwen3_coder_reads_a_choice_as_its_grammar_writes_it(schema: dict[str, Any], values: list[str | None]) -> None:
    functions = Functions({"f": {"properties": {"x": schema}, "required": ["x"], "additionalProperties": False}})
    assert format_under_grammar("qwen3_coder", functions, ["f"]) == "qwen3_coder"
    grammar = compile_exact(must_call("qwen3_coder", functions, ["f"], several=False))
    found = []
    for value in values:
        for written in {str(value), json.dumps(value)}:
            text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
            if takes(grammar, text):
                parts = parse_answer(AnswerFormat(tools="qwen3_coder", functions=functions), text)
                found.append(json.loads("".join(part.text for part in parts if isinstance(part, Arguments)))["x"])
    assert found == values


@pytest.mark.parametrize("name", sorted(ONE))
def test_a_required_call(name: str) -> None:
    several = must_call(name, FUNCTIONS, FUNCTIONS, several=True)
    single = must_call(name, FUNCTIONS, FUNCTIONS, several=False)
    for tag in (several, single):
        assert accepts(tag, ONE[name])
        assert not accepts(tag, "Hello") and not accepts(tag, "")
        assert not accepts(tag, ONE[name].replace("city", "town")), "the schema is followed"
    assert num_calls(name, ONE[name]) == 1
    assert accepts(several, TWO[name]) and not accepts(single, TWO[name])
    assert num_calls(name, TWO[name]) == 2


@pytest.mark.parametrize("name", sorted(ONE))
def test_a_named_function(name: str) -> None:
    assert accepts(must_call(name, FUNCTIONS, ["f"], several=False), ONE[name])
    assert not accepts(must_call(name, FUNCTIONS, ["g"], several=False), ONE[name])


@pytest.mark.parametrize("name", sorted(ONE))
def test_strict_functions_follow_their_schema(name: str) -> None:
    wrong = ONE[name].replace("city", "town")
    tag = may_call(name, FUNCTIONS, ["f"], several=True)
    assert accepts(tag, "Hello") and accepts(tag, f"Hello {ONE[name]}") and not accepts(tag, f"Hello {wrong}")
    assert accepts(may_call(name, FUNCTIONS, ["g"], several=True), f"Hello {wrong}"), "f is not strict"


@pytest.mark.parametrize("name", sorted(ONE))
def test_calls_in_text_are_one_or_several_and_nothing_else(name: str) -> None:
    several, single = (may_call(name, FUNCTIONS, ["f"], several=several) for several in (True, False))
    for tag in (several, single):
        assert accepts(tag, f"Hello {ONE[name]}")
        assert accepts(tag, f"Hello {TWO[name]}") == (tag is several)
        opening = TOOL_FORMATS[name].grammar.opening
        assert not accepts(tag, f"{ONE[name]} Hello") or (tag is several and not opening)
        assert not opening or not accepts(tag, f"Hello {opening}Hello")


@pytest.mark.parametrize("name", sorted(ONE))
def test_llguidance_takes_the_same_calls(name: str) -> None:
    wrong = ONE[name].replace("city", "town")
    must = compile_exact(must_call(name, FUNCTIONS, FUNCTIONS, several=True))
    assert takes(must, ONE[name]) and takes(must, TWO[name]) and not takes(must, wrong)
    may = compile_exact(may_call(name, FUNCTIONS, ["f"], several=True))
    assert takes(may, f"Hello {ONE[name]}") and takes(may, "Hello") and not takes(may, f"Hello {wrong}")


@pytest.mark.parametrize("name", sorted(name for name in ONE if may_stand_beside_calls(name)))
def test_calls_or_json(name: str) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": schema}
    several = calls_or(name, FUNCTIONS, ["f"], form, several=True)
    single = calls_or(name, FUNCTIONS, [], form, several=False)
    wrong, answer = ONE[name].replace("city", "town"), '{"name": "x"}'
    for tag in (several, single):
        grammar = compile_exact(tag)
        assert takes(grammar, answer) and takes(grammar, ONE[name]) and accepts(tag, ONE[name])
        assert not takes(grammar, "Hello") and not takes(grammar, f"{answer}{ONE[name]}")
        assert takes(grammar, wrong) == (tag is single), "f is strict in the other one"
        assert takes(grammar, TWO[name]) == (tag is several)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>'),
        ("qwen3_coder", "<function=f>\n<parameter=town>\nP\n</parameter>\n</function>"),
    ],
)
def test_a_strict_call_has_no_other_spelling(name: str, call: str) -> None:
    assert num_calls(name, call) == 1
    tag = may_call(name, FUNCTIONS, ["f"], several=True)
    assert not accepts(tag, call) and not takes(compile_exact(tag), call)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_gets_none(backend: str, schema: dict[str, Any] | None) -> None:
    """OpenAI: a function whose `parameters` are absent has an empty list of parameters."""
    functions = Functions({"f": schema})
    compiler = make_compiler(backend, VOCABULARY)
    for name, none, one in (
        ("hermes", "{}", '{"x": 1}'),
        ("qwen3_coder", "", "<parameter=x>\n1\n</parameter>"),
    ):
        tag = must_call(name, functions, ["f"], several=False)
        grammar = compiler.compile(spec_of(structural_tag=tag))
        begin, end = tag["format"]["tags"][0]["begin"], tag["format"]["tags"][0]["end"]
        assert takes(grammar, f"{begin}{none}{end}") and not takes(grammar, f"{begin}{one}{end}")


@pytest.mark.parametrize("name", sorted(ONE))
@pytest.mark.parametrize(
    "schema", [{"properties": {"x": {"type": "string"}}}, {"description": "f"}, {"type": ["object", "null"]}]
)
def test_the_arguments_of_a_required_call_are_an_object_whatever_the_schema_says(name: str, schema: Any) -> None:
    """The readers take nothing else for a call."""
    functions = Functions({"f": schema, "g": None})
    grammar = compile_exact(must_call(name, functions, ["g", "f"], several=False))
    text = ONE[name].replace("city", "x")
    assert takes(grammar, text)
    if '{"x": "P"}' in text:
        assert not any(takes(grammar, text.replace('{"x": "P"}', value)) for value in ("null", "1", '"P"', "[]"))
