"""The compiled operations of a CPU (csrc/cpu), in the build that suits this processor.

They are built when the package is installed, once for each kind of processor that `VARIANTS` names. Where none was
built, or none suits, everything runs on plain torch.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

_FOLDER = Path(__file__).parent


class Variant(NamedTuple):
    """A build of csrc/cpu; setup.py has the compiler's flags for each name."""

    name: str
    runs_here: Callable[[], bool]
    bfloat16: bool
    """Whether its linear layers multiply bfloat16."""


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


VARIANTS = (
    Variant("avx512_bf16", torch.cpu._is_avx512_bf16_supported, True),
    Variant("avx2", torch.cpu._is_avx2_supported, False),
    Variant("generic", lambda: not _is_x86(), False),
)
"""The fastest first."""


@functools.cache
def load() -> Variant | None:
    """Makes `torch.ops.tercet_cpu` known; None where there is no build for this processor."""
    for variant in VARIANTS:
        path = next(_FOLDER.glob(f"_cpu_{variant.name}.*so"), None)
        if path is not None and variant.runs_here():
            torch.ops.load_library(str(path))
            return variant
    return None


def lanes() -> int:
    """Floats of a vector register: a panel of a packed matrix is twice as wide."""
    return int(torch.ops.tercet_cpu.lanes())


def take_threads() -> None:
    """From now on the compiled operations compute on as many threads as torch did, and torch on one. A thread of
    torch's (OpenMP) goes on spinning for milliseconds after its work, on a core that these operations then lack: one
    indexing of 9,216 numbers in a decode step made all of it 1.3 times as slow."""
    torch.ops.tercet_cpu.set_num_threads(torch.get_num_threads())
    torch.set_num_threads(1)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether linear layers of this type run on the compiled operations."""
    variant = load()
    return variant is not None and (dtype == torch.float32 or (dtype == torch.bfloat16 and variant.bfloat16))


def kv_panel(dtype: torch.dtype, head_dim: int) -> int | None:
    """Slots of a block of a KV pool in panels (csrc/cpu/kv_panels.h); None where keys have to be packed first."""
    panel = 2 * lanes()
    return panel if multiplies(dtype) and head_dim % panel == 0 else None
