"""Steps of a CPU that were recorded: the same as launched one operation after the other, and never less."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from runner_driver import RunnerDriver

from tercet.model_executor import cpu_extension
from tercet.model_executor.runner.cpu_graph_runner import CpuGraphRunner
from tercet.model_executor.step import FROM_DEVICE, ForwardMode, PromptScore, StepInputs
from tercet.srt.logprobs import LogprobOptions

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu
ROWS = range(1, 21)


def play(driver, seed=0):
    """Prompts of all lengths, and decode steps of random batches; every step's logits."""
    rng = np.random.default_rng(seed)
    for row in ROWS:
        driver.extend({row: rng.integers(0, 301, 1 + row * 11 % 97)}, new_rows=[driver.add(row)])
    for size in (1, 20, 3, 16, 7, 20, 1):
        driver.decode(rng.permutation(ROWS)[:size].tolist())
    return driver.logits


def play_mixed(driver, seed=0, steps=40):
    """Chunks of all lengths, decode rows and drafts beside them, and decode steps; every step's logits."""
    rng, new = np.random.default_rng(seed), set(ROWS)
    for _ in range(steps):
        rows = rng.permutation(ROWS)[: rng.integers(1, 21)].tolist()
        if not new.intersection(rows) and rng.random() < 0.3:
            driver.decode(rows)
            continue
        chunks = {}
        for row in rows:
            longest = 60 if driver.lens.get(row, 0) < 200 else 2
            chunks[row] = rng.integers(0, 301, rng.integers(1, longest) if rng.random() < 0.5 else 1)
            if row not in new and rng.random() < 0.5:
                chunks[row][0] = FROM_DEVICE
        added = [driver.add(row) for row in rows if row in new]
        new.difference_update(rows)
        driver.extend(chunks, sampled=rng.random(len(rows)) < rng.random(), new_rows=added)
    driver.decode(sorted(driver.lens))
    return driver.logits


class CountedSteps:
    """RecordedSteps that note the numbers of tokens of the steps that they run."""

    def __init__(self, recorded):
        self._recorded = recorded
        self.num_bytes = recorded.num_bytes
        self.ran = []

    def can_run(self, step):
        return self._recorded.can_run(step)

    def run(self, step, choices):
        self.ran.append((step.mode, step.num_tokens))
        return self._recorded.run(step, choices)


def counted_driver(**options):
    driver = RunnerDriver(make_cpu_runner(max_running_requests=20, **options))
    counted = CountedSteps(driver.runner._recorded)
    driver.runner.record_steps(counted)
    return driver, counted


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("steps", [play, play_mixed])
def test_recorded_steps_have_the_bits_of_launched_ones(steps, variant, tied, monkeypatch):
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)
    config = replace(CONFIG, tie_word_embeddings=tied)
    logits = []
    for options in ({}, {"disable_cuda_graph": True}, {"cuda_graph_max_bs": 7}):
        driver = RunnerDriver(make_cpu_runner(variant, config, max_running_requests=20, **options))
        assert isinstance(driver.runner._recorded, CpuGraphRunner) is not bool(options.get("disable_cuda_graph"))
        logits.append(steps(driver))
    for recorded, launched, partly in zip(*logits, strict=True):
        assert torch.equal(recorded, launched) and torch.equal(partly, launched)


@pytest.mark.parametrize("seed", range(1, 9))
def test_random_steps_have_the_bits_of_launched_ones(seed):
    driver, counted = counted_driver()
    launched = RunnerDriver(make_cpu_runner(max_running_requests=20, disable_cuda_graph=True))
    for one, other in zip(play_mixed(driver, seed), play_mixed(launched, seed), strict=True):
        assert torch.equal(one, other)
    modes = [mode for mode, _ in counted.ran]
    assert {ForwardMode.EXTEND, ForwardMode.DECODE} == set(modes) and len(modes) < 41


