"""Measure the matrix products of one decode step on a CPU, for every packed weight format, against oneDNN.

    tercet bench linears [--model-path smollm2-135m] [--batch-size 1,4,16,64] [--kinds bf16,...]

A step runs every linear layer of the model once, in order, and then the output head. It has no other operations. It is
recorded and run again, as in a server. Only torch's operations (kinds "oneDNN") are called one by one. With --prefill,
the rows are the tokens of one prompt, and the head multiplies only the last one. All kinds multiply the same random
weights with the same random inputs, in alternating order. The ceilings are measured in the same run: memory reads, and
the processor's best instruction for products of the same type (or torch's product of large matrices, if that is
faster).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..model_executor import cpu_extension
from ..model_executor.device.dtypes import dtype_name, resolve_dtype
from ..model_executor.device.heap import keep_freed_memory
from ..model_executor.layers.kinds import Layer, LayerKinds, TorchLayers, layers_for
from ..model_executor.layers.linear import can_pack
from ..model_executor.layers.packing import COMPACT_BITS
from ..model_executor.layers.quantized_weight import GROUP, quantize
from ..model_executor.models.family import family_of
from ..model_executor.weights.quantization import BITS_PER_WEIGHT, HEAD_FORM
from ..srt.model_files.model_config import ModelConfig
from ..srt.model_files.model_name import model_name
from .argument_types import benchmark_parser, numbers, positive
from .ceilings import INT4, Rate, best_rate
from .kernel_case import relative_error
from .presets import DEFAULT_PRESET, PRESETS, load_shape
from .results import Result, add_results_arguments, finish, number, percent
from .timing import median_s

_CPU = torch.device("cpu")
_WEIGHT_STD = 0.02
_CHECK_ROWS = 7
_HEAD = "lm_head.weight"
_SETTLE_S = 0.02
"""Pause before each timed step: OpenMP threads spin for a while after a torch step and would slow the next step."""
_HEADER = ["batch", "kind", "ms a step", "GB/s", "TOP/s", "limit ms", "limited by", "of the limit", "error"]
_READING = "reading"


@dataclass(frozen=True)
class Kind:
    """One weight format, with the layers that multiply with it."""

    name: str
    layers: LayerKinds
    dtype: torch.dtype
    """Type of the activations."""
    form: str | None = None
    """Format of quantized weights."""
    weight_dtype: torch.dtype | None = None
    """Type of weights that are not quantized; None: the type of the activations."""
    is_widened: bool = False
    """Whether quantized weights are multiplied as floats."""
    is_compact: bool = False
    """Whether weights of bfloat16 take 12 bits a number."""

    @property
    def stored(self) -> torch.dtype:
        """Type of weights that are not quantized."""
        return self.weight_dtype or self.dtype

    @property
    def multiplied(self) -> torch.dtype:
        """Type of the numbers that are multiplied. Quantized weights have their own, unless they are widened."""
        if self.form is None or self.is_widened:
            return self.dtype
        return INT4 if self.form == "int4" else torch.int8


def kinds_here(config: ModelConfig) -> dict[str, Kind]:
    """The kinds that this processor and this model support, by name."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    has_groups = all(k % GROUP == 0 for _, _, k in weight_shapes(config))
    kinds = []
    if cpu_extension.multiplies(float32):
        layers = layers_for("cpu", float32)
        kinds += [Kind("fp32", layers, float32), Kind("bf16 in fp32", layers, float32, weight_dtype=bfloat16)]
        dtype = resolve_dtype("auto", None, _CPU)
        if has_groups:
            kinds += [Kind(f"{form} in fp32", layers, float32, form, is_widened=True) for form in BITS_PER_WEIGHT]
            kinds += [Kind(form, layers_for("cpu", dtype, quantized=True), dtype, form) for form in BITS_PER_WEIGHT]
    if cpu_extension.multiplies(bfloat16):
        kinds.append(Kind("bf16", layers_for("cpu", bfloat16), bfloat16))
        if torch.ops.tercet_cpu.multiplies_bfloat16():
            layers = layers_for("cpu", bfloat16, compact=True)
            kinds.append(Kind("compact bf16", layers, bfloat16, is_compact=True))
            if has_groups:
                layers = layers_for("cpu", bfloat16)
                kinds += [Kind(f"{form} in bf16", layers, bfloat16, form, is_widened=True) for form in BITS_PER_WEIGHT]
    kinds += [
        Kind(f"oneDNN {name}", TorchLayers(), dtype)
        for name, dtype in (("fp32", float32), ("bf16", bfloat16))
        if can_pack(torch.empty(1, 1, dtype=dtype))
    ]
    return {kind.name: kind for kind in kinds}


