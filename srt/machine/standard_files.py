"""The files 0, 1 and 2 of this process."""

from __future__ import annotations

import os


def open_standard_files() -> None:
    """Open those of the files 0, 1 and 2 that are closed, on /dev/null. Child processes inherit them.

    A program may be started without these files (`<&-` in a shell, some supervisors). The next socket would then get
    such a number: what a library writes to stderr would go to a client, and libuv aborts the process when it closes it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
