"""Limits on the JSON of a large body, checked before it is decoded.

Decoding makes an object of every value: an empty list is three bytes of JSON and sixty of memory. The decoder is one
call that holds the interpreter's lock from its first byte to its last. These limits keep that call below 0.1 s and its
result below 100 MB, whatever 16 MiB of JSON contain.
"""

from __future__ import annotations

from ..errors import InvalidRequest

MAX_STRINGS = 200_000
"""Strings in one body, the names of members included. A chat of 10,000 messages has about 50,000."""
MAX_CONTAINERS = 100_000
"""Lists and objects in one body."""
MAX_VALUES = 2_000_000
"""Elements of lists and members of objects in one body: a prompt of a million token ids has a million."""

_SLICE_BYTES = 1 << 18
"""What is looked at in one go: other threads get their turn between two slices."""


def check_limits(body: bytes | bytearray) -> None:
    """Raises InvalidRequest when a body has more strings, containers or values than these limits.

    Takes linear time. What is not JSON is counted up to its first mistake; nothing behind that is decoded.
    """
    num_quotes = num_containers = num_values = 0
    start = 0
    while start < len(body):
        end = min(start + _SLICE_BYTES, len(body))
        piece = body[start:end]
        if end < len(body) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # this backslash escapes the next slice's first character
        start += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        in_string = num_quotes % 2
        num_quotes += piece.count(b'"')
        _check("strings", num_quotes // 2, MAX_STRINGS)
        outside = b"".join(piece.split(b'"')[in_string::2])
        num_containers += outside.count(b"[") + outside.count(b"{")
        _check("lists and objects", num_containers, MAX_CONTAINERS)
        num_values += outside.count(b",")
        _check("values", num_values, MAX_VALUES)


def _check(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"the body must have at most {limit} {what}")
