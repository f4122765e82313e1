"""Log probabilities from logits: exact, in order, and independent of other rows, on the C++ operation and in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension
from tercet.model_executor.sampling.token_logprobs import with_cpu, with_torch

METHODS = [with_torch] + [with_cpu] * (cpu_extension.load() is not None)


@st.composite
def cases(draw):
    """logits, lines, ids, k"""
    vocab, rows = draw(st.sampled_from([1, 2, 15, 255, 256, 257, 1000, 5003])), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn((rows, vocab), generator=generator) * draw(st.sampled_from([0.01, 3.0, 80.0]))
    if draw(st.booleans()):
        logits = logits.round()  # many ties, and zeros of both signs
    if draw(st.booleans()):
        logits[:, torch.randperm(vocab, generator=generator)[: vocab // 2]] = -torch.inf
    n, m, k = draw(st.integers(0, 5)), draw(st.integers(1, 4)), draw(st.integers(0, min(vocab, 60)))
    lines = torch.randint(rows, (n,), generator=generator)
    return logits, lines, torch.randint(vocab, (n, m), generator=generator), k


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_is_the_log_softmax(method, case) -> None:
    logits, lines, ids, k = case
    found = method(logits, lines, ids, k)
    expected = logits[lines].double().log_softmax(-1)
    best = logits[lines].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(found.top_ids.long(), best) and found.top_ids.dtype == torch.int32
    for values, tokens in ((found.given, ids), (found.top, best)):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), expected.gather(1, tokens), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_invalid_logits_give_nan_and_no_other_row_changes(method, wrong) -> None:
    logits = torch.randn(3, 300)
    lines, ids = torch.arange(3), torch.zeros((3, 1), dtype=torch.int64)
    before = method(logits, lines, ids, 2)
    logits[1, slice(None) if wrong == -torch.inf else 7] = wrong
    after = method(logits, lines, ids, 2)
    assert after.given[1].isnan().all()
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[::2], other[::2])


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    logits = torch.randn(40, 49152) * 5
    lines, ids = torch.arange(40), torch.randint(49152, (40, 3))
    together = with_cpu(logits, lines, ids, 20)
    for row in range(40):
        alone = with_cpu(logits[row : row + 1].clone(), lines[:1], ids[row : row + 1], 5)
        assert torch.equal(alone.given[0], together.given[row]) and torch.equal(alone.top[0], together.top[row, :5])


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
@pytest.mark.parametrize(
    "changes",
    [
        {"lines": torch.tensor([2])},
        {"lines": torch.tensor([-1])},
        {"ids": torch.tensor([[9]])},
        {"ids": torch.tensor([[-1]])},
        {"k": 10},
        {"k": -1},
        {"logits": torch.zeros((2, 9), dtype=torch.float64)},
    ],
)
def test_what_would_read_beyond_the_logits_is_refused(changes) -> None:
    good = {"logits": torch.zeros(2, 9), "lines": torch.tensor([1]), "ids": torch.tensor([[8]]), "k": 9}
    assert with_cpu(**good).given.shape == (1, 1)
    with pytest.raises(RuntimeError):
        with_cpu(**{**good, **changes})
