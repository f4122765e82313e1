"""Steps of a CPU whose rows are all greedy: their tokens come from the output head, and no logits are written."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from runner_driver import RunnerDriver

from tercet.model_executor import cpu_extension
from tercet.model_executor.step import FROM_DEVICE, TokenMasks
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu

POISON = 12345.0
GREEDY = SamplingParams(temperature=0.0)
CAPPED = replace(CONFIG, logits_soft_cap=0.5)
"""Several of the largest logits are often equal, and the first one wins."""
NEEDS_LOGITS = {
    "temperature": {"sampling": SamplingParams(temperature=0.7)},
    "penalty": {"sampling": SamplingParams(temperature=0.0, frequency_penalty=0.5)},
    "bias": {"sampling": SamplingParams(temperature=0.0, logit_bias={"7": 3.0})},
    "early stop": {"sampling": SamplingParams(temperature=0.0, min_new_tokens=100), "stop_ids": (7,)},
    "log probabilities": {"logprobs": LogprobOptions()},
}


@pytest.fixture(autouse=True)
def _various_tokens(monkeypatch):
    """Larger random weights than usual, so that tokens vary."""
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)


class Steps:
    """A driver of a runner that may leave out logits, and the steps that wrote some."""

    def __init__(self, variant=VARIANTS[0], *, always_logits=False, **options):
        self.runner = make_cpu_runner(variant, max_running_requests=20, **options)
        takes_most_probable = self.runner.sampler.takes_most_probable
        self.driver = RunnerDriver(self.runner)
        if not always_logits:
            self.runner.sampler.takes_most_probable = takes_most_probable

    def add(self, row, **changes):
        return replace(self.driver.add(row), **changes)

    def writes_logits(self, run):
        """Whether `run` wrote to the logits of the recorded step."""
        logits = self.runner._recorded._logits
        with torch.inference_mode():
            logits.fill_(POISON)
        run()
        return not bool((logits == POISON).all())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"disable_cuda_graph": True}, {"cuda_graph_max_bs": 5, "config": CAPPED}],
    ids=["recorded", "launched", "both, with a soft cap"],
)
def test_the_tokens_are_those_of_logits(variant, options):
    """Greedy steps, and steps with one sampled row, in turns: recorded, launched, and both."""
    played = []
    for always_logits in (False, True):
        steps, rng, tokens = Steps(variant, always_logits=always_logits, **options), np.random.default_rng(3), []
        for row in range(1, 10):
            sampling = GREEDY if row < 9 else SamplingParams(temperature=0.8)
            ids = rng.integers(0, 301, 1 + row * 23 % 50)
            tokens.append(steps.driver.extend({row: ids}, new_rows=[steps.add(row, sampling=sampling)]))
        for size in (1, 8, 9, 3, 8, 9, 1, 5):
            rows = [*range(1, 9)][:size] if size < 9 else [9, *range(1, 9)]
            tokens.append(steps.driver.decode(rows))
        sampled = [True, False, True]
        tokens.append(steps.driver.extend({1: [5, 6], 2: [7], 3: None}, sampled=sampled))
        tokens.append(steps.driver.extend({1: [5, 6], 9: [7, 8]}, sampled=[False, False]))
        played.append([step.tolist() for step in tokens])
        num_logits = len(steps.driver.logits)
        assert num_logits == len([step for step in tokens if len(step)]) if always_logits else num_logits < 9
    assert played[0] == played[1] and len({token for step in played[0] for token in step}) > 10


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_greedy_step_writes_no_logits(variant):
    steps = Steps(variant)
    assert not steps.writes_logits(lambda: steps.driver.extend({1: [5] * 30}, new_rows=[steps.add(1)]))
    assert not steps.writes_logits(lambda: steps.driver.decode([1]))
    assert not steps.writes_logits(lambda: steps.driver.extend({1: None, 2: [3] * 9}, new_rows=[steps.add(2)]))
    assert not steps.driver.logits


@pytest.mark.parametrize("need", NEEDS_LOGITS)
def test_one_row_that_needs_logits_is_enough(need):
    steps = Steps()
    steps.driver.extend({1: [5] * 30}, new_rows=[steps.add(1)])
    new_row = steps.add(2, **NEEDS_LOGITS[need])
    assert steps.writes_logits(lambda: steps.driver.extend({2: [6] * 30}, new_rows=[new_row]))
    assert steps.writes_logits(lambda: steps.driver.decode([1, 2]))
    assert not steps.writes_logits(lambda: steps.driver.decode([1]))
    # The row's next owner needs none.
    assert not steps.writes_logits(lambda: steps.driver.extend({2: [6]}, new_rows=[steps.add(2)]))


def test_a_mask_needs_logits():
    steps = Steps()
    steps.driver.extend({1: [5] * 30}, new_rows=[steps.add(1)])
    words = -(-CONFIG.vocab_size // 32)
    only = np.zeros((1, words), np.int32)
    only[0, 3] = 1 << 5
    steps.driver.masks = lambda _: TokenMasks(np.zeros(1, np.int32), only)
    tokens = []
    assert steps.writes_logits(lambda: tokens.extend(steps.driver.decode([1])))
    assert tokens == [3 * 32 + 5]


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_each_choice_of_a_step_with_drafts_has_a_mask_of_its_own(num_right):
    """Row 2 has the masks, and row 1 has a draft before it."""
    driver = Steps().driver
    driver.extend({1: [5] * 30, 2: [6] * 20}, new_rows=[driver.add(1), driver.add(2)])
    words = -(-CONFIG.vocab_size // 32)
    wanted = [9, 70, 200]
    bits = np.zeros((3, words), np.int32)
    for line, token in enumerate(wanted):
        bits[line, token // 32] = 1 << token % 32
    driver.masks = lambda num_choices: TokenMasks(np.arange(num_choices - 3, num_choices, dtype=np.int32), bits)
    drafts = [token if place < num_right else token + 1 for place, token in enumerate(wanted[:2])]
    tokens = driver.extend({1: [FROM_DEVICE, 3], 2: [FROM_DEVICE, *drafts]}, num_drafts=[1, 2])
    assert tokens.tolist()[-1 - num_right :] == wanted[: num_right + 1]
    assert driver.runner.future_tokens[2] == wanted[num_right]


def test_stop_tokens_are_free_again_after_the_first_tokens():
    steps = Steps()
    sampling = SamplingParams(temperature=0.0, min_new_tokens=2)
    new_row = steps.add(1, sampling=sampling, stop_ids=(7,), prompt_ids=np.full(30, 5, np.int32))
    wrote = [steps.writes_logits(lambda: steps.driver.extend({1: [5] * 30}, new_rows=[new_row]))]
    wrote += [steps.writes_logits(lambda: steps.driver.decode([1])) for _ in range(3)]
    assert wrote == [True, True, False, False]


@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}], ids=str)
def test_a_row_with_nan_has_an_invalid_token(options):
    steps = Steps(**options)
    steps.driver.extend({1: [5] * 30, 2: [6] * 30}, new_rows=[steps.add(1), steps.add(2)])
    slots = steps.driver.table[1, :30]
    with torch.inference_mode():
        steps.runner.kv_pool.v_buffer[1].view(-1, CONFIG.num_kv_heads * CONFIG.head_dim)[slots] = math.nan
    tokens = steps.driver.extend({1: None, 2: None})
    assert tokens[0] == -1 and tokens[1] >= 0
    assert steps.runner.future_tokens[1] == 0 and steps.runner.future_tokens[2] == tokens[1]


def test_tokens_stay_when_the_next_step_runs_before_they_are_read():
    steps = Steps()
    steps.driver.extend({1: [5] * 30}, new_rows=[steps.add(1)])
    launched, run = [], steps.runner.launch
    steps.runner.launch = lambda step: launched.append(run(step)) or launched[-1]
    first = steps.driver.decode([1]).tolist()
    steps.driver.decode([1])
    assert launched[0]._tokens._tokens.tolist() == first


def test_a_graph_runs_the_ending_that_it_is_asked_for():
    graph, norm, norms = (
        torch.classes.tercet_cpu.Graph(),
        torch.ones(32),
        [torch.full((32,), 2.0), torch.full((32,), 3.0)],
    )
    x, indices = torch.randn(5, 32), torch.tensor([3, 1, 0])
    graph.record(5, 1, 3)
    selected = ops.select_rows(ops.rms_norm(x, None, norm, 1e-5), indices)
    outs = []
    for of_ending in norms:
        graph.begin_ending()
        outs.append(ops.rms_norm(selected, None, of_ending, 1e-5))
        with pytest.raises(RuntimeError, match="must have 3 rows, got 5"):
            ops.rms_norm(x, None, norm, 1e-5)
    graph.finish()
    assert graph.num_operations() == 2
    with pytest.raises(RuntimeError, match="after the rest of its graph"):
        graph.run_ending(0)
    for out in outs:
        out.fill_(POISON)
    graph.run(4, 1, 2)
    assert all((out == POISON).all() for out in outs)
    for wrong in (-1, 2):
        with pytest.raises(RuntimeError, match=f"there is no ending {wrong}, but 2 endings"):
            graph.run_ending(wrong)
    graph.run_ending(1)
    normed = ops.rms_norm(ops.rms_norm(x, None, norm, 1e-5)[[3, 1]], None, norms[1], 1e-5)
    assert torch.equal(outs[1][:2], normed) and (outs[1][2] == POISON).all() and (outs[0] == POISON).all()
    with pytest.raises(RuntimeError, match="not being recorded"):
        graph.begin_ending()


def test_endings_begin_where_the_rest_of_the_graph_ends():
    """A selection in one ending is none in the next, and memory that the first one has left serves the second."""
    graph, norm, x, indices = torch.classes.tercet_cpu.Graph(), torch.ones(32), torch.randn(5, 32), torch.tensor([4])
    graph.record(5, 1, 1)
    normed = ops.rms_norm(x, None, norm, 1e-5)
    graph.begin_ending()
    selected = ops.select_rows(ops.rms_norm(normed, None, norm, 1e-5), indices)
    graph.begin_ending()
    again = ops.rms_norm(normed, None, norm, 1e-5)
    graph.finish()
    expected = ops.rms_norm(ops.rms_norm(x, None, norm, 1e-5), None, norm, 1e-5)
    for ending in (0, 1, 0):
        graph.run(5, 1, 1)
        graph.run_ending(ending)
        assert torch.equal(selected, expected[4:]) if ending == 0 else torch.equal(again, expected)


def test_an_ending_with_an_operation_of_torch_is_refused():
    graph = torch.classes.tercet_cpu.Graph()
    graph.record(4, 4, 4)
    graph.begin_ending()
    torch.relu(ops.rms_norm(torch.randn(4, 32), None, torch.ones(32), 1e-5))
    with pytest.raises(RuntimeError, match="cannot be part of a recorded step: aten::"):
        graph.finish()
