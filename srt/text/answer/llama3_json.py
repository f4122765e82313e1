"""Llama 3: `{"name": ..., "parameters": {...}}` at the start of the answer or after `<|python_tag|>`.

Several calls are separated by semicolons, commas or spaces.
"""

from __future__ import annotations

from .answer_text import AnswerText, Reading
from .json_reader import read_call
from .tools import Functions

START = "<|python_tag|>"


def read_llama3_json(answer: AnswerText, functions: Functions) -> Reading[None]:
    answer.hold()
    while True:
        yield from _read_calls(answer, functions)
        if not (yield from answer.content_until(START)):
            return


def _read_calls(answer: AnswerText, functions: Functions) -> Reading[None]:
    """Reads calls up to the first text that is none, which becomes content."""
    while True:
        yield from answer.skip_space()
        if not (yield from read_call(answer, functions)):
            answer.give_back()
            return
        answer.hold()
        yield from answer.skip_space()
        yield from answer.accept(";", ",")
