"""Tunes the compiled CPU operations for the processor, by a measurement that runs once on each machine.

The choice is made before a model is loaded and never changes while it runs, so a token has the same bits in every
batch. Sizes change no bit of a result. The kind of products of bfloat16 and the choice of oneDNN do, so they are part
of the identity of KV and of what a stream can be continued with.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..srt import env
from ..srt.machine.cores import usable_cores
from ..srt.plain_values import as_utf8
from . import cpu_extension
from .device.dtypes import dtype_name
from .layers.linear import can_pack
from .layers.onednn_layers import OneDnnLinear
from .layers.quantized_weight import GROUP

logger = logging.getLogger(__name__)

MIN_GAIN = 0.05
"""The default stays unless another candidate takes this share less time: less is noise."""
_ROUNDS = 7
_MIN_ROUNDS = 2
_BUDGET_S = 0.4
"""Processor time after which no further round starts."""
_BLOCK_KIB = (96, 256, 640)
_CHUNKS = (256, 1024)
_MAX_SIZE = 1 << 20
"""Largest size in a file: 1 GiB for a block, which no cache holds."""
_NUM_OUT, _NUM_IN = 384, 1536
_FEW_AND_MANY = (16, 256)
"""Rows for choices that change bits: such a choice is for all, because a row must have the same bits in every batch.
With fewer rows, the fixed costs of a call of oneDNN would decide against it even if its products took no time."""
_UNCACHED_BYTES = 64 << 20
"""Size of a weight that few caches hold."""
_PREFETCHED_IN, _PREFETCHED_ROWS = 576, (4, 16)
"""Inputs of a small model: its panels may fit into L1. With so few rows, reading a weight takes about as long as
multiplying it."""
_MULTIPLIED = (torch.float32, torch.bfloat16)
_COMPACT = ("always", "large", "never")
_ONEDNN = ("none", "float32", "bfloat16", "float32+bfloat16")
_CPU_FACTS = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags"),
    *("CPU implementer", "CPU part", "CPU variant", "CPU revision", "Features"),  # arm64
)


class CpuTuning(NamedTuple):
    """What csrc/cpu/tuning.h describes."""

    block_kib: int
    """KiB of activations that stay in the L2 cache"""
    chunk: int
    """numbers of a row that are multiplied before the next"""
    bfloat16: str
    """products of bfloat16 in linear layers: native, or widened to float32"""
    prefetch: str = "l2"
    """the cache that panels are prefetched into: l1 or l2"""
    onednn: str = "none"
    """types of which oneDNN's linear layers are faster: one of `_ONEDNN`"""
    compact: str = "large"
    """of which models weights of bfloat16 are compact, where they can be: one of `_COMPACT`. It is not measured: that
    would need weights that no cache holds"""

    def prefers_onednn(self, dtype: torch.dtype) -> bool:
        """Whether oneDNN's linear layers are faster for activations and weights of this type."""
        return dtype_name(dtype) in self.onednn.split("+")

    def apply(self) -> None:
        """Use it in this process from the next operation on. Raises ValueError if this build cannot."""
        for dtype in _MULTIPLIED:
            if self.prefers_onednn(dtype) and not _onednn_multiplies(dtype):
                raise ValueError(f"oneDNN has no linear layers of {dtype_name(dtype)} here")
        try:
            torch.ops.tercet_cpu.set_tuning(
                self.block_kib << 10, self.chunk, self.bfloat16 == "widened", self.prefetch == "l1"
            )
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None


Call = Callable[[CpuTuning], object]
"""What is timed: a layer that computes as the tuning says."""


class ChosenTuning(NamedTuple):
    tuning: CpuTuning
    source: str
    """default, measured, or the file that has it"""


def default_tuning() -> CpuTuning:
    return CpuTuning(256, 1024, "native" if torch.ops.tercet_cpu.multiplies_bfloat16() else "widened")