class Step:
    """All linear layers of a model in one kind. `prefill`: whether the head multiplies only one row."""

    def __init__(self, kind: Kind, *, prefill: bool = False) -> None:
        self.kind = kind
        self._prefill = prefill
        self._num_weights = 0
        self._num_head_weights = 0
        self.num_bytes = 0.0
        """Bytes of all weights."""
        self.error = math.nan
        """Relative error of the product with the first weight."""
        self._layers: list[tuple[str, int, Layer]] = []
        """Name, input width and layer of each linear layer."""
        self._inputs: dict[int, torch.Tensor] = {}
        self._num_rows = 0
        self._last_row = torch.empty(0, dtype=torch.int64)
        self._graph: Any = None
        """The recorded step, or None if the layers are torch's."""

    @property
    def widths(self) -> set[int]:
        return {width for _, width, _ in self._layers}

    def num_ops(self, rows: int) -> int:
        return 2 * (rows * self._num_weights + (1 if self._prefill else rows) * self._num_head_weights)

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Adds a linear layer. `weight`: float32 [n, k]"""
        layers = self.kind.layers
        form = HEAD_FORM if self.kind.form and name == _HEAD else self.kind.form
        rounded = weight.to(self.kind.stored) if form is None else quantize(weight, form)
        if name.endswith("gate_up_proj.weight"):
            layer = layers.gated_linear(rounded, None, "silu")
        elif name == _HEAD:
            layer = layers.head(rounded)
        else:
            layer = layers.linear(rounded, None)
        if not self._layers:
            x = torch.randn(_CHECK_ROWS, weight.shape[1]).to(self.kind.dtype)
            self.error = relative_error(layer(x), F.linear(x.double(), weight.double()))
        self._layers.append((name, weight.shape[1], layer))
        if name == _HEAD:
            self._num_head_weights += weight.numel()
        else:
            self._num_weights += weight.numel()
        stored_bits = COMPACT_BITS if self.kind.is_compact else 8 * self.kind.stored.itemsize
        self.num_bytes += weight.numel() * (stored_bits if form is None else BITS_PER_WEIGHT[form]) / 8

    def set_inputs(self, inputs: dict[int, torch.Tensor]) -> None:
        """Sets the inputs of all layers. `inputs`: width -> float32 [rows, width]"""
        self._inputs = {width: x.to(self.kind.dtype) for width, x in inputs.items()}
        self._num_rows = len(next(iter(self._inputs.values())))
        self._last_row = torch.tensor([self._num_rows - 1])
        self._graph = None
        if self.kind.layers.compiled:
            self._graph = torch.classes.tercet_cpu.Graph()
            self._graph.record(self._num_rows, 1, 1)
            try:
                self._multiply()
            finally:
                self._graph.finish()

    def _multiply(self) -> None:
        for name, width, layer in self._layers:
            x = self._inputs[width]
            layer(self.kind.layers.select_rows(x, self._last_row) if self._prefill and name == _HEAD else x)

    def seconds(self) -> float:
        start = time.perf_counter()
        if self._graph is None:
            self._multiply()
        else:
            self._graph.run(self._num_rows, 1, 1)
        return time.perf_counter() - start


def weight_shapes(config: ModelConfig) -> list[tuple[str, int, int]]:
    """(name, n, k) of every weight matrix of a step, in the order of the step."""
    shapes = {p.name: p.shape for p in family_of(config).parameters(config) if len(p.shape) == 2}
    embedding = shapes.pop("embed_tokens.weight")
    shapes.setdefault(_HEAD, embedding)
    return [(name, *shape) for name, shape in shapes.items()]


def make_steps(config: ModelConfig, kinds: Sequence[Kind], *, prefill: bool) -> list[Step]:
    steps = [Step(kind, prefill=prefill) for kind in kinds]
    for name, n, k in weight_shapes(config):
        weight = torch.randn(n, k) * _WEIGHT_STD
        for step in steps:
            step.add(name, weight)
    return steps


class Limit(NamedTuple):
    """The minimum time of a step. The longer of two limits is the larger tuple."""

    seconds: float
    source: str
    """What gives the limit: reading, or the source of a `Rate`."""


class CpuCeilings(NamedTuple):
    read_bytes_per_s: float
    rates: dict[torch.dtype, Rate]

    def limit(self, step: Step, batch_size: int) -> Limit:
        rate = self.rates[step.kind.multiplied]
        by_ops = Limit(step.num_ops(batch_size) / rate.ops_per_s, rate.source)
        return max(Limit(step.num_bytes / self.read_bytes_per_s, _READING), by_ops)

    def best(self, other: CpuCeilings) -> CpuCeilings:
        """The higher value of each ceiling. Other processes can only lower a measured ceiling."""
        rates = {dtype: max(mine, other.rates[dtype]) for dtype, mine in self.rates.items()}
        return CpuCeilings(max(self.read_bytes_per_s, other.read_bytes_per_s), rates)


def measure_cpu(kinds: Sequence[Kind], *, small: bool) -> CpuCeilings:
    """Measures the ceilings. `small`: sizes too small for valid numbers, for tests."""
    values = torch.randn(1 << (16 if small else 26))
    read = values.nbytes / median_s([values.amax], _CPU)
    size = 128 if small else 2048
    multiplied = dict.fromkeys(kind.multiplied for kind in kinds)
    return CpuCeilings(read, {dtype: best_rate(_CPU, dtype, size) for dtype in multiplied})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.batch_size:
        parser.error("--batch-size must name a number")
    try:
        config = load_shape(args.model_path)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if config.experts is not None:
        parser.error("--model-path must be a model without experts, because a step does not multiply all experts")
    here = kinds_here(config)
    names = list(here) if args.kinds is None else args.kinds.split(",")
    if not set(names) <= set(here):
        parser.error(f"--kinds must name kinds of {', '.join(here)} for this model and processor, got {args.kinds}")
    torch.manual_seed(args.seed)
    keep_freed_memory(of_any_size=True)  # a server records the head's logits in memory that it keeps
    kinds = [here[name] for name in names]
    model = model_name(args.model_path)
    result = Result(f"linears-{model}", f"Linear layers: {model}", parser.prog, argv, _CPU)
    with torch.inference_mode():
        ceilings = measure_cpu(kinds, small=args.small_ceilings)
        steps = make_steps(config, kinds, prefill=args.prefill)
        seconds = {batch_size: time_alternating(steps, batch_size, args.rounds) for batch_size in args.batch_size}
        ceilings = ceilings.best(measure_cpu(kinds, small=args.small_ceilings))
    report(result, steps, seconds, ceilings)
    finish(result, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("linears", __doc__)
    parser.add_argument(
        "--model-path",
        default=DEFAULT_PRESET,
        help=f"model whose shapes are measured: a path or a preset ({', '.join(PRESETS)})",
    )
    parser.add_argument(
        "--batch-size", type=numbers, default=[1, 4, 16, 64, 256], help="numbers of rows (default: 1,4,...,256)"
    )
    parser.add_argument(
        "--prefill", action="store_true", help="treat the rows as one prompt: the head multiplies its last row only"
    )
    parser.add_argument(
        "--kinds", help="kinds of weights, separated by commas (default: all kinds that run on this processor)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=7, help="number of rounds; the median is reported (default: 7)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random data (default: 0)")
    parser.add_argument(
        "--small-ceilings", action="store_true", help="measure ceilings with tiny sizes, to try the program"
    )
    add_results_arguments(parser)
    return parser


def time_alternating(steps: Sequence[Step], batch_size: int, rounds: int) -> list[float]:
    """Median seconds of each step over all rounds. The order of the steps is reversed in every second round."""
    inputs = {width: torch.randn(batch_size, width) for width in steps[0].widths}
    for step in steps:
        step.set_inputs(inputs)
        step.seconds()
    times: dict[str, list[float]] = {step.kind.name: [] for step in steps}
    for turn in range(rounds):
        for step in steps[:: -1 if turn % 2 else 1]:
            time.sleep(_SETTLE_S)
            step.seconds()
            times[step.kind.name].append(step.seconds())
    return [statistics.median(times[step.kind.name]) for step in steps]


def report(result: Result, steps: Sequence[Step], seconds: dict[int, list[float]], ceilings: CpuCeilings) -> None:
    """Fills the result. `seconds`: batch size -> seconds of each step"""
    table = result.table("Linear layers of one step", _HEADER)
    rates = ceilings.rates.items()
    products = [f"{dtype_name(dtype)} {number(rate.ops_per_s / 1e12)} TOP/s ({rate.source})" for dtype, rate in rates]
    reading = f"{_READING} {number(ceilings.read_bytes_per_s / 1e9)} GB/s"
    table.notes.append(f"ceilings in this run: {reading}, products of {', '.join(products)}")
    result.values.update(cases=[], read_bytes_per_s=ceilings.read_bytes_per_s)
    result.values["rates"] = {dtype_name(dtype): rate._asdict() for dtype, rate in rates}
    for batch_size, all_seconds in seconds.items():
        for step, step_seconds in zip(steps, all_seconds, strict=True):
            limit = ceilings.limit(step, batch_size)
            table.row(
                str(batch_size),
                step.kind.name,
                number(step_seconds * 1e3),
                number(step.num_bytes / step_seconds / 1e9),
                number(step.num_ops(batch_size) / step_seconds / 1e12),
                number(limit.seconds * 1e3),
                limit.source,
                percent(limit.seconds / step_seconds),
                f"{step.error:.1e}",
            )
            case = {"batch_size": batch_size, "kind": step.kind.name, "seconds": step_seconds}
            limits = {"limit_s": limit.seconds, "limited_by": limit.source}
            result.values["cases"].append(case | limits | {"relative_error": step.error})


if __name__ == "__main__":
    sys.exit(main())
