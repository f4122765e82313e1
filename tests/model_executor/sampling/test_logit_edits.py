"""Penalties counted on the device across steps, logit bias, and stop tokens that come too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import edited_logits, new_row

from tercet.model_executor.sampling.logit_edits import LazyRowTable, LogitEdits
from tercet.model_executor.sampling.sampler import Sampler
from tercet.model_executor.sampling.sampling_state import SamplingState

VOCAB_SIZE = 23
ROW = np.ones(1, np.int32)
IDS = st.integers(0, VOCAB_SIZE - 1)


@settings(max_examples=200)
@given(
    params=st.fixed_dictionaries(
        {
            "frequency_penalty": st.sampled_from([0.0, 0.5, -1.25, 2.0]),
            "presence_penalty": st.sampled_from([0.0, 0.75, -2.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.2, 2.0, 1e-6, 3e-9, 1e-30]),
            "logit_bias": st.none() | st.dictionaries(IDS.map(str), st.floats(-100, 100), max_size=3),
            "min_new_tokens": st.integers(0, 9),
        }
    ),
    prompt=st.lists(IDS, min_size=1, max_size=6),
    output=st.lists(IDS, max_size=4),
    sampled=st.lists(IDS | st.just(-1), max_size=4),
    seed=st.integers(0, 99),
)
def test_edits_equal_the_reference(
    params: dict[str, Any], prompt: list[int], output: list[int], sampled: list[int], seed: int
) -> None:
    state = SamplingState(4, VOCAB_SIZE, torch.device("cpu"))
    edits = LogitEdits(4, VOCAB_SIZE, torch.device("cpu"), state)
    row = new_row(2, prompt=tuple(prompt), output=tuple(output), stops=(0, 11), **params)
    state.set_row(row)
    edits.set_row(row)
    state.flush()
    for token in sampled:
        edits.count(np.array([2]), torch.tensor([token]))
    generated = output + [token for token in sampled if token >= 0]
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB_SIZE).astype(np.float32)
    expected = edited_logits(logits.astype(np.float64), row, generated)
    x = torch.from_numpy(logits.copy())[None]
    seq_lens = np.array([len(prompt) + len(generated)])
    edits.apply(x, np.array([2]), seq_lens)
    np.testing.assert_allclose(x[0].numpy(), expected, rtol=2e-6, atol=2e-5)
    if not edits.needed(np.array([2]), seq_lens)[0]:
        np.testing.assert_array_equal(x[0].numpy(), logits)


def test_the_smallest_repetition_penalty_makes_no_nan() -> None:
    """1e-300 is 0 in float32, and 0 / 0 is NaN."""
    sampler = Sampler(1, 4, "cpu")
    sampler.set_row(new_row(1, prompt=(0, 2), temperature=0, repetition_penalty=1e-300))
    assert greedy_steps(sampler, torch.tensor([[0.0, 1.0, 2.0, -1.0]]), 2, 1) == [2]


def greedy_steps(sampler: Sampler, logits: torch.Tensor, start: int, steps: int) -> list[int]:
    return [int(sampler.sample(logits, ROW, ROW * (start + step))) for step in range(steps)]


def test_sampled_tokens_are_counted_without_the_host() -> None:
    logits = torch.full((1, VOCAB_SIZE), -50.0)
    logits[0, [3, 5, 8]] = torch.tensor([4.0, 3.2, 2.4])
    sampler = Sampler(1, VOCAB_SIZE, "cpu")
    sampler.set_row(new_row(1, prompt=(3,), temperature=0, frequency_penalty=1.0))
    # 3 falls below 5 after one token, 5 below the rest after one more, and so on round.
    assert greedy_steps(sampler, logits, 1, 6) == [3, 5, 3, 8, 5, 3]
    sampler.set_row(new_row(1, prompt=(3,), temperature=0, presence_penalty=1.0))
    assert greedy_steps(sampler, logits, 1, 5) == [3, 5, 3, 3, 3]
    # The prompt counts for the repetition penalty: 4 / 1.5 < 3.2, then 3.2 / 1.5 < 4 / 1.5.
    sampler.set_row(new_row(1, prompt=(3,), temperature=0, repetition_penalty=1.5))
    assert greedy_steps(sampler, logits, 1, 3) == [5, 3, 3]
    sampler.set_row(new_row(1, prompt=(3,), temperature=0))
    assert greedy_steps(sampler, logits, 1, 3) == [3, 3, 3]


def test_an_output_kept_over_a_retraction_is_counted() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.5]])
    sampler = Sampler(1, 3, "cpu")
    sampler.set_row(new_row(1, prompt=(0,), output=(0, 0), temperature=0, frequency_penalty=0.3))
    assert greedy_steps(sampler, logits, 3, 2) == [2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_callers_logits_are_not_changed(dtype: torch.dtype) -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    sampler = Sampler(2, VOCAB_SIZE, "cpu")
    sampler.set_row(new_row(1, repetition_penalty=1.5, logit_bias={"3": 5.0}, min_new_tokens=3, stops=(1,)))
    sampler.set_row(new_row(2, top_p=0.5))
    sampler.sample(logits, np.array([1, 2], np.int32), np.array([3, 3], np.int32))
    assert torch.equal(logits, before)


def test_stop_tokens_wait_for_min_new_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    sampler = Sampler(1, 4, "cpu")
    sampler.set_row(new_row(1, prompt=(0, 0), temperature=0, min_new_tokens=2, stops=(1, 2, 4000)))
    assert greedy_steps(sampler, logits, 2, 4) == [3, 3, 1, 1]
    # After a retraction the tokens generated before count.
    sampler.set_row(new_row(1, prompt=(0, 0), output=(3,), temperature=0, min_new_tokens=2, stops=(1, 2)))
    assert greedy_steps(sampler, logits, 3, 2) == [3, 1]
    # Nothing but stop tokens left: no token is possible.
    sampler.set_row(new_row(1, prompt=(0, 0), temperature=0, min_new_tokens=1, stops=(0, 1, 2, 3)))
    assert greedy_steps(sampler, logits, 2, 2) == [-1, 1]


def test_logit_bias_forces_and_forbids() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 1.5]])
    sampler = Sampler(1, 4, "cpu")
    sampler.set_row(new_row(1, logit_bias={"2": 100.0}))
    assert set(greedy_steps(sampler, logits, 0, 40)) == {2}
    sampler.set_row(new_row(1, logit_bias={"0": -100.0, "2": -100.0}))
    assert set(greedy_steps(sampler, logits, 0, 40)) == {1, 3}
    sampler.set_row(new_row(1))
    assert set(greedy_steps(sampler, logits, 0, 80)) == {0, 1, 2, 3}


def test_ids_beyond_the_logits_are_passed_over() -> None:
    sampler = Sampler(1, 4, "cpu")
    sampler.set_row(new_row(1, prompt=(9, 1), output=(70, 2), temperature=0, repetition_penalty=2.0))
    assert greedy_steps(sampler, torch.tensor([[1.0, 1.5, 1.9, 0.9]]), 4, 1) == [0]


def test_a_table_line_only_for_rows_that_ask() -> None:
    table = LazyRowTable(5, 7, torch.int32, torch.device("cpu"))
    assert len(table.table) == 0
    table.assign(4).fill_(9)
    assert len(table.table) == 1
    assert table.lines(np.array([1, 4])).tolist() == [-1, 0]
    assert table.assign(4).tolist() == [0] * 7  # a new owner starts from nothing
    table.assign(4).fill_(9)
    table.assign(2).fill_(5)
    for row in (1, 3, 5):
        table.assign(row)
    assert table.table.shape == (5, 7)  # never more than rows
    assert table.table[table.lines(np.array([4, 2]))].tolist() == [[9] * 7, [5] * 7]
    table.release(4)
    table.release(4)
    assert table.lines(np.array([4])).tolist() == [-1]
    assert table.assign(4).tolist() == [0] * 7
    assert len(set(table.lines(np.arange(1, 6)).tolist())) == 5


def test_no_memory_for_penalties_that_nobody_sets() -> None:
    state = SamplingState(256, 150_000, torch.device("cpu"))
    edits = LogitEdits(256, 150_000, torch.device("cpu"), state)
    for row in range(1, 257):
        edits.set_row(new_row(row, temperature=0.7, top_p=0.9))
    assert not edits.needed(np.arange(257), np.full(257, 10)).any()
    assert edits.counts.nbytes + edits.bias.nbytes == 0
    edits.set_row(new_row(3, presence_penalty=0.5))
    assert edits.counts.nbytes + edits.bias.nbytes == 150_000 * 4
    assert edits.needed(np.arange(257), np.full(257, 10)).nonzero()[0].tolist() == [3]
    edits.set_row(new_row(3))
    edits.set_row(new_row(200, frequency_penalty=0.5))  # takes over the memory of the request before
    assert edits.needed(np.arange(257), np.full(257, 10)).nonzero()[0].tolist() == [200]
    assert edits.counts.nbytes + edits.bias.nbytes == 150_000 * 4
