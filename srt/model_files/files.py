"""Opens the files of a model and reads JSON out of them.

Only regular files are opened: whoever opens a named pipe waits for its writer, which may never come.
"""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader
from typing import Any, TypeAlias

AnyPath: TypeAlias = "str | os.PathLike[str]"


def open_file(path: AnyPath) -> BufferedReader:
    """The file, opened for reading bytes. Raises ValueError when it is not a regular file; OSError."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 (the caller's to close)
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise ValueError(f"{os.fspath(path)!r} must be a regular file, got {_kind(mode)}")
    return file


def read_text(path: AnyPath) -> str:
    """The whole file. Raises ValueError when it is not a regular file of UTF-8; OSError."""
    with open_file(path) as file:
        try:
            return file.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{os.fspath(path)!r} must be text in UTF-8: {error}") from None


def read_json_object(path: AnyPath) -> dict[str, Any]:
    """Raises ValueError when the file does not hold a JSON object; OSError."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{os.fspath(path)!r} must hold a JSON object, got {type(content).__name__}")
    return content


def _open_at_once(path: str, flags: int) -> int:
    # A named pipe is opened without its writer then. With a regular file the flag does nothing.
    return os.open(path, flags | os.O_NONBLOCK)


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "another kind of file"
