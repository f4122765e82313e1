"""Answers that reach their maximum length within a tool call."""

from __future__ import annotations

import pytest

from tercet.srt.text.answer.answer_parser import AnswerFormat, join_parts, parse_answer
from tercet.srt.text.answer.answer_text import Arguments, CallStart, Content
from tercet.srt.text.answer.tools import Functions


@pytest.mark.parametrize(
    ("tools", "call", "end"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n', "</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=now>\n", "</function>"),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n", "</tool_call>"),
        ("gemma", "<start_function_call>call:now{}", "<end_function_call>"),
        ("pythonic", "<|python_start|>[now()]", "<|python_end|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n", "```"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}", "<｜tool▁call▁end｜>"),
    ],
)
def test_a_part_of_the_mark_that_ends_a_call_is_no_content(tools: str, call: str, end: str) -> None:
    form = AnswerFormat(tools=tools, functions=Functions({"now": None}))
    called = [CallStart("now"), Arguments("{}")]
    shortest = 2 if end == "</function>" else 1  # "<" may begin a parameter
    for length in range(shortest, len(end) + 1):
        assert join_parts(parse_answer(form, call + end[:length])) == called
    assert join_parts(parse_answer(form, f"{call}<ok>")) == [*called, Content("<ok>")]


@pytest.mark.parametrize("rest", ["<", "<e", "<es", "<end_function_cal", "<other"])
def test_in_a_call_that_is_not_complete_a_part_of_a_mark_is_text_of_the_model(rest: str) -> None:
    """It may be a part of a quotation mark, too. A mark that is complete is left out."""
    form = AnswerFormat(tools="gemma", functions=Functions({"now": None}))
    called = [CallStart("now"), Arguments('{"zone": ')]
    call = "<start_function_call>call:now{zone:"
    assert join_parts(parse_answer(form, call + rest)) == [*called, Content(rest)]
    assert join_parts(parse_answer(form, f"{call}<end_function_call>")) == called
