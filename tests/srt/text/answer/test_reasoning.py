"""The marks around reasoning: which of them counts, and what is kept while the answer arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import join_parts

from tercet.srt.text.answer.answer_parser import AnswerFormat, AnswerParser
from tercet.srt.text.answer.answer_text import Content, Reasoning
from tercet.srt.text.answer.reasoning import REASONING_FORMATS
from tercet.srt.text.answer.tool_formats import TOOL_FORMATS

NAMES = sorted(REASONING_FORMATS)


@given(data=st.data(), name=st.sampled_from(NAMES))
def test_in_a_message_that_is_continued_the_last_mark_counts(data: st.DataObject, name: str) -> None:
    form = REASONING_FORMATS[name]
    marks = data.draw(st.lists(st.sampled_from([*form.starts, *form.ends]), max_size=5))
    text = "".join(f"{mark} I think " for mark in marks) or "I think"
    assert form.place("<user>", text) == ("inside" if marks and marks[-1] in form.starts else "after")


@pytest.mark.parametrize("name", NAMES)
def test_each_mark_at_the_end_of_the_prompt_counts(name: str) -> None:
    form = REASONING_FORMATS[name]
    assert {form.place(f"<user>{mark}\n") for mark in form.starts} == {"inside"}
    assert {form.place(f"<user>{mark}\n\n") for mark in form.ends} == {"after"}


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_has_reasoning_if_it_begins_with_it(name: str) -> None:
    form = REASONING_FORMATS[name]
    for inside, text, has_reasoning in (
        (True, "", True),
        (True, form.ends[0], True),
        (False, f"\n{form.starts[0]}{form.ends[0]}Hi", True),
        (False, f"Hi {form.starts[0]}", False),
        (False, "", False),
    ):
        parser = AnswerParser(AnswerFormat(name), inside)
        parser.push(text)
        parser.finish()
        assert parser.has_reasoning == has_reasoning


@pytest.mark.parametrize("tools", [None, *(name for name in TOOL_FORMATS if name != "gpt-oss")])
@pytest.mark.parametrize("name", NAMES)
def test_text_that_is_certain_is_not_kept(name: str, tools: str | None) -> None:
    """Each piece is joined to what is kept: the time for a long answer would grow with its square."""
    form = REASONING_FORMATS[name]
    parser = AnswerParser(AnswerFormat(name, tools))
    parts, most_kept = parser.push(form.starts[0]), 0
    for end in (form.ends[0], ""):
        for _ in range(100):
            parts += parser.push("ten chars ")
            most_kept = max(most_kept, len(parser._answer._text))
        parts += parser.push(end)
    assert join_parts([*parts, *parser.finish()]) == [
        Reasoning(("ten chars " * 100).strip()),
        Content("ten chars " * 100),
    ]
    assert most_kept < 100
