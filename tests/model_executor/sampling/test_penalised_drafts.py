"""Penalties in steps with drafts: each choice counts the drafts before it, and the row only the accepted tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_reference import counts_of, edited_logits, new_row

from tercet.model_executor.sampling import block_sampling
from tercet.model_executor.sampling.draft_verification import EarlierDrafts, Verified, verify
from tercet.model_executor.sampling.logit_edits import LogitEdits
from tercet.model_executor.sampling.newest_tokens import NewestTokens
from tercet.model_executor.sampling.sampler import Sampler
from tercet.model_executor.sampling.sampling_state import SamplingState
from tercet.model_executor.step import NO_DRAFT, Choices, NewRow, TokenMasks

pytestmark = pytest.mark.usefixtures("each_cpu_choice")

CPU = torch.device("cpu")
VOCAB_SIZE = 13
IDS = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.fixed_dictionaries(
    {
        "frequency_penalty": st.sampled_from([0.0, 0.5, -1.25, 2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.75, -2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.2, 2.0]),
    },
    optional={
        "temperature": st.just(0.0),
        "min_p": st.just(0.1),
        "top_k": st.sampled_from([1, 4]),
        "top_p": st.just(0.8),
        "logit_bias": st.dictionaries(IDS.map(str), st.floats(-9, 9), max_size=3),
        "min_new_tokens": st.integers(0, 9),
    },
)
ROWS = st.lists(
    st.tuples(st.none() | PARAMS, st.lists(IDS, min_size=1, max_size=5), st.lists(IDS, max_size=3)),
    min_size=1,
    max_size=3,
)


def i32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def sampler_of(rows: list[NewRow]) -> Sampler:
    sampler = Sampler(len(rows), VOCAB_SIZE, CPU)
    for row in rows:
        sampler.set_row(row)
    return sampler


class Requests:
    """Requests in turns of steps with drafts, and the same requests one token at a time."""

    def __init__(self, rows: list[NewRow], seed: int) -> None:
        self.rows = rows
        self.outputs = [row.output_ids.tolist() for row in rows]
        self.drafting, self.plain = sampler_of(rows), sampler_of(rows)
        self.rng = np.random.default_rng(seed)
        self.newest = torch.zeros(len(rows) + 1, dtype=torch.int64)
        self.num_accepted = 0

    def step(self, num_drafts: list[int], wrong: float, masked: float) -> None:
        """All rows at once. `wrong`: the share of wrong drafts. `masked`: the share of choices with a mask."""
        lines, drafts, expected = [], [], []
        logits, bits = [], []
        for row, output, num in zip(self.rows, self.outputs, num_drafts, strict=True):
            right, is_right = [], True
            for place in range(num + 1):
                logits.append(torch.from_numpy(self.rng.normal(0, 2, VOCAB_SIZE).astype(np.float32)))
                bits.append(self.rng.integers(1, 1 << VOCAB_SIZE) if self.rng.random() < masked else None)
                lens = len(row.prompt_ids) + len(output) + place
                lines.append((row.row, lens))
                if is_right:  # the other sampler chooses it, too
                    right.append(self._plain(logits[-1], row.row, lens, bits[-1]))
                draft = right[-1] if self.rng.random() >= wrong else int(self.rng.integers(VOCAB_SIZE))
                drafts.append(draft if place < num else NO_DRAFT)
                is_right = is_right and draft == right[-1]
            expected.append(right)
        rows, lens = (i32(values) for values in zip(*lines, strict=True))
        at = [line for line, mask in enumerate(bits) if mask is not None]
        masks = TokenMasks(i32(at), i32([[bits[line]] for line in at])) if at else None
        newest = NewestTokens(self.newest, torch.from_numpy(rows.astype(np.int64)))
        tokens = self.drafting.sample(torch.stack(logits), rows, lens, masks, newest, i32(drafts))
        starts = np.flatnonzero(np.diff(rows, prepend=0))
        verified = verify(i32(tokens.numpy()), Choices(np.arange(len(rows)), rows, lens, starts, i32(drafts)))
        self.drafting.count(verified)
        assert verified.tokens.tolist() == [token for right in expected for token in right]
        for output, right in zip(self.outputs, expected, strict=True):
            output += right
            self.num_accepted += len(right) - 1

    def _plain(self, logits: torch.Tensor, row: int, length: int, bits: int | None) -> int:
        masks = None if bits is None else TokenMasks(i32([0]), i32([[bits]]))
        return int(self.plain.sample(logits[None].clone(), i32([row]), i32([length]), masks))

    def check_counts(self) -> None:
        fresh = [replace(row, output_ids=i32(output)) for row, output in zip(self.rows, self.outputs, strict=True)]
        samplers = sampler_of(fresh), self.plain, self.drafting
        for row in self.rows:
            first, *others = (counts_of(sampler, row.row) for sampler in samplers)
            assert others == [first, first]


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)
@given(
    rows=ROWS,
    steps=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    wrong=st.sampled_from([0.0, 0.2, 1.0]),
    masked=st.sampled_from([0.0, 0.0, 0.5]),
    block_rows=st.sampled_from([1, 2, 100]),
    seed=st.integers(0, 999),
)
def test_drafts_change_neither_tokens_nor_counts(
    rows: list[tuple[Any, list[int], list[int]]],
    steps: list[list[int]],
    wrong: float,
    masked: float,
    block_rows: int,
    seed: int,
) -> None:
    """Rows without penalties are in the same steps."""
    new_rows = [
        new_row(1 + index, 7 * index + seed, tuple(prompt), tuple(output), stops=(2, 5), **(params or {}))
        for index, (params, prompt, output) in enumerate(rows)
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(block_sampling, "BLOCK_ELEMENTS", block_rows * VOCAB_SIZE)
        requests = Requests(new_rows, seed)
    for num_drafts in steps:
        requests.step(num_drafts[: len(rows)], wrong, masked)
        requests.check_counts()
    if wrong == 0:
        assert requests.num_accepted == sum(sum(num_drafts[: len(rows)]) for num_drafts in steps)


def test_a_draft_that_comes_twice_counts_twice() -> None:
    row = new_row(1, prompt=(3,), output=(4,), temperature=0, frequency_penalty=1.0, repetition_penalty=2.0)
    state = SamplingState(1, VOCAB_SIZE, CPU)
    edits = LogitEdits(1, VOCAB_SIZE, CPU, state)
    for each in (state, edits):
        each.set_row(row)
    state.flush()
    x = torch.ones(4, VOCAB_SIZE)
    rows = np.array([1, 1, 1, 1])
    drafts = i32([5, 5, 4, NO_DRAFT])
    edits.apply(x, rows, 2 + np.arange(4), EarlierDrafts(drafts, np.arange(4)))
    for line in range(4):
        expected = edited_logits(np.ones(VOCAB_SIZE), row, [4, *drafts[:line].tolist()])
        np.testing.assert_allclose(x[line].numpy(), expected)
    assert counts_of_line(edits) == {3: 1, 4: 2}, "only accepted tokens are counted"


def counts_of_line(edits: LogitEdits) -> dict[int, int]:
    counts = edits.counts[0].tolist()
    return {token: count for token, count in enumerate(counts) if count}


def test_rows_without_penalties_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside others, and after an owner with penalties."""
    sampler = sampler_of([new_row(1, logit_bias={"1": 1.0}), new_row(2, presence_penalty=1.0)])
    counted: list[list[int]] = []
    monkeypatch.setattr(sampler._edits, "count", lambda rows, tokens: counted.append([rows.tolist(), tokens.tolist()]))
    verified = Verified(i32([5, 6, 7]), i32([2, 1]), [0, 3], i32([1, 2]))
    alone = Verified(i32([5, 6]), i32([2]), [0], i32([1]))
    sampler.count(alone)
    assert not counted
    sampler.count(verified)
    assert counted == [[[1, 1, 2], [5, 6, 7]]]
    sampler.set_row(new_row(2))
    sampler.count(verified)
    assert len(counted) == 1
