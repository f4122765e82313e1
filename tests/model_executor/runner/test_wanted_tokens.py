from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor.runner.wanted_tokens import wanted_tokens
from tercet.model_executor.step import Choices, ForwardMode, HiddenRange, HiddenSum, PromptScore, StepInputs

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3)
NONE = np.empty(0, np.int32)


@given(st.lists(st.integers(0, 20), unique=True, max_size=4).map(sorted), SPANS, SPANS, SPANS)
def test_each_use_gets_its_tokens_and_each_token_is_computed_once(chosen, scored, summed, shown):
    step = StepInputs(
        ForwardMode.EXTEND,
        rows=NONE,
        seq_lens=NONE,
        out_cache_loc=NONE,
        prompt_scores=[PromptScore(1, start, np.zeros(length, np.int32)) for start, length in scored],
        hidden_sums=[HiddenSum(start, length) for start, length in summed],
        hidden_states=[HiddenRange(start, length) for start, length in shown],
    )
    wanted = wanted_tokens(step, Choices(np.array(chosen, np.int64), NONE, NONE, np.empty(0, np.int64)))
    uses = [
        chosen,
        *([i for start, length in spans for i in range(start, start + length)] for spans in (scored, summed, shown)),
    ]
    if not step.has_extras:
        assert wanted.at.tolist() == chosen and wanted.ranks is None
        return
    assert len(set(wanted.at.tolist())) == len(wanted.at)
    assert wanted.at[wanted.ranks].tolist() == [place for use in uses for place in use]
    assert list(wanted.lens) == list(map(len, uses))
