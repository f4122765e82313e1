"""What a recording tells: whether this scheduler decides the same, and what a step costs."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from ..results import Result, number, percent
from .comparison import Comparison
from .cost import DeviceProfile
from .replay import Replay


def add_replay_table(result: Result, replay: Replay, comparison: Comparison | None, fitted: DeviceProfile) -> None:
    """`comparison` None: records are missing, so decisions cannot be compared."""
    measured = replay.measured()
    table = result.table(
        f"Recording: {replay.num_requests} requests, {len(replay.script.steps)} steps",
        ["", "completed", "output tok/s", "TTFT p50, ms", "duration, s"],
    )
    table.row(
        "measured",
        str(measured.num_completed),
        number(measured.output_throughput),
        number(measured.median_ttft_s * 1000),
        number(measured.duration_s),
    )
    median, total = fit_errors(replay, fitted)
    cost = fitted.cost
    table.notes += [
        _decisions(comparison),
        f"Fitted cost of a step: {number(cost.step_s * 1e3)} ms, {number(cost.extend_s * 1e3)} ms more with prompts, "
        f"{number(cost.row_s * 1e6)} us per row, {number(cost.prompt_token_s * 1e6)} us per prompt token, "
        f"{number(cost.prompt_context_s * 1e9)} ns per attended position of a prompt token, "
        f"{number(cost.decode_context_s * 1e9)} ns of a decoding row, "
        f"{number(cost.joined_row_s * 1e6)} us more per row that decodes beside prompts; "
        f"host {number(fitted.host_s * 1e3)} ms. "
        f"Median error of a step {percent(median)}, error of the sum of all steps {percent(total)}.",
    ]
    if replay.had_tiers:
        table.notes.append(
            "The recorded server had host memory or files for KV. The simulation has none, and computes their tokens."
        )
    result.values["recording"] = {
        "num_requests": replay.num_requests,
        "num_steps": len(replay.script.steps),
        "num_equal_steps": None if comparison is None else comparison.num_equal,
        "first_difference": None if comparison is None else comparison.difference,
        "fitted": msgspec.structs.asdict(fitted),
        "median_step_error": median,
        "total_error": total,
        "measured": dataclasses.asdict(measured),
    }


def fit_errors(replay: Replay, fitted: DeviceProfile) -> tuple[float, float]:
    """The median of the relative errors of steps, without sign, and the relative error of the sum, with its sign."""
    pairs = [(fitted.cost.seconds(step.shape), seconds) for step, seconds in replay.timed() if seconds > 0]
    predicted, measured = np.array(pairs).T
    return float(np.median(np.abs(predicted / measured - 1))), float(predicted.sum() / measured.sum() - 1)


def _decisions(comparison: Comparison | None) -> str:
    if comparison is None:
        return "Records of this recording are missing, so decisions are not compared."
    if comparison.difference is None:
        return f"This scheduler decides all {comparison.num_recorded} steps as recorded."
    return (
        f"This scheduler decides the first {comparison.num_equal} of {comparison.num_recorded} steps as recorded. "
        f"Then: {comparison.difference}."
    )