def test_steps_of_few_tokens_and_requests_are_recorded():
    driver, counted = counted_driver(cuda_graph_max_bs=3)
    driver.extend({1: [5] * 256}, new_rows=[driver.add(1)])
    driver.extend({2: [5] * 257}, new_rows=[driver.add(2)])
    driver.extend({3: [5] * 128, 4: [6] * 129}, new_rows=[driver.add(3), driver.add(4)])
    driver.extend({5: [5] * 16, 6: [6]}, sampled=[False, False], new_rows=[driver.add(5), driver.add(6)])
    driver.extend(dict.fromkeys((1, 2, 3, 4)))
    driver.extend({1: None, 2: [7] * 3, 3: None})
    driver.decode([1, 2, 3])
    driver.decode([1, 2, 3, 4])
    extend, decode = ForwardMode.EXTEND, ForwardMode.DECODE
    assert counted.ran == [(extend, 256), (extend, 17), (extend, 5), (decode, 3)]


def test_steps_with_drafts_are_recorded_also_for_one_request():
    runner = make_cpu_runner(max_running_requests=1, speculative_algorithm="NGRAM")
    assert runner.settings.max_choices == 16
    driver, counted = RunnerDriver(runner), CountedSteps(runner._recorded)
    runner.record_steps(counted)
    driver.extend({1: [5, 6, 7]}, new_rows=[driver.add(1)])
    for num_drafts in (3, 15, 16):
        driver.extend({1: [FROM_DEVICE] + [9] * num_drafts}, num_drafts=[num_drafts])
        assert len(driver.logits[-1]) == num_drafts + 1
    assert [tokens for _, tokens in counted.ran] == [3, 4, 16]


def test_a_step_that_returns_more_than_tokens_is_launched():
    driver, counted = counted_driver()
    new_row = replace(driver.add(1), logprobs=LogprobOptions())
    step = StepInputs(
        mode=ForwardMode.EXTEND,
        rows=np.array([1], np.int32),
        seq_lens=np.array([4], np.int32),
        out_cache_loc=driver._grow(1, 4),
        new_rows=[new_row],
        extend_lens=np.array([4], np.int32),
        input_ids=np.array([5, 6, 7, 8], np.int32),
        sampled=np.array([True]),
        prompt_scores=[PromptScore(1, 0, np.array([6, 7, 8], np.int32))],
    )
    launched = driver.runner.launch(step)
    launched.sample()
    assert len(launched.wait().prompt_logprobs) == 1 and not counted.ran


def test_layers_of_torch_are_not_recorded():
    driver = RunnerDriver(make_cpu_runner(dtype="float16"))  # which no build multiplies
    assert driver.runner._recorded is None and not driver.runner.model.compiled
    assert len(play(driver)) == 27


def never_recorded():
    """Operations that are no part of a recorded step, and arguments."""
    logits, lines, ones = torch.randn(2, 40), torch.arange(2), torch.ones(2, dtype=torch.float64)
    rows, lens = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    memory = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int32)
    sizes = (3, 2), (4, 2), (3,)
    inputs = rows, lens, rows, *memory, *(torch.zeros(size, dtype=torch.int64) for size in sizes)
    params = torch.tensor([[1.0, 40, 1, 1e9, 0, 0, 0, 1]] * 2, dtype=torch.float64)
    return [
        (ops.argmax, (logits,)),
        (ops.mask_tokens, (logits, lines, torch.zeros(2, 2, dtype=torch.int32))),
        (ops.sample, (logits, lines, ones, ones, ones, ones, 0 * ones)),
        (ops.choose_tokens, (logits, lines, lines, params, lines, memory[0])),
        (ops.token_logprobs, (logits, lines, lines.view(2, 1), 2)),
        (ops.set_decode_inputs, inputs),
        (ops.instruction_rates, (torch.float32, 1e-3)),
    ]


