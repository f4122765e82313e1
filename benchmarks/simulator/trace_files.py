"""Published traces as traffic: Mooncake's JSON lines and BurstGPT's CSV. They hold lengths and no texts."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..text_files import MAX_LENGTH, MOONCAKE_BLOCK, mooncake_lines
from .traffic import SimRequest

_OWN = 1 << 62
"""Added to the number of a request to make the tokens that it shares with no other one."""
_TRIPLES = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def mooncake(path: Path, vocab_size: int, seed: int, num_requests: int | None = None) -> Iterator[SimRequest]:
    """A trace with one JSON object in a line: `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

    The first request arrives at 0 s. Raises ValueError as `mooncake_lines`.
    """
    start_s = None
    for place, (at_s, input_len, output_len, hash_ids) in enumerate(mooncake_lines(path, num_requests)):
        start_s = at_s if start_s is None else start_s
        num_blocks = -(-input_len // MOONCAKE_BLOCK)
        shared = [tokens_of(hash_id, MOONCAKE_BLOCK, vocab_size, seed) for hash_id in hash_ids[:num_blocks]]
        num_own = max(input_len - MOONCAKE_BLOCK * len(hash_ids), 0)
        own = tokens_of(_OWN + place, num_own, vocab_size, seed)
        yield SimRequest(at_s - start_s, np.concatenate([*shared, own])[:input_len], output_len)


def burstgpt(path: Path, vocab_size: int, seed: int, num_requests: int | None = None) -> Iterator[SimRequest]:
    """A trace with the columns `Timestamp` (s), `Request tokens` and `Response tokens`, and perhaps `Session ID`.

    The prompts of a session are prefixes of one sequence of tokens; other prompts share nothing. Requests that failed
    have 0 response tokens, and are left out. The first request arrives at 0 s. Raises ValueError, with the line's
    number, for a line of another format.
    """
    start_s = None
    num_taken = 0
    for where, row in _rows(path):
        try:
            at_s, input_len, output_len = (
                float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"])
            )  # fmt: skip
        except (TypeError, ValueError):
            raise ValueError(f"{where}: the time and the numbers of tokens must be numbers") from None
        if not math.isfinite(at_s) or max(input_len, output_len) > MAX_LENGTH:
            raise ValueError(f"{where}: the time must be finite, and the numbers at most {MAX_LENGTH}")
        if input_len < 1 or output_len < 1:
            continue
        start_s = at_s if start_s is None else start_s
        session = (row.get("Session ID") or "").strip()
        key = _key_of(session) if session else _OWN + num_taken
        yield SimRequest(at_s - start_s, tokens_of(key, input_len, vocab_size, seed), output_len)
        num_taken += 1
        if num_taken == num_requests:
            return


def tokens_of(key: int, count: int, vocab_size: int, seed: int) -> np.ndarray:
    """The first `count` tokens of the sequence of this key, int32. Other keys have other sequences. No token is 0."""
    with np.errstate(over="ignore"):
        mixed = np.arange(count, dtype=np.uint64) + np.uint64(key & 0x7FFFFFFFFFFFFFFF) * _TRIPLES[0]
        mixed += np.uint64(seed & 0xFFFFFFFF) * _TRIPLES[2]
        for shift, factor in ((30, _TRIPLES[1]), (27, _TRIPLES[2])):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
        mixed ^= mixed >> np.uint64(31)
    return (1 + mixed % np.uint64(vocab_size - 1)).astype(np.int32)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The place and the fields of each row. Raises ValueError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = {"Timestamp", "Request tokens", "Response tokens"} - set(rows.fieldnames or ())
            if missing:
                raise ValueError(f"{path}: no column {', '.join(sorted(missing))}; this is not a trace of BurstGPT")
            for row in rows:
                yield f"{path}, line {rows.line_num}", row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _key_of(name: str) -> int:
    """A hash of a text (FNV-1a) that is the same in every process."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0x3FFFFFFFFFFFFFFF
    return value
