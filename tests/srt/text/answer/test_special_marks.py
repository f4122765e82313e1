"""Where marks are special tokens, an answer has those that its reader reads, and no others."""

from __future__ import annotations

import re

import pytest
from parsed_answers import parse_answer

from tercet.srt.text.answer.answer_parser import AnswerFormat
from tercet.srt.text.answer.answer_text import Arguments, CallStart, Content, Reasoning
from tercet.srt.text.answer.tool_formats import TOOL_FORMATS
from tercet.srt.text.answer.tools import Functions

CALL = [CallStart("f"), Arguments('{"a": "x"}')]
CASES = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": "x"}}'),
    ("pythonic", '<|python_start|>[f(a="x")]<|python_end|>'),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": "x"}'),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>"),
    ("gemma", '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    ("gpt-oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>'),
]
SPECIAL = re.compile(r"<[|｜][^>]+>|</?tool_call[|]?>|\[[A-Z_]+\]")


def shown(form: AnswerFormat, text: str) -> str:
    return SPECIAL.sub(lambda mark: mark[0] if mark[0] in form.marks() | form.ends() else "", text)


@pytest.mark.parametrize(("tools", "text"), CASES)
def test_a_call_is_read_from_the_tokens_that_are_shown(tools: str, text: str) -> None:
    form = AnswerFormat(tools=tools, functions=Functions({"f": None}))
    assert parse_answer(form, shown(form, text)) == CALL


def test_every_format_has_a_case() -> None:
    assert {tools for tools, _ in CASES} == set(TOOL_FORMATS)


def test_messages_end_where_their_tokens_end_them() -> None:
    form = AnswerFormat(reasoning="gpt-oss")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"
    assert parse_answer(form, shown(form, text)) == [Reasoning("Hm."), Content("Hi.")]
