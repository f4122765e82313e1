"""Token masks on the CPU: the compiled operation and the sampler against a mask that is applied by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import new_row

from tercet.model_executor import cpu_extension
from tercet.model_executor.sampling.sampler import Sampler
from tercet.model_executor.sampling.token_mask import apply_masks_on_cpu, apply_masks_ref
from tercet.model_executor.step import INVALID_TOKEN, TokenMasks, num_mask_words

compiled = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
KINDS = [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.05}, {"frequency_penalty": 1.0}, {}]


def masks_of(allowed: np.ndarray, lines: list[int]) -> TokenMasks:
    """allowed: bool [m, vocab]"""
    padded = np.zeros((len(lines), num_mask_words(allowed.shape[1]) * 32), np.uint8)
    padded[:, : allowed.shape[1]] = allowed
    return TokenMasks(np.array(lines, np.int32), np.packbits(padded, axis=1, bitorder="little").view(np.int32))


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 31, 32, 33, 300, 4096]),
    n=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    data=st.data(),
)
@pytest.mark.parametrize("apply", [apply_masks_ref, pytest.param(apply_masks_on_cpu, marks=compiled)])
def test_a_mask_bars_every_other_token_of_its_line(apply, seed, vocab, n, share, data) -> None:
    rng = np.random.default_rng(seed)
    lines = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    x = torch.from_numpy(rng.standard_normal((n, vocab)).astype(np.float32))
    x[rng.random((n, vocab)) < 0.02] = torch.nan
    allowed = rng.random((len(lines), vocab)) < share
    expected = x.clone()
    for line, row in zip(lines, allowed, strict=True):
        expected[line][torch.from_numpy(~row) & ~x[line].isnan()] = -torch.inf
    masks = masks_of(allowed, lines)
    apply(x, torch.from_numpy(masks.lines.astype(np.int64)), torch.from_numpy(masks.bits))
    assert torch.equal(x.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@compiled
@pytest.mark.parametrize(
    ("lines", "bits", "says"),
    [
        ([2], torch.zeros(1, 2, dtype=torch.int32), r"lines must be in \[0, 2\), got 2"),
        ([-1], torch.zeros(1, 2, dtype=torch.int32), r"lines must be in \[0, 2\), got -1"),
        ([1, 0], torch.zeros(2, 2, dtype=torch.int32), "lines must rise"),
        ([0], torch.zeros(1, 1, dtype=torch.int32), "bits must have shape"),
        ([0], torch.zeros(1, 2, dtype=torch.int64), "bits must be Int"),
    ],
)
def test_the_operation_checks_what_it_is_given(lines: list[int], bits: torch.Tensor, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        apply_masks_on_cpu(torch.zeros(2, 40), torch.tensor(lines), bits)


def sampler() -> Sampler:
    made = Sampler(len(KINDS), 100, "cpu")
    for row, params in enumerate(KINDS, start=1):
        made.set_row(new_row(row, seed=row, **params))
    return made


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16]), data=st.data())
def test_masked_rows_choose_among_allowed_tokens_and_others_are_untouched(seed, dtype, data) -> None:
    rng = np.random.default_rng(seed)
    n = len(KINDS)
    lines = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    logits = torch.from_numpy(rng.standard_normal((n, 100)).astype(np.float32)).to(dtype)
    allowed = rng.random((len(lines), 100)) < 0.1
    allowed[:, 3] = True
    rows, lens = np.arange(1, n + 1, dtype=np.int32), np.full(n, 5, np.int32)
    by_hand = logits.clone()
    for line, row in zip(lines, allowed, strict=True):
        by_hand[line][torch.from_numpy(~row)] = -torch.inf
    expected = sampler().sample(by_hand, rows, lens)
    chosen = sampler().sample(logits, rows, lens, masks_of(allowed, lines))
    assert torch.equal(chosen, expected)
    assert all(allowed[i, chosen[line]] for i, line in enumerate(lines))


def test_invalid_logits_are_found_behind_a_mask() -> None:
    logits = torch.zeros(len(KINDS), 100)
    logits[0, 50] = torch.nan
    allowed = np.zeros((2, 100), bool)
    allowed[:, 7] = True
    rows, lens = np.arange(1, len(KINDS) + 1, dtype=np.int32), np.full(len(KINDS), 5, np.int32)
    chosen = sampler().sample(logits, rows, lens, masks_of(allowed, [0, 1]))
    assert chosen[0] == INVALID_TOKEN and chosen[1] == 7
