"""The compiled CPU operations (csrc/cpu): choosing and loading the build for this processor.

The operations are built when the package is installed, once for each kind of processor in `VARIANTS`. A checkout has
only the builds for its machine. If no build can be loaded, torch's operations replace them, and a warning says why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from . import cpu_build

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parent

logger = logging.getLogger(__name__)


class Variant(NamedTuple):
    """A build of csrc/cpu. cpu_build.py has the compiler flags for each name, and what the processor must have."""

    name: str
    is_supported: Callable[[], bool]


VARIANTS = tuple(
    Variant(name, functools.partial(build.runs_with, torch.cpu.get_capabilities()))
    for name, build in cpu_build.builds().items()
)
"""The fastest first."""


@functools.cache
def load() -> Variant | None:
    """Load the fastest build for this processor as `torch.ops.tercet_cpu`. Returns None if none can be loaded."""
    problems: list[str] = []
    for variant in VARIANTS:
        if not variant.is_supported():
            continue
        if problems and not _path(variant.name).exists():
            continue  # a checkout has no build between the fastest and the slowest
        problem = _load_build(variant.name)
        if problem is None:
            if problems:
                logger.warning(
                    "The CPU runs on the slower build of the C++ kernels, for %s: %s. %s",
                    variant.name,
                    "; ".join(problems),
                    build_hint(),
                )
            return variant
        problems.append(problem)
    if problems:
        logger.warning(
            "The C++ kernels could not be loaded: %s. The CPU runs on torch's operations, which are slower. %s",
            "; ".join(problems),
            build_hint(),
        )
    else:
        logger.warning(
            "The C++ kernels need AVX2 on an x86 processor. The CPU runs on torch's operations, which are slower."
        )
    return None


def has_fastest_build() -> bool:
    """Whether `load` returns the fastest variant that this processor supports. scripts/setup asks."""
    return load() == next((variant for variant in VARIANTS if variant.is_supported()), None)


def stamp(variant: Variant) -> cpu_build.BuildStamp | None:
    """What a build was made from. Raises OSError if its file cannot be read."""
    return cpu_build.read_stamp(_path(variant.name))


def build_hint() -> str:
    """Instructions for building the operations."""
    return cpu_build.build_hint(_ROOT)


def _path(name: str) -> Path:
    return _FOLDER / cpu_build.file_name(name)


def _load_build(name: str) -> str | None:
    """Load a build into torch. Returns None, or the reason why it was not loaded."""
    path = _path(name)
    if not path.exists():
        for other in cpu_build.other_builds(_FOLDER, name):
            return f"{other.name} was built for another Python; this one needs {path.name}"
        return f"{path.name} was not built (no C++ compiler, or its build failed)"
    try:
        stamp = cpu_build.read_stamp(path)
        if stamp is None:
            return f"{path.name} has no record of what it was built for"
        # A build for another torch may load and then crash, so the stamp is checked first.
        if stamp.torch != torch.__version__:
            return f"{path.name} was built for torch {stamp.torch}, and this is torch {torch.__version__}"
        if stamp.sources != (cpu_build.sources_digest(_ROOT) or stamp.sources):
            return f"{path.name} was built from other sources than those in csrc/cpu"
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded ({error})"
    return None


def lanes() -> int:
    """The number of floats in a vector register. A panel of a packed matrix is twice as wide."""
    return int(torch.ops.tercet_cpu.lanes())


def take_threads() -> None:
    """Give torch's threads to the compiled operations, and leave one thread to torch.

    A torch thread (OpenMP) spins for milliseconds after its work, on a core that the compiled operations need: a
    decode step with one torch indexing of 9,216 numbers took 1.3 times as long. A second call changes nothing, unless
    torch got threads again.
    """
    threads = torch.get_num_threads()
    if threads > 1:
        torch.ops.tercet_cpu.set_num_threads(threads)
        torch.set_num_threads(1)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether the compiled operations can multiply this type in linear layers."""
    return dtype in (torch.float32, torch.bfloat16) and load() is not None


def kv_panel(dtype: torch.dtype, head_dim: int, latent_dim: int | None = None) -> int | None:
    """The panel of the KV pool in slots (csrc/cpu/kv_panels.h); None if attention has to pack K and V at each step.

    `latent_dim`: that of latent attention, or None.
    """
    if not multiplies(dtype):
        return None
    panel = 2 * lanes()
    return panel if head_dim % panel == 0 and (latent_dim is None or latent_dim % panel == 0) else None
