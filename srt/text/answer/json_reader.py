"""Readers of JSON in an answer: a value that is passed on while it arrives, and a call written as an object.

The JSON of models has two common faults, which are repaired: control characters in strings, such as line breaks, and
backslashes that begin no escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from enum import Enum, auto
from typing import Any

from .answer_text import AnswerText, Reading

_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_JSON_SPACE = re.compile(r"[ \t\r\n]+")
_ESCAPES = '"\\/bfnrt'
_HEX_DIGITS = tuple("0123456789abcdefABCDEF")
_SURROGATE = re.compile("[\ud800-\udfff]")

Put = Callable[[str], None]


class _Expects(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    NEXT = auto()


def copy_value(answer: AnswerText, put: Put, *, in_object: bool = False) -> Reading[bool]:
    """Passes one JSON value on. Returns False where the text is not JSON or ends; what was passed on stays.

    in_object: the value is an object, and its opening brace has been read.
    """
    closers = ["}"] if in_object else []
    expects = _Expects.FIRST_KEY if in_object else _Expects.VALUE
    while True:
        yield from answer.run(_JSON_SPACE, put)
        char = yield from answer.peek()
        if (expects in (_Expects.FIRST_ITEM, _Expects.FIRST_KEY, _Expects.NEXT)) and closers and char == closers[-1]:
            put((yield from answer.take()))
            closers.pop()
            expects = _Expects.NEXT
        elif expects is _Expects.NEXT:
            if char != ",":
                return False
            put((yield from answer.take()))
            expects = _Expects.KEY if closers[-1] == "}" else _Expects.VALUE
        elif expects in (_Expects.KEY, _Expects.FIRST_KEY):
            if not (yield from _copy_key(answer, put)):
                return False
            expects = _Expects.VALUE
        elif char in ("{", "["):
            put((yield from answer.take()))
            closers.append("}" if char == "{" else "]")
            expects = _Expects.FIRST_KEY if char == "{" else _Expects.FIRST_ITEM
        else:
            good = yield from (copy_string(answer, put) if char == '"' else _copy_scalar(answer, put))
            if not good:
                return False
            expects = _Expects.NEXT
        if expects is _Expects.NEXT and not closers:
            return True


def _copy_key(answer: AnswerText, put: Put) -> Reading[bool]:
    if not (yield from copy_string(answer, put)):
        return False
    yield from answer.run(_JSON_SPACE, put)
    colon = yield from answer.accept(":")
    put(colon)
    return bool(colon)


def copy_string(answer: AnswerText, put: Put) -> Reading[bool]:
    """Passes one JSON string on. Returns False if there is none, or if it does not end."""
    if not (yield from answer.accept('"')):
        return False
    put('"')
    while True:
        yield from answer.run(_STRING, put)
        char = yield from answer.take()
        if char == "\\":
            escaped = yield from answer.take()
            if not escaped:
                return False
            if escaped == "u":
                yield from _copy_code(answer, put)
            elif escaped in _ESCAPES:
                put("\\" + escaped)
            else:
                put("\\\\" + json.dumps(escaped, ensure_ascii=False)[1:-1])
        elif char == '"' or not char:
            put(char)
            return bool(char)
        else:
            put(json.dumps(char)[1:-1])


def _copy_code(answer: AnswerText, put: Put) -> Reading[None]:
    """Passes the rest of an escape such as \\u00e9 on. Without four digits, its backslash is one of the text."""
    digits = ""
    while len(digits) < 4 and (yield from answer.peek()) in _HEX_DIGITS:
        digits += yield from answer.take()
    put(("\\u" if len(digits) == 4 else "\\\\u") + digits)


def _copy_scalar(answer: AnswerText, put: Put) -> Reading[bool]:
    text = yield from answer.word(_SCALAR)
    if text not in ("true", "false", "null") and not _NUMBER.fullmatch(text):
        return False
    put(text)
    return True


def read_string(answer: AnswerText) -> Reading[str | None]:
    """The value of a JSON string, or None if there is none."""
    pieces: list[str] = []
    if not (yield from copy_string(answer, pieces.append)):
        return None
    try:
        value = json.loads("".join(pieces))
    except ValueError:
        return None
    return str(value)


def read_arguments(answer: AnswerText, name: str) -> Reading[bool]:
    """Starts the call and passes its arguments on: an object, or a string that contains one.

    Returns False if there is no object. The call has not been started then. An object that begins well and goes on
    badly is passed on as far as it is JSON.
    """
    yield from answer.skip_space()
    if (yield from answer.peek()) != "{":
        pieces: list[str] = []
        if not (yield from copy_value(answer, pieces.append)):
            return False
        written = _object_in("".join(pieces))
        if written is not None:
            answer.start_call(name)
            answer.arguments(written)
        return written is not None
    opening = yield from answer.take()
    opening += yield from answer.word(_JSON_SPACE)
    if (yield from answer.peek()) not in ('"', "}"):
        return False
    answer.start_call(name)
    answer.arguments(opening)
    yield from copy_value(answer, answer.arguments, in_object=True)
    return True


def _object_in(value: str) -> str | None:
    """The object in the text of a JSON value: of null an empty one, of a string the one that it contains."""
    try:
        text = json.loads(value)
        if text is None:
            return "{}"
        return without_surrogates(text) if isinstance(text, str) and isinstance(strict_loads(text), dict) else None
    except (ValueError, RecursionError):
        return None


def strict_loads(text: str) -> Any:
    """The value of JSON text. Python would also read NaN and Infinity, which are no JSON. Raises ValueError."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_call(answer: AnswerText, names: Container[str]) -> Reading[bool]:
    """Reads a call such as `{"name": "f", "arguments": {...}}`. Returns False if it is none; the text stays held.

    `parameters` is another name of `arguments`. `id` and `type` may be there, and any key after the name. The arguments
    may come before the name.
    """
    if not (yield from answer.accept("{")):
        return False
    calls_before = answer.num_calls
    name: str | None = None
    early: list[str] = []
    while True:
        yield from answer.skip_space()
        key = yield from read_string(answer)
        yield from answer.skip_space()
        if key is None or not (yield from answer.accept(":")):
            break
        yield from answer.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(answer)
            if name is None or name not in names:
                return False
        elif key in ("arguments", "parameters") and name is not None and not early:
            if answer.num_calls > calls_before or not (yield from read_arguments(answer, name)):
                break
        elif key in ("arguments", "parameters") and not early:
            if not (yield from copy_value(answer, early.append)):
                break
        elif (
            key in ("name", "arguments", "parameters")
            or (name is None and key not in ("id", "type"))
            or not (yield from copy_value(answer, _ignore))
        ):
            break
        yield from answer.skip_space()
        if (yield from answer.accept(",")):
            continue
        return (yield from _end_of_call(answer, name, "".join(early), calls_before))
    return answer.num_calls > calls_before


def _end_of_call(answer: AnswerText, name: str | None, early: str, calls_before: int) -> Reading[bool]:
    closed = yield from answer.accept("}")
    if answer.num_calls > calls_before:
        return True
    arguments = "{}" if not early else early if early.startswith("{") else _object_in(early)
    if not closed or name is None or arguments is None:
        return False
    answer.start_call(name)
    answer.arguments(arguments)
    return True


def _ignore(text: str) -> None:
    """Drops a piece of text."""


def without_surrogates(text: str) -> str:
    """Replace surrogates in JSON text by escapes, because UTF-8 cannot encode them."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def json_string(text: str) -> str:
    """The text as a JSON string, without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
