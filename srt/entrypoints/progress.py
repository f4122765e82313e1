"""The progress bar of a call of the Engine, on stderr. It never makes the call fail."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from tqdm import tqdm

_ABOVE = 16
"""With more samples than this, a terminal shows a bar."""


def progress_bar(num_samples: int, wanted: bool | None) -> Any:
    """A bar for so many samples. `wanted` None: only a terminal shows it, and only for more than 16 samples."""
    shown = num_samples > _ABOVE and _is_terminal() if wanted is None else wanted
    return tqdm(total=num_samples, unit="sample", disable=not shown, file=_Stderr(), dynamic_ncols=True)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # stderr is None, an object of the program, or closed
        return False


class _Stderr:
    """stderr without its errors. After an error, tqdm keeps a lock, for which all later bars of the process wait."""

    @property
    def encoding(self) -> str | None:
        return getattr(sys.stderr, "encoding", None)

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def write(self, text: str) -> None:
        with contextlib.suppress(Exception):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