def test_what_would_not_be_performed_again_is_refused():
    x, weight, norm = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
    for compute in (lambda out: out + 1, lambda out: out[torch.tensor([0])], torch.relu, torch.clone):
        graph = torch.classes.tercet_cpu.Graph()
        graph.record(4, 4, 4)
        compute(ops.rms_norm(x, weight, norm, 1e-5).view(2, 2, 32)[:, :1])
        with pytest.raises(RuntimeError, match="cannot be part of a recorded step: aten::"):
            graph.finish()
    others = never_recorded()
    for operation, arguments in others:
        operation(*arguments)
    graph = torch.classes.tercet_cpu.Graph()
    graph.record(4, 4, 4)
    with pytest.raises(RuntimeError, match="must have 4 rows, got 2"):
        ops.rms_norm(x[:2], None, norm, 1e-5)
    for operation, arguments in others:
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            operation(*arguments)
    with pytest.raises(RuntimeError, match="one at a time"):
        torch.classes.tercet_cpu.Graph().record(4, 4, 4)
    out = ops.rms_norm(x, None, norm, 1e-5)
    graph.finish()
    assert graph.num_operations() == 1
    for sizes in ((0, 1, 1), (5, 1, 1), (1, 0, 1), (1, 5, 1), (1, 1, -1), (1, 1, 5)):
        with pytest.raises(RuntimeError, match="has room for 4 tokens of 4 requests and 4 selected ones"):
            graph.run(*sizes)
    out.fill_(7.0)
    graph.run(3, 1, 0)
    assert torch.equal(out[:3], ops.rms_norm(x[:3], None, norm, 1e-5)) and (out[3] == 7).all()


def test_tensors_that_nobody_has_any_more_make_room_for_the_next():
    graph, x, norm = torch.classes.tercet_cpu.Graph(), torch.randn(3, 64), torch.ones(64)
    graph.record(3, 3, 3)
    first = ops.rms_norm(x, None, norm, 1e-5)
    second = ops.rms_norm(first, None, norm, 1e-5)
    address = first.data_ptr()
    assert second.data_ptr() != address
    del first
    third = ops.rms_norm(second, None, norm, 1e-5)
    assert third.data_ptr() == address
    graph.finish()
    graph.run(3, 3, 3)
    expected = x
    for _ in range(3):
        expected = ops.rms_norm(expected, None, norm, 1e-5)
    del graph  # what it has left stays
    assert torch.equal(third, expected)


def test_a_graph_that_nobody_has_any_more_stops_recording():
    graph, x, norm = torch.classes.tercet_cpu.Graph(), torch.randn(3, 64), torch.ones(64)
    graph.record(4, 4, 4)
    del graph
    assert torch.equal(ops.rms_norm(x, None, norm, 1e-5), ops.rms_norm(x.clone(), None, norm, 1e-5))
    torch.classes.tercet_cpu.Graph().record(4, 4, 4)


def test_rows_after_a_selection_are_the_selected_ones():
    graph, x, norm, indices = (
        torch.classes.tercet_cpu.Graph(),
        torch.randn(5, 32),
        torch.ones(32),
        torch.zeros(3).long(),
    )
    graph.record(5, 1, 3)
    normed = ops.rms_norm(x, None, norm, 1e-5)
    selected = ops.select_rows(normed, indices)
    with pytest.raises(RuntimeError, match="must have 3 rows, got 5"):
        ops.rms_norm(x, None, norm, 1e-5)
    out = ops.rms_norm(selected, None, norm, 1e-5)
    graph.finish()
    out.fill_(7.0)
    expected = ops.rms_norm(ops.rms_norm(x, None, norm, 1e-5), None, norm, 1e-5)
    indices[:2] = torch.tensor([3, 1])
    graph.run(4, 1, 2)
    assert torch.equal(out[:2], expected[[3, 1]]) and (out[2] == 7).all()
    graph.run(5, 1, 0)
    assert torch.equal(out[:2], expected[[3, 1]])
    for wrong in (5, -1):
        indices[1] = wrong
        with pytest.raises(RuntimeError, match=f"there is no row {wrong}, but 5 rows"):
            graph.run(5, 1, 2)
