"""Reading the files of a model, as bytes, text or JSON.

Only regular files are read: reading a named pipe would wait for its writer, perhaps forever.
"""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader
from typing import Any, TypeAlias

AnyPath: TypeAlias = "str | os.PathLike[str]"


def has_file(path: AnyPath) -> bool:
    """Whether a model has this file. A link to a missing file counts: it must be refused, and not ignored."""
    return os.path.lexists(path)


def open_file(path: AnyPath) -> BufferedReader:
    """Open a file for reading bytes. Raises ValueError if it is not a regular file, and OSError."""
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 (the caller closes it)
    except FileNotFoundError as error:
        if not os.path.islink(path):
            raise
        raise FileNotFoundError(f"{os.fspath(path)!r} is a link to a missing file, {os.readlink(path)!r}") from error
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise ValueError(f"{os.fspath(path)!r} must be a regular file, got {_kind(mode)}")
    return file


def read_text(path: AnyPath, *, max_bytes: int | None = None) -> str:
    """Read a whole text file. Raises ValueError if it is not a regular file in UTF-8, or is too large, and OSError."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{os.fspath(path)!r} must have at most {max_bytes:,} bytes, got {size:,}")
        try:
            return file.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{os.fspath(path)!r} must be text in UTF-8: {error}") from None


def read_json_object(path: AnyPath, *, max_bytes: int | None = None) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError if the file does not hold one, or is too large, and OSError."""
    text = read_text(path, max_bytes=max_bytes)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{os.fspath(path)!r} must hold a JSON object, got {type(content).__name__}")
    return content


def _open_without_waiting(path: str, flags: int) -> int:
    # O_NONBLOCK: opening a named pipe does not wait for its writer. On a regular file the flag has no effect.
    return os.open(path, flags | os.O_NONBLOCK)


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "another kind of file"
