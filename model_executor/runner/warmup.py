"""Steps of nobody, as large as any that serving will see: done once at the start to learn how much memory they take."""

from __future__ import annotations

import numpy as np

from ...srt.sampling_params import SamplingParams
from ..step import ForwardMode, Int32Array, NewRow, StepInputs


def largest_steps(num_rows: int, context_len: int, max_prefill_tokens: int) -> list[StepInputs]:
    """A prefill of so many tokens with as many requests as there can be, all sampled in the way that takes the most
    memory; then small ones for what else is compiled at its first use: one that samples from the whole vocabulary, and
    a greedy one in which a request of one token meets one of two.

    All write to the dummy slot, as the rows' tables must be zeros. Rows are left to owners who know nothing of them.
    """
    count = min(num_rows, max_prefill_tokens)
    lens = np.full(count, min(context_len, max_prefill_tokens // count), np.int32)
    mixed = np.array([1, min(2, context_len)][:num_rows], np.int32)
    return [
        _prefill(lens, SamplingParams(temperature=1.0, top_p=0.9)),
        _prefill(mixed[:1], SamplingParams(temperature=1.0)),
        _prefill(mixed, SamplingParams(temperature=0.0)),
    ]


def _prefill(lens: Int32Array, sampling: SamplingParams) -> StepInputs:
    rows = np.arange(1, len(lens) + 1, dtype=np.int32)
    total = int(lens.sum())
    none = np.empty(0, np.int32)
    return StepInputs(
        mode=ForwardMode.EXTEND,
        rows=rows,
        seq_lens=lens,
        out_cache_loc=np.zeros(total, np.int32),
        new_rows=[NewRow(int(row), sampling, 0, none, none, ()) for row in rows],
        extend_lens=lens,
        input_ids=np.zeros(total, np.int32),
        sampled=np.ones(len(lens), np.bool_),
    )
