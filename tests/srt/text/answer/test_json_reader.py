"""Calls whose JSON is damaged: exactly what Python's decoder accepts is read, and two common faults are repaired."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_answers import parse_answer

from tercet.srt.text.answer.answer_parser import AnswerFormat
from tercet.srt.text.answer.answer_text import Arguments, CallStart
from tercet.srt.text.answer.tools import Functions


def arguments_of(text: str) -> str | None:
    """The arguments of the call in an answer; None: there is no call."""
    parts = parse_answer(AnswerFormat(tools="hermes", functions=Functions({"now": None})), text)
    if not any(isinstance(part, CallStart) for part in parts):
        return None
    return "".join(part.text for part in parts if isinstance(part, Arguments))


def decoded(text: str) -> tuple[Any, str] | None:
    """The JSON value at the start of a text, and the rest of the text; None: there is none."""
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        return None
    return value, text[end:]


STRINGS = st.text("ab\u00e9{}[],: ", max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged_objects(draw: st.DrawFn) -> str:
    """The text of an object, in which a few characters may be replaced."""
    text = json.dumps(draw(st.dictionaries(STRINGS, VALUES, max_size=3)), ensure_ascii=False)
    start = draw(st.integers(1, len(text)))
    end = start + draw(st.integers(0, 3))
    pieces = ["", '"', "{", "}", "[", "]", ",", ":", "1", "-", ".", "e", "tru", "null", " ", "\n"]
    return text[:start] + draw(st.sampled_from(pieces)) + text[end:]


@settings(max_examples=500)
@given(damaged_objects())
def test_arguments_after_the_name_are_json_or_do_not_end(written: str) -> None:
    rest = f"{written}}}</tool_call>"
    expected, found = decoded(rest), arguments_of(f'<tool_call>{{"name": "now", "arguments": {rest}')
    if expected is not None:
        assert found is not None and json.loads(found) == expected[0]
    else:
        assert found is None or decoded(found) is None


@settings(max_examples=500)
@given(damaged_objects())
def test_arguments_before_the_name_are_json_or_there_is_no_call(written: str) -> None:
    rest = ', "name": "now"}</tool_call>'
    expected, found = decoded(written + rest), arguments_of(f'<tool_call>{{"arguments": {written}{rest}')
    if expected is not None and expected[1].strip() == rest:
        assert found is not None and json.loads(found) == expected[0]
    else:
        assert found is None


@settings(max_examples=500)
@given(st.text("\\u1aFgn\n\u00e9 ", max_size=12))
def test_a_backslash_that_begins_no_escape_is_one_of_the_text(text: str) -> None:
    text += "."  # not a backslash, which would be one of the closing quote
    repaired = re.sub(r'\\(u[0-9a-fA-F]{4}|["\\/bfnrt])|\\', lambda found: found[0] if found[1] else r"\\", text)
    found = arguments_of(f'<tool_call>{{"name": "now", "arguments": {{"x": "{text}"}}}}</tool_call>')
    assert found is not None and json.loads(found) == {"x": json.loads(f'"{repaired}"', strict=False)}


@settings(max_examples=500)
@given(damaged_objects())
def test_a_call_with_another_key_is_json_or_there_is_no_call(written: str) -> None:
    call = f'{{"name": "now", "more": {written}}}</tool_call>'
    assert arguments_of(f"<tool_call>{call}") == (None if decoded(call) is None else "{}")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_string_of_arguments_has_json_and_no_constants_of_python(constant: str) -> None:
    written = json.dumps(f'{{"x": {constant}}}')
    assert arguments_of(f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>') is None
    assert arguments_of(f'<tool_call>{{"arguments": {written}, "name": "now"}}</tool_call>') is None
