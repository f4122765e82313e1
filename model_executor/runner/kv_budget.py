"""How many tokens of keys and values fit into the memory that is left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...srt.machine.cgroups import ROOT, ControlGroup, control_groups, read_text

GPU_MARGIN = 0.02
"""of a GPU's memory stays free by default: for what allocators round up, and for neighbours that grow a little"""
DEFAULT_CPU_BYTES = 4 << 30
DEFAULT_CPU_SHARE = 0.25
"""of the memory that is available: a server on somebody's own machine takes no more unless it is told to"""
_UNLIMITED = 1 << 60
"""version 1 of control groups writes "no limit" as a number beyond this"""


@dataclass(frozen=True)
class Memory:
    """Bytes of a device, or of what this process may use of a host."""

    total: int
    available: int


def num_kv_tokens(
    memory: Memory,
    bytes_per_token: int,
    *,
    page_size: int,
    context_len: int,
    mem_fraction_static: float | None,
    max_total_tokens: int | None,
    on_cpu: bool,
    reserve: int = 0,
) -> int:
    """Tokens of the KV pool, a multiple of the page size. `memory` is as it is after the weights were loaded.

    `reserve` bytes are left for steps (activations, graphs); what is left after that always bounds the pool.
    `max_total_tokens` decides where it is given. Otherwise `mem_fraction_static` of the total memory is for weights and
    keys and values together; without it the pool is all that is left of a GPU but a margin, and modest on a CPU. Raises
    ValueError when that leaves less than two pages, or when the tokens asked for do not fit.
    """
    available = memory.available - reserve
    # One page more is allocated than is served: the dummy that padded writes hit.
    fits = (available // bytes_per_token - page_size) // page_size * page_size
    if max_total_tokens is not None:
        if max_total_tokens > fits:
            raise ValueError(
                f"max_total_tokens {max_total_tokens} needs {_gib(max_total_tokens * bytes_per_token)}, "
                f"but only {_gib(available)} are available ({max(fits, 0)} tokens)"
            )
        num_tokens = max_total_tokens // page_size * page_size
    else:
        if mem_fraction_static is not None:
            budget = memory.available - int(memory.total * (1 - mem_fraction_static))
        elif on_cpu:
            wanted = max(DEFAULT_CPU_BYTES, context_len * bytes_per_token)
            budget = min(wanted, int(available * DEFAULT_CPU_SHARE))
        else:
            budget = available - int(memory.total * GPU_MARGIN)
        num_tokens = min(fits, budget // bytes_per_token // page_size * page_size)
    if num_tokens < 2 * page_size:
        raise ValueError(
            f"no room for keys and values: {_gib(memory.available)} of {_gib(memory.total)} are available after the "
            f"weights were loaded, {_gib(reserve)} are for steps, and a token takes {bytes_per_token} bytes; raise "
            "mem_fraction_static if it was given, else serve with shorter steps (max_prefill_tokens) or fewer requests"
        )
    return num_tokens


class _Files(NamedTuple):
    """Names in a control group of one version."""

    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[str, ...]
    """entries of memory.stat: file pages count as used, but the kernel drops them when memory is wanted"""


_CGROUP_FILES = {
    2: _Files(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    1: _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def host_memory(proc: Path = Path("/proc"), cgroup_root: Path = ROOT) -> Memory:
    """The machine's memory, or less where a control group of this process allows less (containers, systemd, Slurm)."""
    lines = read_text(proc / "meminfo").splitlines()
    meminfo = {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)}
    total, available = meminfo["MemTotal"], meminfo["MemAvailable"]
    for group in control_groups("memory", cgroup_root, proc / "self" / "cgroup"):
        files = _CGROUP_FILES[group.version]
        limits = [limit for name in files.limits if (limit := group.number(name)) is not None and limit < _UNLIMITED]
        if limits:
            total = min(total, *limits)
            available = min(available, min(limits) - _used(group, files))
    return Memory(total, max(available, 0))


def _used(group: ControlGroup, files: _Files) -> int:
    """Bytes that the group cannot be rid of."""
    stat = dict(line.split(maxsplit=1) for line in group.read("memory.stat").splitlines())
    return max((group.number(files.usage) or 0) - sum(int(stat.get(name, 0)) for name in files.page_cache), 0)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
