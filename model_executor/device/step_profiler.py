"""torch's profiler as a recorder of steps. A module of its own, because only a profile needs it."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from torch.autograd.profiler import profile, record_function

_MAX_END_BYTES = 8192
"""The end of a trace has its path, which has at most 4096 bytes."""


class StepProfiler:
    """A recording that begins when it is made.

    It uses torch.autograd.profiler, not torch.profiler: the first start of the latter imports 900 modules, which takes
    seconds, and the engine would stand still.
    """

    def __init__(self, *, cpu: bool, gpu: bool, record_shapes: bool, with_stack: bool) -> None:
        """`gpu`: only with a CUDA device. Raises RuntimeError if torch cannot record."""
        self._profile = profile(
            use_cpu=cpu,
            use_device="cuda" if gpu else None,
            use_kineto=True,
            record_shapes=record_shapes,
            with_stack=with_stack,
        )
        self._profile.__enter__()

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named span of the trace. After `stop` it is recorded nowhere."""
        return record_function(name)

    def stop(self) -> None:
        """Wait for the device, and end the recording."""
        self._profile.__exit__(None, None, None)

    def write(self, path: Path) -> None:
        """Write the trace in the format of Chrome, compressed. The file appears when it is complete. Raises OSError."""
        # torch writes to `unfinished` and renames it.
        plain, unfinished, packed = (path.with_name(f".{path.name}.{end}") for end in ("json", "json.tmp", "part"))
        try:
            plain.touch()  # torch raises no OSError for a folder that cannot be written to
            self._profile.export_chrome_trace(str(plain))
            if not _is_whole(plain):  # nor for a full disk
                raise OSError(errno.EIO, "torch could not write it; the disk may be full")
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
                shutil.copyfileobj(source, target)
            os.replace(packed, path)
        finally:
            for file in (plain, unfinished, packed):
                file.unlink(missing_ok=True)


def _is_whole(plain: Path) -> bool:
    """Whether torch's trace has its end: an object whose last field is `traceName`."""
    with plain.open("rb") as file:
        file.seek(max(0, plain.stat().st_size - _MAX_END_BYTES))
        end = file.read(_MAX_END_BYTES).rstrip()
    return b'"traceName"' in end and end.endswith(b"}")
