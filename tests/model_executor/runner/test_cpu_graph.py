"""Decode steps of a CPU that were recorded: the same as launched one operation after the other, and never less."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from runner_driver import RunnerDriver

from tercet.model_executor import cpu_extension
from tercet.model_executor.runner.cpu_graph_runner import CpuGraphRunner

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu


def play(driver, seed=0):
    """Prompts of all lengths, and decode steps of random batches; every step's logits."""
    rng = np.random.default_rng(seed)
    for row in range(1, 21):
        driver.extend({row: rng.integers(0, 301, 1 + row * 11 % 97)}, new_rows=[driver.add(row)])
    for size in (1, 20, 3, 16, 7, 20, 1):
        driver.decode(rng.permutation(np.arange(1, 21))[:size].tolist())
    return driver.logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_recorded_steps_have_the_bits_of_launched_ones(variant, tied, monkeypatch):
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)
    config = replace(CONFIG, tie_word_embeddings=tied)
    logits = []
    for options in ({}, {"disable_cuda_graph": True}, {"cuda_graph_max_bs": 7}):
        driver = RunnerDriver(make_cpu_runner(variant, config, max_running_requests=20, **options))
        assert isinstance(driver.runner._recorded_decodes, CpuGraphRunner) is not bool(
            options.get("disable_cuda_graph")
        )
        logits.append(play(driver))
    for recorded, launched, partly in zip(*logits, strict=True):
        assert torch.equal(recorded, launched) and torch.equal(partly, launched)


def test_layers_of_torch_are_not_recorded():
    driver = RunnerDriver(make_cpu_runner(dtype="float16"))  # which no build multiplies
    assert driver.runner._recorded_decodes is None and not driver.runner.model.compiled
    assert len(play(driver)) == 27


def test_what_would_not_be_performed_again_is_refused():
    x, weight, norm = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
    for compute in (lambda out: out + 1, lambda out: out[torch.tensor([0])], torch.relu, torch.clone):
        graph = torch.classes.tercet_cpu.Graph()
        graph.record(4)
        compute(ops.rms_norm(x, weight, norm, 1e-5).view(2, 2, 32)[:, :1])
        with pytest.raises(RuntimeError, match="cannot be part of a recorded step: aten::"):
            graph.finish()
    graph = torch.classes.tercet_cpu.Graph()
    graph.record(4)
    with pytest.raises(RuntimeError, match="must have 4 rows, got 2"):
        ops.rms_norm(x[:2], None, norm, 1e-5)
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        ops.argmax(x)
    with pytest.raises(RuntimeError, match="one at a time"):
        torch.classes.tercet_cpu.Graph().record(4)
    out = ops.rms_norm(x, None, norm, 1e-5)
    graph.finish()
    assert graph.num_operations() == 1
    for rows in (0, 5):
        with pytest.raises(RuntimeError, match="has room for 4 rows"):
            graph.run(rows)
    out.fill_(7.0)
    graph.run(3)
    assert torch.equal(out[:3], ops.rms_norm(x[:3], None, norm, 1e-5)) and (out[3] == 7).all()


def test_tensors_that_nobody_has_any_more_make_room_for_the_next():
    graph, x, norm = torch.classes.tercet_cpu.Graph(), torch.randn(3, 64), torch.ones(64)
    graph.record(3)
    first = ops.rms_norm(x, None, norm, 1e-5)
    second = ops.rms_norm(first, None, norm, 1e-5)
    address = first.data_ptr()
    assert second.data_ptr() != address
    del first
    third = ops.rms_norm(second, None, norm, 1e-5)
    assert third.data_ptr() == address
    graph.finish()
    graph.run(3)
    expected = x
    for _ in range(3):
        expected = ops.rms_norm(expected, None, norm, 1e-5)
    del graph  # what it has left stays
    assert torch.equal(third, expected)
