"""The limit of open files: every connection is one."""

from __future__ import annotations

import resource

_ENOUGH_FILES = 1 << 16


def raise_open_files_limit() -> int:
    """Raises this process' limit as far as its user may, to 65,536 at most; returns the limit. Children inherit it.

    The usual limit, 1,024, suits programs that call `select`. A process that reaches its limit can accept no
    connection, and libzmq ends it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _ENOUGH_FILES if soft == resource.RLIM_INFINITY else soft
