"""The steps that a GPU server takes before it serves: each kind of step of `warmup_steps` is among them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tercet.model_executor.runner.warmup import LONG_TOKENS, all_allowed, warmup_steps
from tercet.model_executor.step import StepInputs
from tercet.srt.logprobs import MAX_TOP_LOGPROBS


def kind(step: StepInputs) -> tuple[bool, bool]:
    """Whether the step is greedy, and whether it has log probabilities."""
    (sampling,) = {(row.sampling.temperature == 0, row.logprobs is not None) for row in step.new_rows}
    return sampling


@given(
    num_rows=st.integers(1, 100),
    context_len=st.integers(1, 10_000),
    max_prefill_tokens=st.integers(1, 3000),
    tile_tokens=st.integers(0, 300),
)
@example(num_rows=1, context_len=10_000, max_prefill_tokens=1, tile_tokens=0)
@example(num_rows=4, context_len=10_000, max_prefill_tokens=64, tile_tokens=64)
@example(num_rows=4, context_len=10_000, max_prefill_tokens=65, tile_tokens=64)
def test_each_kind_of_step_is_rehearsed(
    num_rows: int, context_len: int, max_prefill_tokens: int, tile_tokens: int
) -> None:
    steps = warmup_steps(num_rows, context_len, max_prefill_tokens, [tile_tokens])
    shortest = [min(length, context_len) for length in (1, 2)]

    largest, scored, *rest = steps
    assert len(largest.rows) == min(num_rows, max_prefill_tokens) and kind(largest) == (False, False)
    assert np.array_equal(largest.extend_lens, scored.extend_lens) and kind(scored) == (True, True)
    assert {row.logprobs.top_logprobs_num for row in scored.new_rows} == {MAX_TOP_LOGPROBS}
    assert all(row.sampling.top_p < 1 for row in largest.new_rows), "sampling sorts"

    if max_prefill_tokens <= tile_tokens < max_prefill_tokens + num_rows:
        tall, *rest = rest
        assert kind(tall) == (True, False)
        assert len(tall.rows) == min(num_rows, tile_tokens + 1)
        assert tall.num_tokens > min(tile_tokens, num_rows * context_len - 1)
        assert tall.num_tokens <= tile_tokens + len(tall.rows)

    whole, *small, alone, many_long, one_long = rest
    assert whole.extend_lens.tolist() == [1] and kind(whole) == (False, False)
    assert all(row.sampling.top_p == 1 for row in whole.new_rows)
    assert [kind(step) for step in small] == [(True, False), (True, True)]
    assert all(step.extend_lens.tolist() == shortest[:num_rows] for step in small)
    assert alone.extend_lens.tolist() == shortest[1:] and kind(alone) == (True, False)

    for step in (many_long, one_long):
        assert kind(step) == (True, False)
        longest_new = int(many_long.extend_lens.max()) if step is many_long else 0
        assert set(step.seq_lens.tolist()) == {max(min(context_len, LONG_TOKENS), longest_new)}
    new = many_long.extend_lens.tolist()
    assert len(new) == max(min(num_rows, max_prefill_tokens // 2), 1)
    assert set(new) == {min(context_len, max_prefill_tokens // len(new))}
    assert one_long.extend_lens.tolist() == shortest[1:]

    for step in steps:
        assert step.sampled.all()
        scores = step.prompt_scores if kind(step)[1] else []
        assert step.prompt_scores == scores and len(scores) in (0, len(step.rows))
        starts = np.cumsum(step.extend_lens) - step.extend_lens
        for score, row, start, length in zip(scores, step.rows, starts, step.extend_lens, strict=bool(scores)):
            assert (score.row, score.start, len(score.targets)) == (row, start, length)


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 1000])
def test_masks_of_warming_up_allow_every_token(vocab_size: int) -> None:
    masks = all_allowed(3, vocab_size)
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    assert bits.shape[0] == 3 and bits.all() and vocab_size <= bits.shape[1] < vocab_size + 32
    assert masks.lines.tolist() == [0, 1, 2]
