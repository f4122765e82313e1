"""Paths that clients name. Only paths in folders that the operator has allowed are used."""

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