def resolve_tuning(setting: str, weight_cache: str) -> ChosenTuning:
    """The tuning for the setting --cpu-kernels: auto, fixed, or a file. The compiled operations must be loaded.

    `weight_cache`: the setting of this name; its folder keeps what was measured. Raises ValueError for a file that
    cannot be read or used.
    """
    if setting == "fixed":
        return ChosenTuning(default_tuning(), "default")
    if setting != "auto":
        try:
            tuning = _parse(Path(setting).read_bytes())
            tuning.apply()
        except OSError as error:
            raise ValueError(f"--cpu-kernels {setting} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"--cpu-kernels {setting}: {error}") from None
        return ChosenTuning(tuning, setting)
    folder = None if weight_cache == "off" else env.cache_folder() if weight_cache == "auto" else Path(weight_cache)
    return _calibrated(folder)


@functools.cache
def _calibrated(folder: Path | None) -> ChosenTuning:
    return kept_or_measured(folder, machine_key(), measure)


def kept_or_measured(folder: Path | None, key: Mapping[str, Any], measure: Callable[[], CpuTuning]) -> ChosenTuning:
    """What a file in `folder` keeps for `key`, or else the result of `measure()`, which is then kept.

    A damaged file, or one of another key, is written again. None: nothing is kept.

    What is not kept changes no bit. Otherwise an engine that is started again could continue a stream with other bits.
    """
    if folder is None:
        return ChosenTuning(_with_default_bits(measure()), "measured")
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"tercet-cpu-kernels-{digest}.json"
    kept = _kept(path, key)
    if kept is not None:
        return kept
    tuning = measure()
    try:
        if _keep(path, {"key": key, "chosen": tuning._asdict()}):
            return ChosenTuning(tuning, "measured")
        kept = _kept(path, key)  # another server was quicker, and both must go on with the same bits
    except OSError as error:
        logger.warning("Each start measures again, because %s cannot be written: %s", path, error.strerror or error)
    return kept or ChosenTuning(_with_default_bits(tuning), "measured")


def _kept(path: Path, key: Mapping[str, Any]) -> ChosenTuning | None:
    """What the file keeps for `key`, applied. A file that keeps something else is removed."""
    try:
        content = path.read_bytes()
        tuning = _parse(content)
        if json.loads(content).get("key") == key:
            tuning.apply()
            return ChosenTuning(tuning, as_utf8(str(path)))  # messages are UTF-8
        logger.warning("Measuring again: %s is for another machine or build", path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Measuring again, because of %s: %s", path, error)
    with suppress(OSError):
        path.unlink()
    return None


def _with_default_bits(tuning: CpuTuning) -> CpuTuning:
    default = default_tuning()
    return tuning._replace(bfloat16=default.bfloat16, onednn=default.onednn)


def machine_key() -> dict[str, Any]:
    """What a measurement depends on: the processor, its cores, the compiled operations and torch."""
    variant = cpu_extension.load()
    assert variant is not None
    stamp = cpu_extension.stamp(variant)
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "build": variant.name,
        "sources": None if stamp is None else stamp.sources,
        "torch": torch.__version__,
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A description of the processor's model and instructions."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return "; ".join(f"{name} {facts[name]}" for name in _CPU_FACTS if name in facts)


def measure(clock: Callable[[], float] = time.thread_time) -> CpuTuning:
    """Measure the linear layers of this build with one thread, on random data. Leaves the choice applied.

    `clock`: processor time of this thread, so that other processes count little.
    """
    threads = torch.ops.tercet_cpu.num_threads()
    torch.ops.tercet_cpu.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _measured(clock)
    finally:
        torch.ops.tercet_cpu.set_num_threads(threads)


def _measured(clock: Callable[[], float]) -> CpuTuning:
    tuning = default_tuning()
    native = tuning.bfloat16 == "native"
    # Sizes: many rows, longer than a chunk.
    sizes = [tuning._replace(block_kib=block, chunk=chunk) for block in _BLOCK_KIB for chunk in _CHUNKS]
    calls = [*_linears(torch.float32, (128,)), _quantized_linear(128)]
    if native:
        calls += _linears(torch.bfloat16, (128,))
    tuning = fastest(tuning, sizes, calls, _BUDGET_S, clock)
    uncached = _uncached_linears(torch.bfloat16 if native else torch.float32)
    tuning = fastest(tuning, [tuning._replace(prefetch="l1")], uncached, _BUDGET_S, clock)
    if native:
        kinds = [tuning._replace(bfloat16="widened")]
        tuning = fastest(tuning, kinds, _linears(torch.bfloat16, _FEW_AND_MANY), _BUDGET_S, clock)
    for dtype in (torch.float32, torch.bfloat16) if native else (torch.float32,):
        if _onednn_multiplies(dtype):
            with_onednn = tuning._replace(onednn=_with(tuning.onednn, dtype))
            tuning = fastest(tuning, [with_onednn], _linears(dtype, _FEW_AND_MANY), _BUDGET_S, clock)
    tuning.apply()
    return tuning


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    return can_pack(torch.empty((1, 1), dtype=dtype))


def _with(onednn: str, dtype: torch.dtype) -> str:
    name = dtype_name(dtype)
    return name if onednn == "none" else f"{onednn}+{name}"


def fastest(
    default: CpuTuning,
    others: Iterable[CpuTuning],
    calls: Sequence[Call],
    budget_s: float,
    clock: Callable[[], float],
) -> CpuTuning:
    """The candidate whose `calls` take the least time, or the default unless that is clearly slower, twice.

    Where other processes use the caches, the best of several equal candidates often seems clearly faster once.
    """
    chosen = _fastest_once(default, others, calls, budget_s, clock)
    return chosen if chosen == default else _fastest_once(default, [chosen], calls, budget_s, clock)


def _fastest_once(
    default: CpuTuning,
    others: Iterable[CpuTuning],
    calls: Sequence[Call],
    budget_s: float,
    clock: Callable[[], float],
) -> CpuTuning:
    """The candidates take turns, and the least time of each call counts, as its share of the default's time."""
    candidates = [default, *(other for other in others if other != default)]
    times = {(candidate, index): float("inf") for candidate in candidates for index in range(len(calls))}
    start = clock()
    for turn in range(_ROUNDS):
        if turn >= _MIN_ROUNDS and clock() - start > budget_s:
            break
        for candidate in candidates:
            candidate.apply()
            for index, call in enumerate(calls):
                before = clock()
                call(candidate)
                times[candidate, index] = min(times[candidate, index], clock() - before)
    cost = {
        candidate: sum(times[candidate, index] / max(times[default, index], 1e-9) for index in range(len(calls)))
        for candidate in candidates
    }
    best = min(candidates, key=cost.__getitem__)
    chosen = best if cost[best] < (1 - MIN_GAIN) * cost[default] else default
    shares = ", ".join(f"{'/'.join(map(str, one))} {cost[one] / len(calls):.2f}" for one in candidates)
    logger.debug("CPU kernels, time relative to the default: %s", shares)
    return chosen


def _linears(dtype: torch.dtype, rows: Sequence[int]) -> list[Call]:
    """Calls of a linear layer of 1,536 inputs and 384 outputs, one for each number of rows."""
    width, per_word = 2 * cpu_extension.lanes(), 4 // dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_OUT // width, _NUM_IN // per_word, width, per_word)  # that of `packing.panels_of`
    packed = torch.randn(shape, generator=generator).to(dtype)
    inputs = [torch.randn(count, _NUM_IN, generator=generator).to(dtype) for count in rows]
    onednn = functools.cache(lambda: OneDnnLinear(packed.view(_NUM_OUT, _NUM_IN)))

    def call(x: torch.Tensor, tuning: CpuTuning) -> object:
        if tuning.prefers_onednn(dtype):
            return onednn()(x)
        return torch.ops.tercet_cpu.linear(x, packed, None, _NUM_OUT)

    return [functools.partial(call, x) for x in inputs]


def _uncached_linears(dtype: torch.dtype) -> list[Call]:
    """Calls of a linear layer with few rows. Its weights are read from memory; those of bfloat16 are compact."""
    width, per_word, num_in = 2 * cpu_extension.lanes(), 4 // dtype.itemsize, _PREFETCHED_IN
    panel = torch.ones(1, num_in // per_word, width, per_word, dtype=dtype)
    if dtype == torch.bfloat16:
        panel = torch.ops.tercet_cpu.compact(panel)
    num_panels = _UNCACHED_BYTES // panel.nbytes
    packed = panel.expand(num_panels, *panel.shape[1:]).contiguous()
    inputs = [torch.ones(count, num_in, dtype=dtype) for count in _PREFETCHED_ROWS]

    def call(x: torch.Tensor, _: CpuTuning) -> object:
        return torch.ops.tercet_cpu.linear(x, packed, None, num_panels * width)

    return [functools.partial(call, x) for x in inputs]


def _quantized_linear(rows: int) -> Call:
    """The same with weights of 8 bits that are widened to float32."""
    width = 2 * cpu_extension.lanes()
    bytes_of_group = width * (2 + GROUP)  # a float16 scale and the values of each column
    packed = torch.zeros(_NUM_OUT // width, _NUM_IN // GROUP, bytes_of_group, dtype=torch.uint8)
    x = torch.randn(rows, _NUM_IN, generator=torch.Generator().manual_seed(0))
    return lambda _: torch.ops.tercet_cpu.linear(x, packed, None, _NUM_OUT)


def _parse(content: bytes) -> CpuTuning:
    """Raises ValueError."""
    try:
        chosen = json.loads(content)["chosen"]
        tuning = CpuTuning(**chosen)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f'the file must be JSON with "chosen": {{{", ".join(CpuTuning._fields)}}}') from None
    if not all(type(value) is int and 0 < value <= _MAX_SIZE for value in tuning[:2]):
        raise ValueError(f"block_kib and chunk must be whole numbers from 1 to {_MAX_SIZE}, got {tuning[:2]}")
    if tuning.prefetch not in ("l1", "l2"):
        raise ValueError(f"prefetch must be l1 or l2, got {tuning.prefetch!r}")
    if tuning.bfloat16 not in ("native", "widened"):
        raise ValueError(f"bfloat16 must be native or widened, got {tuning.bfloat16!r}")
    if tuning.onednn not in _ONEDNN:
        raise ValueError(f"onednn must be {', '.join(_ONEDNN[:-1])} or {_ONEDNN[-1]}, got {tuning.onednn!r}")
    if tuning.compact not in _COMPACT:
        raise ValueError(f"compact must be {', '.join(_COMPACT[:-1])} or {_COMPACT[-1]}, got {tuning.compact!r}")
    return tuning


def _keep(path: Path, content: Mapping[str, Any]) -> bool:
    """Returns False if there is such a file by now. The file appears only when it is complete. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(".tmp", "tercet-", path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # or a server that makes room would remove it (cache_folder.py)
            json.dump(content, file, indent=1)
            file.flush()
            os.link(unfinished, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(unfinished)
    return True
