"""The files 0, 1 and 2 of this process."""

from __future__ import annotations

import os


def open_standard_files() -> None:
    """Open those of the files 0, 1 and 2 that are closed, on /dev/null. Child processes inherit them.

    A program may be started without these files (`<&-` in a shell, some supervisors). The next socket would then get
    one of these numbers. What a library writes to stderr would go to a client. When libuv closes a socket with such a
    number, it aborts the process.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
