"""Which log probabilities a request may ask for, and how many values they are."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tercet.srt.errors import InvalidRequest
from tercet.srt.logprobs import MAX_INPUT_VALUES, MAX_TOKEN_IDS, MAX_TOP_LOGPROBS, LogprobOptions, Logprobs, NewLogprobs


def test_the_most_tokens_of_a_position() -> None:
    LogprobOptions(top_logprobs_num=MAX_TOP_LOGPROBS, token_ids_logprob=[0] * MAX_TOKEN_IDS)
    with pytest.raises(InvalidRequest):
        LogprobOptions(top_logprobs_num=MAX_TOP_LOGPROBS + 1)
    with pytest.raises(InvalidRequest):
        LogprobOptions(token_ids_logprob=[0] * (MAX_TOKEN_IDS + 1))


@given(st.integers(0, 1000), st.integers(0, MAX_TOP_LOGPROBS), st.integers(0, MAX_TOKEN_IDS))
@example(5, 1, 2)  # their product can be the limit itself
def test_a_prompt_has_at_most_so_many_positions(start: int, num_top: int, num_ids: int) -> None:
    """Each listed position has the token itself, the most probable ones and those that were asked for."""
    token_ids = [0] * num_ids
    options = LogprobOptions(logprob_start_len=start, top_logprobs_num=num_top, token_ids_logprob=token_ids)
    most = MAX_INPUT_VALUES // (1 + num_top + num_ids)
    options.check(start + most, 1)
    with pytest.raises(InvalidRequest, match=f"{most + 1} positions") as refused:
        options.check(start + most + 1, 1)
    assert refused.value.param == "logprob_start_len"
    LogprobOptions(top_logprobs_num=num_top, token_ids_logprob=token_ids).check(start + most + 1, 1)


def test_the_number_of_values() -> None:
    """A large answer is written in a thread. Ids are written with their values."""
    some = Logprobs(own=bytes(4 * 2), top=bytes(4 * 6), top_ids=bytes(4 * 6), asked=bytes(4 * 10))
    assert NewLogprobs(None, some).num_values == 18
    assert NewLogprobs(some, some).num_values == 36
