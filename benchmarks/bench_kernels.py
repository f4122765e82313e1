"""Measure every kernel with shapes that occur in serving, against the device's ceilings and against torch.

    tercet bench kernels [--only decode,extend] [--model-path llama-3.1-8b ...] [--quick]

Before a kernel is timed, it is compared with its reference implementation in float64 on random data. A kernel that
fails this check is not timed. Times are medians of graph replays; the L2 cache is overwritten before each replay.
Without a GPU, kernels run in Triton's interpreter (TRITON_INTERPRET=1). Then the checks are valid, the times are not.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ..model_executor.runner.settings import resolve_device
from ..srt.env import triton_interpreted
from ..srt.model_files.model_name import model_name
from .argument_types import benchmark_parser, names
from .attention_cases import Heads, decode_cases, extend_cases
from .ceilings import measure_ceilings
from .kernel_case import Case, CaseMaker
from .limits import Ceilings
from .presets import PRESETS, load_shape
from .results import Result, Table, add_results_arguments, finish, number, percent
from .small_kernel_cases import Sizes, linear_cases, small_cases
from .timing import Call, median_s, synchronize

_GROUPS = ("decode", "extend", "small", "linear")
_DECODE = [(1, 1024), (1, 8192), (8, 4096), (32, 1024), (32, 8192), (64, 4096), (128, 2048), (256, 1024)]
_DECODE_QUICK = [(1, 8192), (32, 8192), (256, 1024)]
_EXTEND = [(1, 0, 4096), (1, 0, 8192), (1, 0, 16384), (8, 0, 1024), (1, 14336, 2048), (8, 4096, 128)]
_EXTEND_QUICK = [(1, 0, 4096), (1, 14336, 2048)]
_TOKENS, _TOKENS_QUICK = [1, 32, 256, 4096], [32, 4096]
_DECODE_TINY, _EXTEND_TINY, _TOKENS_TINY = [(2, 40)], [(1, 0, 24), (2, 16, 3)], [3]
_HOST_CALLS = 20

_HEADER = [
    "shape",
    "us",
    "limit us",
    "of the limit",
    "TB/s",
    "TFLOP/s",
    "best of torch us",
    "x torch",
    "host us",
    "error",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: 1 when a kernel is wrong or fails."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        only = names("--only", args.only, _GROUPS)
        device = resolve_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    if device.type == "cpu" and not triton_interpreted():
        parser.error("kernels need a GPU; to run without one, set TRITON_INTERPRET=1 and use --tiny")
    torch.manual_seed(args.seed)
    result = Result("kernels", "Kernels", parser.prog, argv, device)
    result.ceilings = measure_ceilings(device, small=args.tiny)
    bench = KernelBench(result, result.ceilings, device, check_only=args.check_only)
    try:
        makers = list(_makers(args, device, only))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for maker in makers:
        bench.run(maker)
    bench.close()
    finish(result, args)
    return 1 if bench.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("kernels", __doc__)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the kernels (default: auto)"
    )
    parser.add_argument(
        "--only", default=",".join(_GROUPS), help=f"groups of kernels to measure: {', '.join(_GROUPS)} (default: all)"
    )
    parser.add_argument(
        "--model-path",
        nargs="+",
        default=["llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b"],
        help=f"models whose shapes are measured: paths or presets ({', '.join(PRESETS)})",
    )
    parser.add_argument("--quick", action="store_true", help="measure few shapes, of the first model only")
    parser.add_argument(
        "--tiny", action="store_true", help="use tiny sizes, for the interpreter; the timings have no meaning"
    )
    parser.add_argument("--check-only", action="store_true", help="check results without timing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random data (default: 0)")
    add_results_arguments(parser)
    return parser


def _makers(args: argparse.Namespace, device: torch.device, only: Sequence[str]) -> Iterator[CaseMaker]:
    decode, extend, tokens = _DECODE, _EXTEND, _TOKENS
    if args.quick:
        decode, extend, tokens = _DECODE_QUICK, _EXTEND_QUICK, _TOKENS_QUICK
    if args.tiny:
        decode, extend, tokens = _DECODE_TINY, _EXTEND_TINY, _TOKENS_TINY
    for model in args.model_path[:1] if args.quick else args.model_path:
        config = load_shape(model)
        name = model_name(model)
        heads = Heads(name, config.num_heads, config.num_kv_heads, config.head_dim, torch.bfloat16, device)
        sizes = Sizes(name, config, torch.bfloat16, device)
        if "decode" in only:
            yield from decode_cases(heads, decode)
            yield from decode_cases(replace(heads, fp8=True), decode[-2:])
        if "extend" in only:
            yield from extend_cases(heads, extend)
        if "small" in only:
            yield from small_cases(sizes, tokens)
        if "linear" in only:
            yield from linear_cases(sizes, tokens)


class KernelBench:
    """Checks and times kernels, and writes one table for each. Only one case is in memory at a time."""

    def __init__(self, result: Result, ceilings: Ceilings, device: torch.device, *, check_only: bool) -> None:
        self.failed: list[str] = []
        self._result = result
        self._ceilings = ceilings
        self._device = device
        self._check_only = check_only
        self._tables: dict[str, Table] = {}
        self._errors: dict[object, float] = {}
        result.values.update(cases=[], failed=self.failed)

    def run(self, maker: CaseMaker) -> None:
        what = f"{maker.kernel}, {maker.shape}"
        try:
            error = None if maker.check is None else self._check(maker.kernel, maker.shape, maker.check)
            if error is not None and not error <= maker.tolerance:
                self.failed.append(f"{what}: wrong, relative error {error:.2g} (at most {maker.tolerance:g} is right)")
                return
            if self._check_only:
                if error is not None:
                    self._add(maker, error)
            else:
                self._measure(maker, maker.make(), error)
        except Exception as broken:  # an error of a compiler or driver must not stop the other kernels
            self.failed.append(f"{what}: {type(broken).__name__}: {str(broken)[:300]}")
        finally:
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def close(self) -> None:
        if self.failed:
            table = self._result.table("Failed", ["measurement and reason"])
            for line in self.failed:
                table.row(line.replace("\n", " ").replace("|", "/"))

    def _check(self, kernel: str, shape: str, check: Callable[[], float]) -> float:
        """The relative error of a kernel. Checked once for each kernel and model, because all cases share the check."""
        key = (kernel, shape.rpartition(",")[0])
        if key not in self._errors:
            self._errors[key] = check()
        return self._errors[key]

    def _measure(self, maker: CaseMaker, case: Case, error: float | None) -> None:
        baselines: dict[str, float] = {}
        for name, calls in case.baselines.items():
            try:
                baselines[name] = median_s(calls, self._device)
            except RuntimeError:
                # A torch backend may not support this shape. Then the table lacks this comparison.
                synchronize(self._device)
        seconds = median_s(case.calls, self._device) if case.calls else min(baselines.values())
        host_s = self._host_s(case.calls[0]) if case.calls else None
        self._add(maker, error, case, seconds, host_s, baselines)

    def _host_s(self, call: Call) -> float:
        """Seconds of host time for one call. On a GPU, a call returns when its work is queued."""
        count = _HOST_CALLS if self._device.type == "cuda" else 1
        synchronize(self._device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = (time.perf_counter() - start) / count
        synchronize(self._device)
        return seconds

    def _add(
        self,
        maker: CaseMaker,
        error: float | None,
        case: Case | None = None,
        seconds: float | None = None,
        host_s: float | None = None,
        baselines: dict[str, float] | None = None,
    ) -> None:
        if maker.kernel not in self._tables:
            header = ["shape", "error"] if self._check_only else _HEADER
            self._tables[maker.kernel] = self._result.table(maker.kernel.capitalize(), header)
        shown_error = "-" if error is None else f"{error:.1e}"
        row = {"kernel": maker.kernel, "shape": maker.shape, "relative_error": error}
        if case is None or seconds is None:
            self._tables[maker.kernel].row(maker.shape, shown_error)
            self._result.values["cases"].append(row)
            return
        limit = max(case.num_bytes / self._ceilings.bytes_per_s, case.flops / self._ceilings.flops_per_s)
        best = min(baselines, key=lambda name: baselines[name]) if baselines else None
        fastest = None if baselines is None or best is None else baselines[best]
        self._tables[maker.kernel].row(
            maker.shape,
            number(seconds * 1e6),
            number(limit * 1e6),
            percent(limit / seconds),
            number(case.num_bytes / seconds / 1e12),
            number(case.flops / seconds / 1e12) if case.flops else "-",
            "-" if fastest is None else f"{number(fastest * 1e6)} ({best})",
            "-" if fastest is None or not case.calls else number(fastest / seconds),
            "-" if host_s is None else number(host_s * 1e6),
            shown_error,
        )
        row.update(seconds=seconds, limit_s=limit, num_bytes=case.num_bytes, flops=case.flops)
        self._result.values["cases"].append({**row, "host_s": host_s, "torch_s": baselines})


if __name__ == "__main__":
    sys.exit(main())
