"""Measure the device's ceilings: the bandwidth of a large copy, and the speed of large matrix products.

    python -m tercet.benchmarks.ceilings [--device cuda] [--results DIR]

Every benchmark measures the ceilings in its own run and compares its results with them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from ..model_executor.runner.settings import resolve_device
from .limits import Ceilings
from .results import Result, add_results_arguments, finish, number
from .timing import median_s


def measure_ceilings(device: torch.device, dtype: torch.dtype = torch.bfloat16, *, small: bool = False) -> Ceilings:
    """Measures both ceilings, which takes one second on a GPU and a few seconds on a CPU.

    `small`: sizes too small for valid numbers, for tests.
    """
    on_gpu = device.type == "cuda"
    copy_bytes = 1 << 22 if small else 1 << 32 if on_gpu else 1 << 28
    size = 128 if small else 8192 if on_gpu else 2048
    bytes_per_s = _copy_bytes_per_s(device, copy_bytes)
    flops_per_s = matmul_flops_per_s(device, dtype, size)
    if on_gpu:
        torch.cuda.empty_cache()  # another process may need the memory
    return Ceilings(bytes_per_s, flops_per_s)


def _copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Bandwidth of a copy. Bytes read and bytes written both count."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    seconds = median_s([lambda: target.copy_(source)], device)
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
    parser = argparse.ArgumentParser(prog="python -m tercet.benchmarks.ceilings", description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument(
        "--small", action="store_true", help="use tiny sizes, to try the program; the results have no meaning"
    )
    add_results_arguments(parser)
    args = parser.parse_args(argv)
    device = resolve_device(args.device)
    result = Result("ceilings", "Ceilings", parser.prog, argv, device)
    result.ceilings = measure_ceilings(device, small=args.small)
    table = result.table("Ceilings", ["dtype", "copy TB/s (read + write)", "matmul TFLOP/s"])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        measured = result.ceilings
        if dtype is not torch.bfloat16:
            measured = measure_ceilings(device, dtype, small=args.small)
        name = str(dtype).removeprefix("torch.")
        table.row(name, number(measured.bytes_per_s / 1e12), number(measured.flops_per_s / 1e12))
        result.values[name] = {"bytes_per_s": measured.bytes_per_s, "flops_per_s": measured.flops_per_s}
    finish(result, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
