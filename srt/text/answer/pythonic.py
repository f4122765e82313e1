"""Llama 3.2 and 4, and others: calls as a Python list, `[f(a=1, b="x"), g()]`, at the start of the answer.

`<|python_start|>` and `<|python_end|>` may enclose the list.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable

from .answer_text import AnswerText, Reading
from .json_reader import json_string, without_surrogates
from .tools import NAME, Functions

START = "<|python_start|>"
END = "<|python_end|>"
_PLAIN = re.compile(r"""[^"'()\[\]{},]+""")
_QUOTED = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_ESCAPED = str.maketrans({"\n": "\\n", "\r": "\\r", "\0": "\\x00"})
"""The characters that a string of Python can only have as escapes. A model may write them as they are."""
_CONSTANTS_OF_JSON = {"true": True, "false": False, "null": None}


def read_pythonic(answer: AnswerText, functions: Functions) -> Reading[None]:
    answer.hold()
    while True:
        yield from _read_list(answer, functions)
        if not (yield from answer.content_until(START)):
            return


def _read_list(answer: AnswerText, functions: Functions) -> Reading[None]:
    yield from answer.skip_space()
    opened = yield from answer.accept("[")
    while opened:
        yield from answer.skip_space()
        if not (yield from _read_call(answer, functions)):
            break
        answer.hold()
        yield from answer.skip_space()
        comma = yield from answer.accept(",")
        yield from answer.skip_space()
        if (yield from answer.accept("]")) or not comma:  # Python allows a comma before the bracket
            yield from answer.skip_space()
            yield from answer.accept_end(END)
            answer.release()
            return
    answer.give_back()


def _read_call(answer: AnswerText, functions: Functions) -> Reading[bool]:
    name = yield from answer.word(NAME)
    if name not in functions or not (yield from answer.accept("(")):
        return False
    yield from answer.skip_space()
    started = False
    while True:
        if (yield from answer.accept(")")):
            if not started:
                answer.start_call(name)
                answer.arguments("{")
            answer.arguments("}")
            return True
        key = yield from answer.word(NAME)
        yield from answer.skip_space()
        if not key or not (yield from answer.accept("=")):
            return started
        if not started:
            answer.start_call(name)
        answer.arguments(f'{", " if started else "{"}"{json_string(key)}": ')
        started = True
        pieces: list[str] = []
        if not (yield from _copy_value(answer, pieces.append)):
            return True
        answer.arguments(_as_json("".join(pieces).strip()))
        yield from answer.accept(",")
        yield from answer.skip_space()


def _copy_value(answer: AnswerText, put: Callable[[str], None]) -> Reading[bool]:
    """Passes the source of a value on. Returns False where its brackets do not match, or at the end of the answer."""
    closers: list[str] = []
    while True:
        yield from answer.run(_PLAIN, put)
        char = yield from answer.peek()
        if not char or (not closers and char in "]}"):
            return False
        if not closers and char in ",)":
            return True
        put((yield from answer.take()))
        if char in _QUOTED:
            if not (yield from _copy_quoted(answer, char, put)):
                return False
        elif char in _CLOSER:
            closers.append(_CLOSER[char])
        elif char != "," and char != closers.pop():
            return False


def _copy_quoted(answer: AnswerText, quote: str, put: Callable[[str], None]) -> Reading[bool]:
    while True:
        yield from answer.run(_QUOTED[quote], lambda piece: put(piece.translate(_ESCAPED)))
        char = yield from answer.take()
        put(char)
        if char != "\\":
            return char == quote
        put((yield from answer.take()))


def _as_json(source: str) -> str:
    """A literal of Python or JSON as JSON. Any other text becomes a string."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd literals: a model can fill the log with them
            parsed = ast.parse(source, mode="eval")
        value = ast.literal_eval(_WithConstants().visit(parsed))
        return without_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return f'"{json_string(source)}"'


class _WithConstants(ast.NodeTransformer):
    """Reads the names of JSON's constants as values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS_OF_JSON[node.id]) if node.id in _CONSTANTS_OF_JSON else node
