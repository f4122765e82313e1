"""Which choices of a step with drafts are accepted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor.sampling.draft_verification import verify
from tercet.model_executor.step import FROM_DEVICE, NO_DRAFT, ForwardMode, StepInputs
from tercet.srt.logprobs import Logprobs


def i32(values) -> np.ndarray:
    return np.array(values, np.int32)


def step_of(drafts: list[list[int]], lens: list[int], num_new: list[int]) -> StepInputs:
    """A step in which the row 10 + i has so many known tokens, the last of them new, and then drafts."""
    new_ids = [[FROM_DEVICE] * new + found for new, found in zip(num_new, drafts, strict=True)]
    lengths = [len(ids) for ids in new_ids]
    return StepInputs(
        ForwardMode.EXTEND,
        i32([10 + i for i in range(len(drafts))]),
        i32([known + len(found) for known, found in zip(lens, drafts, strict=True)]),
        i32(range(1, 1 + sum(lengths))),
        extend_lens=i32(lengths),
        input_ids=i32([id for ids in new_ids for id in ids]),
        sampled=np.ones(len(drafts), np.bool_),
        num_drafts=i32([len(found) for found in drafts]),
    )


rows = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), max_size=5), min_size=1, max_size=5
)  # of each draft: its token, and the choice in its place


@given(rows, st.lists(st.integers(-1, 2), min_size=5, max_size=5), st.data())
def test_a_row_keeps_its_choices_up_to_the_first_that_is_no_draft(found, lasts, data) -> None:
    drafts = [[draft for draft, _ in row] for row in found]
    chosen = [[choice for _, choice in row] + [last] for row, last in zip(found, lasts, strict=False)]
    lens = [data.draw(st.integers(3, 40)) for _ in found]
    num_new = [data.draw(st.integers(1, 3)) for _ in found]
    step = step_of(drafts, lens, num_new)
    choices = step.choices()
    verified = verify(i32([id for row in chosen for id in row]), choices)
    expected = []
    for row, given_drafts in zip(chosen, drafts, strict=True):
        num_right = next((i for i, draft in enumerate(given_drafts) if row[i] != draft), len(given_drafts))
        expected.append(row[: num_right + 1])
    assert verified.num_tokens.tolist() == [len(row) for row in expected]
    assert verified.tokens.tolist() == [id for row in expected for id in row]
    assert verified.newest().tolist() == [max(row[-1], 0) for row in expected]
    # The choices are those after the last known token of each row and after its drafts.
    assert step.num_choices == len(choices.at) and step.first_choices.tolist() == choices.starts.tolist()
    starts = step.starts.tolist()
    at = [i for start, end, new in zip(starts, starts[1:], num_new, strict=False) for i in range(start + new - 1, end)]
    assert choices.at.tolist() == at
    assert choices.rows.tolist() == [10 + i for i, row in enumerate(chosen) for _ in row]
    assert choices.lens.tolist() == [
        known + i for known, row in zip(lens, chosen, strict=True) for i in range(len(row))
    ]
    assert choices.drafts is not None
    assert choices.drafts.tolist() == [id for given_drafts in drafts for id in (*given_drafts, NO_DRAFT)]


def test_log_probabilities_are_those_of_accepted_tokens() -> None:
    verified = verify(i32([5, 6, 9, 1, 7, 2]), step_of([[5, 6, 8], [3]], [4, 4], [1, 2]).choices())
    assert verified.tokens.tolist() == [5, 6, 9, 7]
    lines = {line: Logprobs(own=np.float32(line).tobytes()) for line in range(4)}  # the second row wants none
    merged = verified.merge(lines)
    assert list(merged) == [0] and np.frombuffer(merged[0].own, np.float32).tolist() == [0, 1, 2]


def test_without_drafts_a_step_chooses_after_the_last_token_of_each_sampled_row() -> None:
    step = StepInputs(
        ForwardMode.EXTEND,
        i32([3, 1, 2]),
        i32([9, 4, 6]),
        i32(range(1, 7)),
        extend_lens=i32([3, 2, 1]),
        input_ids=i32([1, 2, 3, 4, 5, FROM_DEVICE]),
        sampled=np.array([True, False, True]),
    )
    choices = step.choices()
    assert (choices.at.tolist(), choices.rows.tolist(), choices.lens.tolist()) == ([2, 5], [3, 2], [9, 6])
    assert choices.drafts is None and step.num_choices == 2
