"""Paths that clients name. Only paths in folders that the operator has allowed are used."""

from __future__ import annotations

from pathlib import Path

from ..errors import InvalidRequest, NotAllowed


def path_inside(folder: str, given: str, *, param: str, flag: str) -> Path:
    """The absolute path of `given`, which is relative to `folder` or absolute, with all symbolic links resolved.

    Raises NotAllowed for a path outside `folder`, and InvalidRequest for a text that is no path. `flag`: the flag that
    names the folder.
    """
    root = Path(folder).resolve()
    try:
        path = (root / given).resolve()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, a loop of links
        raise InvalidRequest(f"{param} is not a path", param=param) from None
    if not path.is_relative_to(root):
        raise NotAllowed(f"{param} must be inside the folder that {flag} names", param=param)
    return path
