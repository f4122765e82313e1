"""The limit of open files of this process. Each connection is an open file."""

from __future__ import annotations

import resource

_TARGET_LIMIT = 1 << 16


def raise_open_files_limit() -> int:
    """Raise this process's limit to 65,536, or to the hard limit if that is lower. Returns the new limit.

    Child processes inherit the limit. The usual limit of 1,024 is made for programs that call `select`. A process that
    reaches its limit cannot accept connections, and libzmq aborts it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _TARGET_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _TARGET_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _TARGET_LIMIT if soft == resource.RLIM_INFINITY else soft
