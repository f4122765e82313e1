"""Gemma: `call:NAME{key:<escape>text<escape>,other:1}` between marks. Gemma 4 has other marks than FunctionGemma.

Keys have no quotes. The mark `<escape>` or `<|"|>` encloses a text.
"""

from __future__ import annotations

import re

from .answer_text import AnswerText, Reading, marks_of
from .json_reader import json_string
from .tools import NAME, Functions

ENDS = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
"""The mark at the end of a call for each mark at its start."""
STARTS = tuple(ENDS)
QUOTES = ("<escape>", '<|"|>')
_KEY = re.compile(r"[^:{}\[\],<>]+")
_SCALAR = re.compile(r"[^{}\[\],<]+")
_IS_JSON = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def read_gemma(answer: AnswerText, functions: Functions) -> Reading[None]:
    while mark := (yield from answer.content_until(*STARTS)):
        yield from answer.skip_space()
        yield from answer.accept("call:")
        name = yield from answer.word(NAME)
        yield from answer.skip_space()
        if name not in functions or not (yield from answer.accept("{")):
            answer.give_back()
            continue
        answer.start_call(name)
        answer.arguments("{")
        is_whole = yield from _copy_object(answer)
        yield from answer.skip_space()
        if is_whole:
            yield from answer.accept_end(ENDS[mark])
        else:
            yield from answer.accept(ENDS[mark])


def _copy_object(answer: AnswerText) -> Reading[bool]:
    """Passes the arguments on after their opening brace. Returns False where they are malformed or end."""
    closers = ["}"]
    first = True
    while closers:
        yield from answer.skip_space()
        char = yield from answer.peek()
        if char == closers[-1]:
            answer.arguments((yield from answer.take()))
            closers.pop()
            first = False
            continue
        if not first:
            if not (yield from answer.accept(",")):
                return False
            answer.arguments(", ")
            yield from answer.skip_space()
        if closers[-1] == "}" and not (yield from _copy_key(answer)):
            return False
        opener = yield from answer.accept("{", "[")
        if opener:
            answer.arguments(opener)
            closers.append("}" if opener == "{" else "]")
            first = True
        else:
            if not (yield from _copy_value(answer)):
                return False
            first = False
    return True


def _copy_key(answer: AnswerText) -> Reading[bool]:
    quote = yield from answer.accept(*QUOTES)
    key = yield from answer.word(_KEY)
    if quote:
        yield from answer.accept(quote)
    if not (yield from answer.accept(":")):
        return False
    answer.arguments(f'"{json_string(key.strip())}": ')
    yield from answer.skip_space()
    return True


def _copy_value(answer: AnswerText) -> Reading[bool]:
    quote = yield from answer.accept(*QUOTES)
    if quote:
        answer.arguments('"')
        ended = yield from answer.until(marks_of(quote), lambda piece: answer.arguments(json_string(piece)))
        answer.arguments('"' if ended else "")
        return bool(ended)
    text = (yield from answer.word(_SCALAR)).strip()
    if not text:
        return False
    answer.arguments(text if _IS_JSON.fullmatch(text) else f'"{json_string(text)}"')
    return True
