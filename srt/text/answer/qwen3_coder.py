"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`.

A value is text without quotes. The schema of the function says whether it is a string.
"""

from __future__ import annotations

import json
import re

from .answer_text import AnswerText, Reading, marks_of
from .json_reader import json_string
from .tools import Functions

START = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
NAME = re.compile(r"[^<>\n]+")
_VALUE_END = marks_of("\n" + PARAMETER_END, PARAMETER_END)


def read_qwen3_coder(answer: AnswerText, functions: Functions) -> Reading[None]:
    while mark := (yield from answer.content_until(START, FUNCTION)):
        if mark == START:
            yield from answer.skip_space()
            if not (yield from answer.accept(FUNCTION)):
                answer.give_back()
                continue
        name = yield from answer.word(NAME)
        if name not in functions or not (yield from answer.accept(">")):
            answer.give_back()
            continue
        yield from _read_arguments(answer, functions, name)
        yield from answer.skip_space()
        yield from answer.accept(END)


def _read_arguments(answer: AnswerText, functions: Functions, name: str) -> Reading[None]:
    answer.start_call(name)
    answer.arguments("{")
    separator = ""
    while True:
        yield from answer.skip_space()
        if not (yield from answer.accept(PARAMETER)):
            break
        key = yield from answer.word(NAME)
        if not (yield from answer.accept(">")):
            return
        yield from answer.accept("\n")
        answer.arguments(f'{separator}"{json_string(key)}": ')
        separator = ", "
        if not (yield from _read_value(answer, functions.is_text(name, key))):
            return
    ended = yield from answer.accept("</function>")
    if ended or (yield from answer.peek()):
        answer.arguments("}")


def _read_value(answer: AnswerText, is_text: bool | None) -> Reading[bool]:
    """Passes a value on: a string while it arrives, another value when it is complete. Returns whether it ended."""
    if is_text:
        answer.arguments('"')
        mark = yield from answer.until(_VALUE_END, lambda piece: answer.arguments(json_string(piece)))
        answer.arguments('"' if mark else "")
        return bool(mark)
    pieces: list[str] = []
    mark = yield from answer.until(_VALUE_END, pieces.append)
    if mark:
        answer.arguments(as_json("".join(pieces)))
    return bool(mark)


def as_json(text: str) -> str:
    """The text, if it is JSON. Python's constants count as JSON, and any other text becomes a string."""
    text = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{json_string(text)}"'
    return text.strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
