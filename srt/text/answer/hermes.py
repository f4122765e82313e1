"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call."""

from __future__ import annotations

from .answer_text import AnswerText, Reading
from .json_reader import read_call
from .tools import Functions

START = "<tool_call>"
END = "</tool_call>"


def read_hermes(answer: AnswerText, functions: Functions) -> Reading[None]:
    while (yield from answer.content_until(START)):
        yield from answer.skip_space()
        if not (yield from read_call(answer, functions)):
            answer.give_back()
            continue
        yield from answer.skip_space()
        yield from answer.accept_end(END)
