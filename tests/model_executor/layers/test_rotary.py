"""Tables of cosines and sines: computed as far as sequences reach, to the same bits, without more memory than that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_models import VARIANTS, make_cpu_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import peak_bytes
from runner_driver import RunnerDriver

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers import rotary
from tercet.model_executor.layers.rotary import RotationTable, rope_frequencies
from tercet.srt.model_files.rope_config import RopeConfig, YarnScaling

ROPES = [RopeConfig(), RopeConfig(5e5, YarnScaling(4.0, 64, 32.0, 1.0, 1.14, True))]


@settings(max_examples=25)
@given(
    rope=st.sampled_from(ROPES),
    head_dim=st.sampled_from([2, 6, 64, 80, 128]),
    lengths=st.lists(st.integers(0, 7000), min_size=1, max_size=4),
)
def test_a_table_has_the_bits_of_one_computed_at_once(rope, head_dim, lengths):
    table = RotationTable(rope, torch.full((7000, head_dim), torch.nan))
    for length in lengths:
        table.cover(length)
    frequencies, factor = rope_frequencies(rope, head_dim)
    angles = torch.arange(7000, dtype=torch.float32)[:, None] * frequencies
    whole = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)
    covered = max(lengths)
    assert torch.equal(table.table[:covered], whole[:covered])
    assert table.table[covered + rotary._BLOCK :].isnan().all(), "computed without being asked for"


def test_a_table_takes_hardly_more_than_itself_while_it_is_computed():
    context, head_dim = 1 << 17, 64
    table = RotationTable(RopeConfig(), torch.empty(context, head_dim))
    assert peak_bytes(lambda: table.cover(context)) < table.table.nbytes / 8


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
@pytest.mark.parametrize("disable_cuda_graph", [False, True])
@pytest.mark.parametrize("variant", VARIANTS[:2])
def test_every_kind_of_step_covers_its_positions(variant, disable_cuda_graph, monkeypatch):
    """Prompts, decode steps and recorded decode steps, over the ends of blocks."""
    ids = np.random.default_rng(1).integers(0, 301, 40)
    expected = RunnerDriver(make_cpu_runner(variant)).logits_along(1, ids, [9, 14])
    monkeypatch.setattr(rotary, "_BLOCK", 4)
    runner = make_cpu_runner(variant, disable_cuda_graph=disable_cuda_graph)
    assert runner.model.rotary.each[0]._rotations.table.count_nonzero() == 0, "nothing is computed before it is needed"
    found = RunnerDriver(runner).logits_along(1, ids, [9, 14])
    for position, logits in expected.items():
        assert torch.equal(found[position], logits), position
