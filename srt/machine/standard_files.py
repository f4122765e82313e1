"""The files 0, 1 and 2 of this process."""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Open those of the files 0, 1 and 2 that are closed, on /dev/null. Child processes inherit them.

    A program may be started without these files (`<&-` in a shell, some supervisors). The next socket would then get
    one of these numbers. What a library writes to stderr would go to a client. When libuv closes a socket with such a
    number, it aborts the process. Python's own `sys.stdin`, `sys.stdout` and `sys.stderr` would be None.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False, errors="backslashreplace"))
