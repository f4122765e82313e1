"""The values of calls in Python's notation. A model mixes it with that of JSON."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from parsed_answers import join_parts, parse_answer

from tercet.srt.text.answer.answer_parser import AnswerFormat, AnswerParser
from tercet.srt.text.answer.answer_text import Arguments, CallStart, Content
from tercet.srt.text.answer.tools import Functions

FORMAT = AnswerFormat(tools="pythonic", functions=Functions({"f": None}))


def value_of(source: str, size: int = 1000) -> Any:
    """The argument that the call `[f(a=SOURCE)]` has, read in pieces of `size` characters."""
    text = f"[f(a={source})]"
    parser = AnswerParser(FORMAT)
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
    call, arguments = join_parts([*parts, *parser.finish()])
    assert call == CallStart("f")
    assert isinstance(arguments, Arguments)
    return json.loads(arguments.text)["a"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"\\\n", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(value=values, size=st.integers(1, 9), write=st.sampled_from([repr, json.dumps]))
@example([True, None], 1000, json.dumps)
@example({"x": {"y": False}}, 3, json.dumps)
def test_any_value_in_either_notation_comes_back(value: Any, size: int, write: Any) -> None:
    assert value_of(write(value), size) == value


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ('"one\ntwo"', "one\ntwo"),
        ("'one\r\n\ttwo'", "one\r\n\ttwo"),
        ("['a\n', {'b': 'c\0'}]", ["a\n", {"b": "c\0"}]),
        ('"""one\ntwo"""', "one\ntwo"),
        ("{'x': true, 'y': [None, null]}", {"x": True, "y": [None, None]}),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_line_breaks_in_strings_and_constants_of_both_notations(source: str, value: Any, size: int) -> None:
    assert value_of(source, size) == value


@pytest.mark.parametrize("source", ["Paris", "truely", "[true, maybe]", "f'{true}'", "-true", "true()", "{true, 1}"])
def test_what_is_no_literal_becomes_a_string(source: str) -> None:
    assert value_of(source) == source


@pytest.mark.parametrize("source", ["1and 2", r"'\d'", "[0x1for x in y]"])
def test_an_odd_literal_writes_no_line_to_the_log(source: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value_of(source)
    assert not caught


@pytest.mark.parametrize("text", ["[f(),]", "[f(), f(),]", "<|python_start|>[f() , ] <|python_end|>"])
def test_a_list_may_end_with_a_comma(text: str) -> None:
    calls = [CallStart("f"), Arguments("{}")] * text.count("f")
    assert parse_answer(FORMAT, text) == calls
    assert parse_answer(FORMAT, f"{text} Done") == [*calls, Content("Done")]
    whole = parse_answer(FORMAT, text.replace(",", ", g(), "))
    assert isinstance(whole[-1], Content) and whole[-1].text.startswith(", g()")


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("text", ["[f(),]", "[ f( a = 1 , ) , ]", "<|python_start|> [f()\n,\n]\n<|python_end|>"])
def test_spaces_and_a_last_comma_in_a_list_of_calls_are_no_content(text: str, size: int) -> None:
    parser = AnswerParser(FORMAT)
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
    call, arguments = join_parts([*parts, *parser.finish()])
    assert call == CallStart("f")
    assert isinstance(arguments, Arguments) and json.loads(arguments.text) in ({}, {"a": 1})


def json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@given(value=values, other=values, write=st.sampled_from([repr, json_of]))
@example("ab", 12, repr)
def test_of_a_call_that_is_cut_only_whole_values_are_passed_on(value: Any, other: Any, write: Any) -> None:
    text = f"[f(a={write(value)}, b={write(other)})]"
    steps = ["", '{"a": ', json_of(value), ', "b": ', json_of(other), "}"]
    whole = {"".join(steps[:count]) for count in range(1, len(steps) + 1)}
    for end in range(len(text) + 1):
        assert "".join(part.text for part in parse_answer(FORMAT, text[:end]) if isinstance(part, Arguments)) in whole


@pytest.mark.parametrize("text", ["[f(a=1]", "[f(a=[1)]", "[f(a={1]]"])
def test_brackets_that_do_not_match_end_the_call_without_the_value(text: str) -> None:
    assert parse_answer(FORMAT, text) == [CallStart("f"), Arguments('{"a": ')]


@pytest.mark.parametrize("text", ["[f(=1)]", "[f(a)]", "[f(1)]"])
def test_arguments_without_a_name_or_a_value_make_no_call(text: str) -> None:
    assert parse_answer(FORMAT, text) == [Content(text)]
