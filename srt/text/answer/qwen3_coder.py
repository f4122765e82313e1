"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`.

A value is text without quotes. The schema of the function says whether it is a string.
"""

from __future__ import annotations

import re

from .answer_text import AnswerText, Reading, marks_of
from .json_reader import json_string, strict_loads
from .tools import KINDS, Functions

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
        yield from answer.accept_end(END)


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
        if functions.is_text(name, key):
            is_whole = yield from _read_text(answer)
        else:
            is_whole = yield from _read_value(answer, functions.kinds(name, key))
        if not is_whole:
            return
    if answer.ends_inside(PARAMETER):  # there might have been further parameters
        yield from answer.take(len(PARAMETER))
        return
    yield from answer.accept_end("</function>")  # it may be missing
    answer.arguments("}")


def _read_text(answer: AnswerText) -> Reading[bool]:
    """Passes a string on while it arrives. Returns whether it ended."""
    answer.arguments('"')
    mark = yield from answer.until(_VALUE_END, lambda piece: answer.arguments(json_string(piece)))
    answer.arguments('"' if mark else "")
    return bool(mark)


def _read_value(answer: AnswerText, kinds: frozenset[str]) -> Reading[bool]:
    """Passes a value of these types on when it is complete. Returns whether it ended."""
    pieces: list[str] = []
    mark = yield from answer.until(_VALUE_END, pieces.append)
    if mark:
        answer.arguments(as_json("".join(pieces), kinds))
    return bool(mark)


def as_json(text: str, kinds: frozenset[str] = frozenset()) -> str:
    """The text, if it is JSON. Python's constants count as JSON, and any other text becomes a string.

    `kinds`: the types that the value may have; empty: any. JSON of another type becomes a string, if that may be one.
    """
    written = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = strict_loads(written)
    except (ValueError, RecursionError):
        return f'"{json_string(text)}"'
    if "string" in kinds and kinds.isdisjoint(KINDS[type(value)]):
        return f'"{json_string(text)}"'
    return written.strip()
