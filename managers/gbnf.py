"""Writes GBNF so that the translator of llguidance reads it right.

That translator copies characters into strings and regular expressions of another notation, where some mean something
else: it loses the zeros of `\\u00e9`, refuses a tab within a string, and takes `&&` in a class for an intersection.
"""

from __future__ import annotations

import re

_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)"
_CHAR = rf"(?:{_ESCAPE}|[^\\])"
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\r\n]*', re.DOTALL)
"""What has characters: strings, classes and comments."""
_RANGE_OR_CHAR = re.compile(rf"({_CHAR})-({_CHAR})|{_CHAR}", re.DOTALL)
_STRING_CHAR = re.compile(_CHAR, re.DOTALL)
_MISREAD = {"&", "~", "-", r"\[", r"\]"}


def plain(text: str) -> str:
    """The same grammar without characters and escapes that llguidance's translator misreads."""
    return _TOKEN.sub(_plain_token, text)


def _plain_token(token: re.Match[str]) -> str:
    text = token[0]
    if text[0] == "#":
        return text
    if text[0] == '"':
        return f'"{_STRING_CHAR.sub(lambda found: _plain_char(found[0]), text[1:-1])}"'
    start = 2 if text[1] == "^" else 1
    return text[:start] + _RANGE_OR_CHAR.sub(_plain_range, text[start:-1]) + "]"


def _plain_range(found: re.Match[str]) -> str:
    return f"{_plain_char(found[1])}-{_plain_char(found[2])}" if found[1] else _plain_char(found[0])


def _plain_char(char: str) -> str:
    """`char`: one character or escape. An unknown escape, and one of no character, are left to the translator."""
    if char[:2] in (r"\u", r"\U") and len(char) > 2:
        code = int(char[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            return char
    elif char in _MISREAD or char < " ":
        code = ord(char[-1])
    else:
        return char
    return f"\\x{code:02x}" if code < 0x100 else chr(code)
