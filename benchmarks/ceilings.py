"""Measure the device's ceilings: the bandwidth of a large copy, and the highest rate of multiplication.

    python -m tercet.benchmarks.ceilings [--device cuda] [--results DIR]

Every benchmark measures the ceilings in its own run and compares its results with them. On a GPU the highest rate is
that of a large matrix product. On a CPU it is the best of that product and of each instruction that multiplies.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..model_executor import cpu_extension
from ..model_executor.device.dtypes import dtype_name
from ..model_executor.runner.settings import resolve_device
from .limits import Ceilings
from .results import Result, add_results_arguments, finish, number
from .timing import median_s

_INSTRUCTION_S = 0.05
"""Time to measure one instruction of a CPU."""
_TRIAL_SIZE = 256
"""Size of the matrices of a first, short measurement of torch's product."""
_TRIAL_SHARE = 0.25
"""Share of the best instruction's rate that the short measurement must reach. Small products are slower than large."""
TORCH_PRODUCT = "torch's matrix product"
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs do not have it
"""In place of the type of weights of 4 bits, which torch does not multiply."""


class Rate(NamedTuple):
    """The highest measured rate of multiplication. The higher of two rates is the larger tuple."""

    ops_per_s: float
    source: str
    """What has this rate: an instruction, or TORCH_PRODUCT."""


def measure_ceilings(device: torch.device, dtype: torch.dtype = torch.bfloat16, *, small: bool) -> Ceilings:
    """Measures both ceilings, which takes one second on a GPU and a few seconds on a CPU.

    `small`: sizes too small for valid numbers, for tests.
    """
    on_gpu = device.type == "cuda"
    copy_bytes = 1 << 22 if small else 1 << 32 if on_gpu else 1 << 28
    size = 128 if small else 8192 if on_gpu else 2048
    bytes_per_s = _copy_bytes_per_s(device, copy_bytes)
    rate = best_rate(device, dtype, size)
    if on_gpu:
        torch.cuda.empty_cache()  # another process may need the memory
    return Ceilings(bytes_per_s, rate.ops_per_s, rate.source)


def best_rate(device: torch.device, dtype: torch.dtype, size: int) -> Rate:
    """The highest rate at which the device multiplies numbers of this type. `size`: as in `matmul_flops_per_s`.

    On a CPU, torch's product does not always use the fastest instruction. INT4 needs a CPU with C++ kernels.
    """
    rates: list[Rate] = []
    if device.type == "cpu" and cpu_extension.load() is not None:
        measured = torch.ops.tercet_cpu.instruction_rates(dtype, _INSTRUCTION_S)
        rates = [Rate(ops_per_s, name) for name, ops_per_s in measured.items()]
    if dtype == INT4:
        return max(rates)
    # Torch's product of a type that the processor does not multiply can take minutes.
    if not rates or matmul_flops_per_s(device, dtype, min(size, _TRIAL_SIZE)) > _TRIAL_SHARE * max(rates).ops_per_s:
        rates.append(Rate(matmul_flops_per_s(device, dtype, size), TORCH_PRODUCT))
    return max(rates)


def _copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Bandwidth of a copy. Bytes read and bytes written both count.

    On a GPU it is that of a kernel: in a recorded graph, a copy of torch takes another path, which is a third slower on
    an H200.
    """
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    negate, copy = partial(torch.neg, source, out=target), partial(target.copy_, source)
    seconds = median_s([negate if device.type == "cuda" else copy], device)
    return 2 * num_bytes / seconds


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a product of two square matrices, of a floating-point type, of int8 or of e4m3."""
    # The data is random: with zeros, a GPU draws less power and keeps a higher clock.
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if dtype == torch.int8:
        a, b = (x.mul(40).clamp(-127, 127) for x in (a, b))
    a, b = a.to(dtype), b.to(dtype)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        columns = b.t().contiguous().t()  # cuBLAS multiplies fp8 in this order only
        seconds = median_s([lambda: torch._scaled_mm(a, columns, one, one, out_dtype=torch.bfloat16)], device)
        return 2 * size**3 / seconds
    multiply, sums = (torch._int_mm, torch.int32) if dtype == torch.int8 else (torch.mm, dtype)
    out = torch.empty(size, size, device=device, dtype=sums)
    seconds = median_s([lambda: multiply(a, b, out=out)], device)
    return 2 * size**3 / seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the ceilings and prints them. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tercet.benchmarks.ceilings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to measure (default: auto)"
    )
    parser.add_argument(
        "--small", action="store_true", help="use tiny sizes, to try the program; the results have no meaning"
    )
    add_results_arguments(parser)
    args = parser.parse_args(argv)
    try:
        device = resolve_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    result = Result("ceilings", "Ceilings", parser.prog, argv, device)
    result.ceilings = measure_ceilings(device, small=args.small)
    table = result.table("Ceilings", ["dtype", "copy TB/s (read + write)", "TFLOP/s", "measured with"])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        measured = result.ceilings
        if dtype is not torch.bfloat16:
            measured = measure_ceilings(device, dtype, small=args.small)
        name = dtype_name(dtype)
        source = measured.flops_source
        table.row(name, number(measured.bytes_per_s / 1e12), number(measured.flops_per_s / 1e12), source)
        result.values[name] = dataclasses.asdict(measured)
    finish(result, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
