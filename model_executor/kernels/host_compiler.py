"""The C compiler that Triton needs on the host to build its launchers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_c_compiler() -> Iterator[None]:
    """Raises ValueError that says what is missing if Triton finds no C compiler, or if the compiler fails."""
    try:
        yield
    except Exception as error:
        missing = _what_is_missing(error)
        if missing is None:
            raise
        raise ValueError(
            f"the Triton kernels need {missing[0]} on this machine, because Triton builds the code that launches them: "
            f"{missing[1]}"
        ) from error


def _what_is_missing(error: Exception) -> tuple[str, str] | None:
    """What Triton lacked to build a launcher, and what to do. None: the error has another cause."""
    if isinstance(error, RuntimeError) and "C compiler" in str(error):
        return "a C compiler", "install gcc or clang, or set CC to the compiler's path"
    status = getattr(error, "returncode", None)  # of a CalledProcessError
    if status:
        return "a C compiler and the headers of Python", (
            f"the compiler has ended with status {status} and has written why to stderr; if it has not found Python.h, "
            "install a package such as python3-dev"
        )
    return None
