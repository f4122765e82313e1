"""Greedy and mixed batches, broken logits, rows that change hands, and no wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import EVERY_KIND, all_rows, new_row, sampler_of_every_kind

from tercet.model_executor.sampling.sampler import Sampler
from tercet.model_executor.step import INVALID_TOKEN

pytestmark = pytest.mark.usefixtures("each_cpu_choice")

ONE = np.ones(1, np.int32)


@given(
    lines=st.lists(st.lists(st.integers(-9, 9), min_size=13, max_size=13), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_greedy_is_the_first_of_the_largest(lines: list[list[int]], dtype: torch.dtype) -> None:
    sampler = Sampler(6, 13, "cpu")
    for row in range(1, 7):
        # Greedy by the temperature, by a temperature that is nearly 0, and by top_k.
        sampler.set_row(new_row(row, **[{"temperature": 0.0}, {"temperature": 9e-7}, {"top_k": 1}][row % 3]))
    n = len(lines)
    tokens = sampler.sample(torch.tensor(lines, dtype=dtype), all_rows()[:n], np.full(n, 4, np.int32))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [line.index(max(line)) for line in lines]


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 101, generator=generator)
    sampler = Sampler(4, 101, "cpu")
    for row in (1, 3):
        sampler.set_row(new_row(row, temperature=0))
    for row in (2, 4):
        sampler.set_row(new_row(row, seed=row, temperature=5.0))
    rows = np.array([1, 2, 3, 4], np.int32)
    tokens = torch.stack([sampler.sample(logits, rows, np.full(4, i, np.int32)) for i in range(30)])
    best = logits.argmax(dim=-1)
    assert (tokens[:, [0, 2]] == best[[0, 2]]).all()
    assert len(set(tokens[:, 1].tolist())) > 15
    assert len(set(tokens[:, 3].tolist())) > 15


@pytest.mark.parametrize("broken", [torch.nan, "all -inf"])
@pytest.mark.parametrize("at", [0, 1, 2, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_logits_spoil_their_own_row_only(broken: float | str, at: int, dtype: torch.dtype) -> None:
    vocab_size, n = 4099, len(EVERY_KIND)
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    seq_lens = np.full(n, 4, np.int32)
    expected = sampler_of_every_kind(vocab_size).sample(logits, all_rows(), seq_lens)
    assert (expected >= 0).all()
    for victim in range(n):
        spoilt = logits.clone()
        if isinstance(broken, str):
            spoilt[victim] = -torch.inf
        else:
            spoilt[victim, at] = broken
        sampler = sampler_of_every_kind(vocab_size)
        tokens = sampler.sample(spoilt, all_rows(), seq_lens)
        assert tokens[victim] == INVALID_TOKEN
        neighbours = np.delete(np.arange(n), victim)
        assert torch.equal(tokens[neighbours], expected[neighbours])
        # The invalid token was not counted for a penalty: the row goes on as if the step had not been.
        assert torch.equal(sampler.sample(logits, all_rows(), seq_lens)[victim], expected[victim])


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}])
def test_infinite_logits_take_all_the_probability(params: dict[str, float]) -> None:
    sampler = Sampler(1, 5, "cpu")
    sampler.set_row(new_row(1, **params))
    logits = torch.tensor([[1.0, torch.inf, 3e38, torch.inf, -torch.inf]])
    tokens = {int(sampler.sample(logits, ONE, ONE * i)) for i in range(40)}
    assert tokens == ({1} if params.get("temperature") == 0 else {1, 3})


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0, "top_k": 3}])
@given(signs=st.lists(st.sampled_from([0.0, -0.0]), min_size=5, max_size=5), seed=st.integers(0, 99))
def test_the_sign_of_zero_makes_no_difference(params: dict[str, float], signs: list[float], seed: int) -> None:
    sampler = Sampler(1, 6, "cpu")
    sampler.set_row(new_row(1, seed=seed, **params))
    signed, unsigned = torch.tensor([[*signs, -3.0]]), torch.tensor([[0.0] * 5 + [-3.0]])
    assert sampler.sample(signed, ONE, ONE).tolist() == sampler.sample(unsigned, ONE, ONE).tolist()


def test_a_row_takes_its_new_owners_parameters() -> None:
    logits = torch.tensor([[1.0, 1.1, 0.9]])
    sampler = Sampler(1, 3, "cpu")
    for params, expected in [
        ({"temperature": 0.0}, {1}),
        ({}, {0, 1, 2}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.3}, {1}),
        ({"min_p": 0.85}, {0, 1}),
        ({}, {0, 1, 2}),
    ]:
        # Only the last of several owners between two steps matters.
        sampler.set_row(new_row(1, seed=8, temperature=0.01))
        sampler.set_row(new_row(1, seed=9, **params))
        assert {int(sampler.sample(logits, ONE, ONE * i)) for i in range(60)} == expected


def test_the_padding_row_is_greedy_and_an_empty_batch_is_empty() -> None:
    sampler = Sampler(2, 3, "cpu")
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert sampler.sample(logits, np.zeros(1, np.int32), ONE).tolist() == [1]
    empty = np.empty(0, np.int32)
    assert sampler.sample(logits[:0], empty, empty).shape == (0,)


def test_a_vocabulary_too_large_for_exact_sums_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 524288 tokens, got 524289"):
        Sampler(1, 2**19 + 1, "cpu")


def test_a_vocabulary_of_one_token() -> None:
    sampler = Sampler(len(EVERY_KIND), 1, "cpu")
    for i, params in enumerate(EVERY_KIND):
        sampler.set_row(new_row(i + 1, prompt=(0,), **params))
    n = len(EVERY_KIND)
    assert sampler.sample(torch.zeros(n, 1), all_rows(), np.full(n, 1, np.int32)).tolist() == [0] * n


def test_no_step_needs_a_value_from_the_device() -> None:
    """Tensors on the meta device have no values: whatever would wait for one (.item(), nonzero, ...) raises."""
    sampler = sampler_of_every_kind(5003, "meta")
    n = len(EVERY_KIND)
    logits = torch.empty(n, 5003, dtype=torch.bfloat16, device="meta")
    tokens = sampler.sample(logits, all_rows(), np.full(n, 4, np.int32))
    assert tokens.shape == (n,)
    with pytest.raises(RuntimeError, match="meta"):
        tokens.nonzero()
