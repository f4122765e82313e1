"""A request computes the same bits alone, in batches, in chunks, and in recorded and launched steps of a CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from runner_driver import RunnerDriver

from tercet.model_executor.runner.cpu_graph_runner import CpuGraphRunner


def assert_every_step_has_the_same_bits(make: Callable[..., RunnerDriver], *, is_recorded: bool = True) -> None:
    """`make`: makes the driver of a runner with six rows from further settings, always of the same model.
    `is_recorded`: whether the model's steps are recorded unless the settings say otherwise."""
    rng = np.random.default_rng(3)
    prompts = {row: rng.integers(0, 301, length) for row, length in enumerate((70, 1, 33, 5, 12), start=1)}
    rows = list(prompts)
    alone = make()
    assert isinstance(alone.runner._recorded, CpuGraphRunner) == is_recorded
    expected = {}
    for row, ids in prompts.items():
        alone.extend({row: ids[:20]}, new_rows=[alone.add(row)])
        if len(ids) > 20:
            alone.extend({row: ids[20:]})
        alone.decode([row], [5])
        expected[row] = alone.logits[-1][0]
    for options in ({}, {"disable_cuda_graph": True}):
        batch = make(**options)
        batch.extend(prompts, new_rows=[batch.add(row) for row in prompts])
        batch.decode(rows[::-1], [5] * len(rows))
        for logits, row in zip(batch.logits[-1], rows[::-1], strict=True):
            assert torch.equal(logits, expected[row]), (options, row)
