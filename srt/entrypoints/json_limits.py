"""Limits on the JSON of a large body, checked before it is decoded.

Decoding makes a Python object of every value: an empty list takes 3 bytes of JSON and 60 bytes of memory. The decoder
holds the interpreter's lock during the whole call. With these limits, any 16 MiB of JSON decode in less than 0.1 s and
into less than 100 MB.
"""

from __future__ import annotations

from ..errors import InvalidRequest

MAX_STRINGS = 200_000
"""Maximum number of strings in one body, names of members included. A chat of 10,000 messages has about 50,000."""
MAX_CONTAINERS = 100_000
"""Maximum number of lists and objects in one body."""
MAX_VALUES = 2_000_000
"""Maximum number of list elements and object members in one body. A prompt of a million token ids has a million."""

_SLICE_BYTES = 1 << 18
"""Bytes that are checked at a time. Other threads can run between two slices."""


def check_limits(body: bytes | bytearray) -> None:
    """Raises InvalidRequest when a body exceeds one of the limits. Takes linear time.

    Invalid JSON passes this check when the part before its first mistake is within the limits. That is enough, because
    the decoder stops there.
    """
    num_quotes = num_containers = num_values = 0
    start = 0
    while start < len(body):
        end = start + _SLICE_BYTES
        piece = body[start:end]
        if end < len(body) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # this backslash escapes the first character of the next slice
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
