"""Tool calls that are cut, and what follows a call and is none."""

from __future__ import annotations

import pytest
from parsed_answers import join_parts, parse_answer

from tercet.srt.text.answer.answer_parser import AnswerFormat, AnswerParser
from tercet.srt.text.answer.answer_text import Arguments, CallStart, Content
from tercet.srt.text.answer.tools import Functions

CALL, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALLS = "<｜tool▁calls▁begin｜>" + CALL
"""The marks of DeepSeek's models."""


ENDS = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n', "</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n", "</function>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n", "</tool_call>"),
    ("gemma", "<start_function_call>call:now{}", "<end_function_call>"),
    ("pythonic", "<|python_start|>[now()]", "<|python_end|>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n", "```"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}", "<｜tool▁call▁end｜>"),
]
"""Formats, calls in them, and the marks that end these."""


@pytest.mark.parametrize(("tools", "call", "end"), ENDS)
def test_a_part_of_the_mark_that_ends_a_call_is_no_content(tools: str, call: str, end: str) -> None:
    form = AnswerFormat(tools=tools, functions=Functions({"now": None}))
    called = [CallStart("now"), Arguments("{}")]
    shortest = 2 if end == "</function>" else 1  # "<" may begin a parameter
    for length in range(shortest, len(end) + 1):
        assert parse_answer(form, call + end[:length]) == called
    assert parse_answer(form, f"{call}<ok>") == [*called, Content("<ok>")]


@pytest.mark.parametrize(("tools", "call", "end"), [*ENDS, ("llama3_json", '{"name": "now"}', "")])
def test_content_after_a_call_is_not_kept(tools: str, call: str, end: str) -> None:
    """Each piece is joined to what is kept: the time for a long answer would grow with its square."""
    parser = AnswerParser(AnswerFormat(tools=tools, functions=Functions({"now": None})))
    parts = [*parser.push(call + end), *parser.push(" Done. ")]
    for _ in range(100):
        parts += parser.push("ten chars ")
        assert len(parser._answer._text) < 50
    assert join_parts([*parts, *parser.finish()])[-1] == Content("Done. " + "ten chars " * 100)


def test_a_part_of_the_mark_of_a_parameter_is_no_content() -> None:
    form = AnswerFormat(tools="qwen3_coder", functions=Functions({"now": None}))
    for length in range(1, len("<parameter=") + 1):
        assert parse_answer(form, "<function=now>\n" + "<parameter="[:length]) == [CallStart("now"), Arguments("{")]


@pytest.mark.parametrize("rest", ["<", "<e", "<es", "<end_function_cal", "<other"])
def test_in_a_call_that_is_not_complete_a_part_of_a_mark_is_text_of_the_model(rest: str) -> None:
    """It may be a part of a quotation mark, too. A mark that is complete is left out."""
    form = AnswerFormat(tools="gemma", functions=Functions({"now": None}))
    called = [CallStart("now"), Arguments('{"zone": ')]
    call = "<start_function_call>call:now{zone:"
    assert parse_answer(form, call + rest) == [*called, Content(rest)]
    assert parse_answer(form, f"{call}<end_function_call>") == called


@pytest.mark.parametrize(
    ("tools", "call", "rest"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "no"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now", "arguments": 5}</tool_call>'),
        ("llama3_json", '{"name": "now"}', '; {"name": "no"}'),
        ("llama3_json", '{"name": "now"}', '; {"name": "now", "parameters": [1]}'),
        ("mistral", '[TOOL_CALLS] [{"name": "now"}', ', {"name": "no"}]'),
        ("mistral", "[TOOL_CALLS]now{}", "[TOOL_CALLS]now[1]"),
        ("deepseek_v3", f"{CALLS}now<｜tool▁sep｜>{{}}{END}", f"{CALL}no<｜tool▁sep｜>{{}}{END}"),
        ("deepseek_v3", f"{CALLS}now<｜tool▁sep｜>{{}}{END}", f"{CALL}f<｜tool▁sep｜>now\n```json\n5\n```{END}"),
        ("gemma", "<|tool_call>call:now{}<tool_call|>", "<|tool_call>call:no{}<tool_call|>"),
        ("qwen3_coder", "<function=now></function>", "<tool_call><function=no></function></tool_call>"),
        ("pythonic", "[now()", ", no()]"),
        ("pythonic", "[now()", ", now(5)]"),
    ],
)
def test_what_is_no_call_is_content_also_after_a_call(tools: str, call: str, rest: str) -> None:
    form = AnswerFormat(tools=tools, functions=Functions({"now": None}))
    assert parse_answer(form, call + rest) == [CallStart("now"), Arguments("{}"), Content(rest)]
