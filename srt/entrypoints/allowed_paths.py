"""Paths that clients name, and those of the operator. Clients may name only paths in folders that the operator has
allowed."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InvalidRequest, NotAllowed
from ..plain_values import is_utf8
from ..server_args import ServerArgs

_MAX_PATH_CHARS = 4096
"""Linux opens no longer path. Resolving one takes time for each folder in it, in which the server answers nobody."""


def check_folders(args: ServerArgs) -> None:
    """Raises ValueError for a folder of files to read that does not exist. Every load from it would be refused."""
    for flag, folder in (("--update-weights-dir", args.update_weights_dir), ("--lora-dir", args.lora_dir)):
        if folder is not None and not os.path.isdir(folder):
            raise ValueError(f"{flag} must be a folder that exists, got {folder}")


def check_recording(args: ServerArgs) -> None:
    """Raises ValueError if --record-schedule names no file that can be written. The scheduler makes it only after it
    has loaded the model, which may take minutes."""
    if args.record_schedule is None:
        return
    path = Path(args.record_schedule)
    is_file = path.is_file() or not path.exists()
    # A file that exists is renamed, and the folder gets a lock file, too.
    if not is_file or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(
            "--record-schedule must name a file in a folder that exists and can be written, "
            f"got {args.record_schedule!r}"
        )


def path_inside(folder: str, given: str, *, param: str, flag: str) -> Path:
    """The absolute path of `given`, which is relative to `folder` or absolute, with all symbolic links resolved.

    But a link to a file keeps its name: in Hugging Face's cache, only the links have the names of a model's files.

    Raises NotAllowed for a path outside `folder`, and for a link outside to a file inside. Raises InvalidRequest for a
    text that is no path, and for a link to a name that no message can have. `flag`: the flag that names the folder.
    """
    if len(given) > _MAX_PATH_CHARS:
        raise InvalidRequest(f"{param} must have at most {_MAX_PATH_CHARS} characters, got {len(given)}", param=param)
    root = Path(folder).resolve()
    try:
        paths = [(root / given).resolve()]
        if os.path.isfile(paths[0]):  # Path.is_file raises for a name that is too long
            paths.append((root / given).parent.resolve() / Path(given).name)
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, a loop of links
        raise InvalidRequest(f"{param} is not a path", param=param) from None
    for path in paths:
        if not path.is_relative_to(root):
            raise NotAllowed(f"{param} must be inside the folder that {flag} names", param=param)
        if not is_utf8(str(path)):
            raise InvalidRequest(f"{param} must not lead to a path that is not valid UTF-8", param=param)
    return paths[-1]
