"""A benchmark case: one kernel at one shape, with its bytes and operations, its calls, and its check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .timing import Call

_CPU_CACHE_BYTES = 32 << 20
_MAX_SETS = 16


@dataclass
class Case:
    """A case with its data on the device. The calls of one list do the same work on different inputs."""

    num_bytes: int
    """Minimum number of bytes to move: each input is read once, each output is written once."""
    flops: int
    calls: Sequence[Call]
    """Calls of our kernel; empty for a case that measures only a library."""
    baselines: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    """Calls of torch for the same work. An operation that the device does not support raises RuntimeError."""


@dataclass(frozen=True)
class CaseMaker:
    """Makes a case when it is needed, so that only one is in memory."""

    kernel: str
    shape: str
    make: Callable[[], Case]
    check: Callable[[], float] | None
    """Relative error against the reference implementation in float64, on small random data; None for a library."""
    tolerance: float = 1e-2


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||, in float64 on the CPU. NaN if `out` has a NaN."""
    out, reference = out.double().cpu(), reference.double().cpu()
    return float((out - reference).norm() / reference.norm())


def num_sets(num_bytes: int, device: torch.device) -> int:
    """Number of input sets of `num_bytes` each that together are several times as large as the cache."""
    if device.type != "cuda":
        return 1 if num_bytes > _CPU_CACHE_BYTES else 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(_MAX_SETS, -(-4 * cache // num_bytes)))


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output tensor full of NaN, so that a check notices elements that a kernel did not write."""
    return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)
