"""The memory that is kept for edits of logits and for choices, against what torch takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peak_memory import peak_bytes
from sampling_reference import new_row

from tercet.model_executor.sampling.sampler import Sampler

VOCAB_SIZE = 50_000


@pytest.mark.usefixtures("each_cpu_choice")
@pytest.mark.parametrize(("num_rows", "num_choices"), [(1, 1), (1, 16), (5, 5), (64, 64), (200, 200)])
def test_what_edits_and_choices_take_is_kept_for_them(num_rows: int, num_choices: int) -> None:
    """One row has several choices, as with drafts."""
    sampler = Sampler(num_rows, VOCAB_SIZE, "cpu")
    edits = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {"3": 1.0}}
    for row in range(1, num_rows + 1):
        sampler.set_row(new_row(row, top_p=0.9, **edits))
    rows = np.repeat(np.arange(1, num_rows + 1, dtype=np.int32), num_choices // num_rows)
    logits = torch.randn(num_choices, VOCAB_SIZE)
    measured = peak_bytes(lambda: sampler.sample(logits, rows, np.full_like(rows, 9)))
    tables = sampler.max_edit_bytes(0)
    kept = sampler.max_edit_bytes(num_choices) - tables + sampler.max_choice_bytes(num_choices)
    assert tables == 3 * 4 * num_rows * VOCAB_SIZE
    assert 0.4 * kept < measured <= kept + 20_000, "a few numbers of each row"
