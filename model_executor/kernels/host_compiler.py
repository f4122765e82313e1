"""The C compiler that Triton needs on the host to build its launchers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_c_compiler() -> Iterator[None]:
    """Raises ValueError that says what is missing if Triton finds no C compiler."""
    try:
        yield
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        raise ValueError(
            "the Triton kernels need a C compiler on this machine, because Triton builds the code that launches them: "
            "install gcc or clang, or set CC to the compiler's path"
        ) from error
