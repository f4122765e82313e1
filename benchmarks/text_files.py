"""Reads texts, and traces with one JSON object in a line. Errors name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

MOONCAKE_BLOCK = 512
"""Tokens for each hash id of a trace (Mooncake: a KVCache-centric disaggregated architecture, 2024)."""
MAX_LENGTH = 1 << 24
"""Tokens of a prompt or an answer in a trace. No model has such a context, and more would fill the memory."""
_MAX_NUMBER = 1e15
"""Of a time in ms: beyond it, float has no fractions of a second."""


def read_text(path: Path) -> str:
    """Reads a whole text. Raises ValueError if there is no file of text in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def json_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the JSON object of each line that is not empty. Raises ValueError."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _object(where, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


class MooncakeLine(NamedTuple):
    """A request of a Mooncake trace."""

    at_s: float
    input_len: int
    output_len: int
    hash_ids: list[int]
    """One for each block of 512 tokens of the prompt; equal ids are equal tokens. Tokens beyond them are shared with no
    other request."""


def mooncake_lines(path: Path, num_requests: int | None) -> Iterator[MooncakeLine]:
    """The first requests of a trace, in the order of its lines. None: all.

    Each line is a JSON object with `timestamp` (ms), `input_length`, `output_length` and perhaps `hash_ids`. Raises
    ValueError, with the line's number, for a line of another format.
    """
    for where, line in islice(json_objects(path), num_requests):
        hash_ids = line.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(type(hash_id) is int and hash_id >= 0 for hash_id in hash_ids):
            raise ValueError(f"{where}: hash_ids must be a list of numbers")
        input_len, output_len = (_length(line, name, where) for name in ("input_length", "output_length"))
        yield MooncakeLine(_milliseconds(line, where) / 1000, input_len, output_len, hash_ids)


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where}: not an object")
    return content


def _milliseconds(line: dict[str, Any], where: str) -> float:
    value = line.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_NUMBER:
        raise ValueError(
            f"{where}: timestamp must be a number of less than {_MAX_NUMBER:g} milliseconds, got {value!r}"
        )
    return float(value)


def _length(line: dict[str, Any], name: str, where: str) -> int:
    value = line.get(name)
    if type(value) is not int or not 1 <= value <= MAX_LENGTH:
        raise ValueError(f"{where}: {name} must be a number from 1 to {MAX_LENGTH}, got {value!r}")
    return value
