"""Measure single steps: prefill latency, decode steps against the memory bandwidth, and the device's idle time.

    tercet bench one-batch --model-path llama-3.2-1b --batch-size 1,32 --context-len 1024,8192

Decode steps are measured twice: directly on the runner ("runner"), and through the scheduler, as in the engine
("scheduler"). Both keep one step in flight. Weights, prompts and cached keys and values are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ..model_executor.device.dtypes import dtype_name
from ..model_executor.runner.settings import resolve_settings
from ..srt.model_files.load_config import load_model_config
from ..srt.model_files.model_name import model_name
from ..srt.server_args import ServerArgs
from .argument_types import benchmark_parser, check_file, numbers, positive
from .ceilings import measure_ceilings
from .engine_args import add_engine_arguments, engine_args
from .limits import ModelCost, decode_step_s, prefill_s
from .local_engine import DirectBatch, TimedEngine
from .results import Result, add_results_arguments, finish, number, percent
from .timing import use_server_threads
from .trace import HOST_GAP_US, device_activity, read_events

_WARMUP_STEPS = 4
_TOP_KERNELS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: 1 when a requested measurement failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.prefill_len and not (args.batch_size and args.context_len):
        parser.error(
            "nothing to measure: --prefill-len must name a number, or --batch-size and --context-len both must"
        )
    server_args = engine_args(parser, args)
    name = model_name(server_args.model_path)
    try:
        config = load_model_config(server_args.model_path, server_args.load_format)
        resolved = resolve_settings(server_args, config)
        device, dtype = resolved.device, resolved.dtype
        _check_trace(args, device)
        use_server_threads()
        result = Result(f"one-batch-{name}", f"One batch: {name}", parser.prog, argv, device)
        # Ceilings come first, while memory is free: the KV pool later takes all free memory.
        result.ceilings = measure_ceilings(device, resolved.multiplied_dtype, small=args.small_ceilings)
        bench = _Bench(args, result, ModelCost.of_runner(config, resolved))
        result.values.update(model=name, dtype=dtype_name(dtype))
        for graphs in _graph_settings(args, server_args):
            settings = dataclasses.replace(server_args, disable_cuda_graph=graphs == "off")
            with bench.record_failure(f"all with graphs {graphs}"):
                engine = TimedEngine(settings)
                bench.run(engine, graphs if device.type == "cuda" or engine.runner.model.compiled else "none")
                del engine
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    bench.close()
    finish(result, args)
    return 1 if result.values["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("one-batch", __doc__)
    parser.add_argument(
        "--batch-size", type=numbers, default=[1, 32], help="batch sizes of decode steps (default: 1,32)"
    )
    parser.add_argument(
        "--context-len", type=numbers, default=[1024], help="tokens that each request attends to (default: 1024)"
    )
    parser.add_argument(
        "--prefill-len", type=numbers, default=[4096], help="prompt tokens of a prefill (default: 4096)"
    )
    parser.add_argument("--num-steps", type=positive, default=64, help="decode steps in a round (default: 64)")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="number of rounds; the median is reported (default: 3)"
    )
    parser.add_argument(
        "--idle-steps",
        type=positive,
        default=100,
        help="decode steps traced to measure idle time of a GPU (default: 100)",
    )
    parser.add_argument(
        "--compare-cuda-graph", action="store_true", help="decode without recorded steps too, and compare the tokens"
    )
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write the trace to this file (.json or .json.gz)")
    parser.add_argument(
        "--small-ceilings", action="store_true", help="measure ceilings with tiny sizes, to try the program"
    )
    add_results_arguments(parser)
    add_engine_arguments(parser)
    return parser


def _check_trace(args: argparse.Namespace, device: torch.device) -> None:
    """Raises ValueError for a trace that would not be written, or not be kept."""
    if args.trace is None:
        return
    if device.type == "cpu":
        raise ValueError("--trace needs a GPU: the trace has its operations only")
    if args.compare_cuda_graph:
        raise ValueError("--trace and --compare-cuda-graph exclude each other: both runs would write the same file")
    check_file("--trace", args.trace)


def _graph_settings(args: argparse.Namespace, server_args: ServerArgs) -> list[str]:
    if server_args.disable_cuda_graph:
        return ["off"]
    return ["on", "off"] if args.compare_cuda_graph else ["on"]


class _Bench:
    """Runs the measurements and fills the result's tables."""

    def __init__(self, args: argparse.Namespace, result: Result, cost: ModelCost) -> None:
        assert result.ceilings is not None
        self._args = args
        self._result = result
        self._ceilings = result.ceilings
        self._cost = cost
        self._failed: list[str] = []
        self._tokens: dict[tuple[int, int], bytes] = {}
        """Output tokens of each decode batch (size, context) with the first graph setting, to compare the next with."""
        result.values.update(prefill=[], decode=[], idle=[], failed=self._failed)
        self._prefill_table = result.table(
            "Prefill of one prompt", ["tokens", "ms", "tok/s", "limit tok/s", "of the limit"]
        )
        header = ["batch", "context", "graphs", "driven by", "ms a step", "tok/s", "limit tok/s", "of the limit"]
        self._decode_table = result.table("Decode steps", header)

    def run(self, engine: TimedEngine, graphs: str) -> None:
        """Runs all measurements with one graph setting: "on", "off", or "none" for layers in plain torch."""
        runner = engine.runner
        self._result.values.update(
            attention_backend=runner.settings.attention_backend, page_size=runner.settings.page_size
        )
        if not self._result.values["prefill"]:  # prefills use no graph, so they are measured once
            for length in self._args.prefill_len:
                with self.record_failure(f"prefill of {length} tokens"):
                    self._prefill(engine, length)
        for batch_size in self._args.batch_size:
            for context_len in self._args.context_len:
                what = f"decode of {batch_size} x {context_len}, graphs {graphs}"
                with self.record_failure(f"{what}, by the runner"):
                    self._on_runner(engine, graphs, batch_size, context_len)
                with self.record_failure(f"{what}, by the scheduler"):
                    self._on_scheduler(engine, graphs, batch_size, context_len)
        if self._args.batch_size and self._args.context_len and engine.device.type != "cpu":
            with self.record_failure(f"device idle time, graphs {graphs}"):
                self._idle(engine, graphs)

    def close(self) -> None:
        if self._failed:
            table = self._result.table("Not measured", ["measurement and reason"])
            for line in self._failed:
                table.row(line)
        self._result.tables = [table for table in self._result.tables if table.rows]

    def _prefill(self, engine: TimedEngine, length: int) -> None:
        with DirectBatch.of(engine, 1, length, 0) as batch:
            batch.prefill()
            seconds = statistics.median(batch.prefill() for _ in range(self._args.rounds))
        limit_s = prefill_s(self._cost, [length], self._ceilings)
        speed, limit = number(length / seconds), number(length / limit_s)
        self._prefill_table.row(str(length), number(seconds * 1e3), speed, limit, percent(limit_s / seconds))
        self._result.values["prefill"].append({"tokens": length, "seconds": seconds, "limit_s": limit_s})

    def _on_runner(self, engine: TimedEngine, graphs: str, batch_size: int, context_len: int) -> None:
        num_steps, rounds = self._args.num_steps, self._args.rounds
        with DirectBatch.of(engine, batch_size, context_len, _WARMUP_STEPS + num_steps * rounds) as batch:
            batch.decode(_WARMUP_STEPS)
            seconds = statistics.median(batch.decode(num_steps) for _ in range(rounds))
            tokens = np.concatenate(batch.tokens).tobytes()
        mean_len = context_len + _WARMUP_STEPS + num_steps * rounds // 2
        same = None
        if graphs != "none":
            same = self._tokens.setdefault((batch_size, context_len), tokens) == tokens
            if not same:
                self._failed.append(f"batch {batch_size}, context {context_len}: other tokens without graphs")
        self._add_decode(graphs, "runner", batch_size, context_len, mean_len, seconds, same_tokens=same)

    def _on_scheduler(self, engine: TimedEngine, graphs: str, batch_size: int, context_len: int) -> None:
        num_steps = self._args.num_steps * self._args.rounds
        time = engine.run_decode(batch_size, context_len, num_steps)
        self._add_decode(graphs, "scheduler", batch_size, context_len, round(time.context_len), time.step_s)

    def _add_decode(
        self, graphs: str, driver: str, batch_size: int, context_len: int, mean_len: int, seconds: float, **more: object
    ) -> None:
        """Adds a row to the table of decode steps. `mean_len`: mean context length during the timed steps."""
        limit_s = decode_step_s(self._cost, [mean_len] * batch_size, self._ceilings)
        self._decode_table.row(
            str(batch_size),
            str(context_len),
            graphs,
            driver,
            number(seconds * 1e3),
            number(batch_size / seconds),
            number(batch_size / limit_s),
            percent(limit_s / seconds),
        )
        row = {"batch_size": batch_size, "context_len": context_len, "cuda_graph": graphs, "driver": driver}
        self._result.values["decode"].append({**row, "step_s": seconds, "limit_s": limit_s, **more})

    def _idle(self, engine: TimedEngine, graphs: str) -> None:
        """Measures the device's idle time during decode steps of the scheduler.

        The trace records device events only, because that slows the host least.
        """
        num_steps, batch_size, context_len = self._args.idle_steps, self._args.batch_size[0], self._args.context_len[0]
        with tempfile.TemporaryDirectory() as folder:
            path = self._args.trace or Path(folder) / "trace.json"
            engine.run_decode(batch_size, context_len, 1)
            plain_s = engine.run_decode(batch_size, context_len, num_steps).step_s
            traced_s = engine.run_decode(batch_size, context_len, num_steps, _tracing(path)).step_s
            activity = device_activity(read_events(path))
        if activity is None:
            raise ValueError("the trace has no device operation")
        busy_s = activity.busy_s / num_steps
        what = f"over {num_steps} decode steps, batch {batch_size}, context {context_len}, graphs {graphs}"
        table = self._result.table(f"Device idle time {what}", ["", "ms a step", "idle"])
        table.row("device, from the trace", number(activity.span_s / num_steps * 1e3), percent(activity.idle_share))
        host_gaps_s = activity.host_gaps_s / num_steps
        table.row(
            f"of it in gaps over {HOST_GAP_US:g} us", number(host_gaps_s * 1e3), percent(activity.host_idle_share)
        )  # fmt: skip
        table.row("wall, traced", number(traced_s * 1e3), percent(1 - busy_s / traced_s))
        table.row("wall, not traced", number(plain_s * 1e3), percent(1 - busy_s / plain_s))
        table.notes.append(
            f"Busy {number(busy_s * 1e3)} ms a step, in {activity.num_operations / num_steps:.1f} operations. "
            f"In gaps over {HOST_GAP_US:g} us ({activity.num_host_gaps} in all) the device waits for the host. Shorter "
            "gaps are those between the nodes of a graph."
        )
        kernels = self._result.table(f"Device time by operation {what}", ["operation", "us a step", "share"])
        for name, seconds in list(activity.by_name_s.items())[:_TOP_KERNELS]:
            share = percent(seconds / activity.busy_s)
            kernels.row(name[:80].replace("|", "/"), number(seconds / num_steps * 1e6), share)
        self._result.values["idle"].append(
            {
                "cuda_graph": graphs,
                "steps": num_steps,
                "wall_step_s": plain_s,
                "traced_wall_step_s": traced_s,
                "busy_step_s": busy_s,
                "idle_share": activity.idle_share,
                "host_idle_share": activity.host_idle_share,
                "operations_per_step": activity.num_operations / num_steps,
            }
        )

    @contextmanager
    def record_failure(self, what: str) -> Iterator[None]:
        """Notes the failure of one measurement, so that the others still run.

        A measurement fails when it does not fit into memory, or when a compiler or driver raises an error.
        """
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            self._failed.append(f"{what}: {kind}{str(error)[:300]}")


def _tracing(path: Path) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def window() -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield
        profiler.export_chrome_trace(str(path))

    return window


if __name__ == "__main__":
    sys.exit(main())
