"""Measures the ceilings of a device: copy bandwidth, and the rate of matrix products on random data.

    python -m tercet.benchmarks.ceilings [--device cuda] [--results DIR]

Every benchmark measures them in its own run and reports its share of them.
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
    """Both ceilings; a second on a GPU, a few on a CPU. `small`: sizes that prove nothing, for tests."""
    on_gpu = device.type == "cuda"
    copy_bytes = 1 << 22 if small else 1 << 32 if on_gpu else 1 << 28
    size = 128 if small else 8192 if on_gpu else 2048
    bytes_per_s = _copy_bytes_per_s(device, copy_bytes)
    flops_per_s = matmul_flops_per_s(device, dtype, size)
    if on_gpu:
        torch.cuda.empty_cache()  # another process may want it
    return Ceilings(bytes_per_s, flops_per_s)


def _copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Bytes read and bytes written, both counted."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    seconds = median_s([lambda: target.copy_(source)], device)
    return 2 * num_bytes / seconds


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """A product of two square matrices of a floating dtype, or of int8 (operations on integers then)."""
    # Zeros run faster: less switches in the multipliers, and the clock stays up.
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if dtype == torch.int8:
        a, b = (x.mul(40).clamp(-127, 127) for x in (a, b))
    a, b = a.to(dtype), b.to(dtype)
    multiply, sums = (torch._int_mm, torch.int32) if dtype == torch.int8 else (torch.mm, dtype)
    out = torch.empty(size, size, device=device, dtype=sums)
    seconds = median_s([lambda: multiply(a, b, out=out)], device)
    return 2 * size**3 / seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
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
