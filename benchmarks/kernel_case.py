"""One kernel at one shape: what it must move and multiply, how to call it, what to compare it with, how to check it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .timing import Call

_CPU_CACHE_BYTES = 32 << 20
_MOST_SETS = 16


@dataclass
class Case:
    """Everything on the device already; calls of one list do the same work on inputs of their own."""

    num_bytes: int
    """fewest that must be moved: each input read once, each output written once"""
    flops: int
    calls: Sequence[Call]
    """ours; empty where there is nothing of ours and a library is measured alone"""
    rivals: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    """the same work by torch; one that this device cannot do raises RuntimeError when it is called"""


@dataclass(frozen=True)
class CaseMaker:
    """A case that is not in memory yet."""

    kernel: str
    shape: str
    make: Callable[[], Case]
    check: Callable[[], float] | None
    """relative error against the twin in float64, on fresh random data of a small size; None: a library's own"""
    tolerance: float = 1e-2


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||, in float64 on the CPU; a NaN stays one."""
    out, reference = out.double().cpu(), reference.double().cpu()
    return float((out - reference).norm() / reference.norm())


def num_sets(num_bytes: int, device: torch.device) -> int:
    """How many sets of inputs of `num_bytes` it takes to be several times the cache."""
    if device.type != "cuda":
        return 1 if num_bytes > _CPU_CACHE_BYTES else 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(_MOST_SETS, -(-4 * cache // num_bytes)))


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output that shows what was not written."""
    return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)
