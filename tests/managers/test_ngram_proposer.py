"""Drafts from a request's own tokens: repetitions, and what a request learns from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_makers import make_req

from tercet.managers.ngram_proposer import MAX_MATCH, MAX_PLACES, NgramProposer, find_repetition, make_proposer
from tercet.managers.request_queues import RequestQueues
from tercet.srt.server_args import ServerArgs


def proposed(proposer: NgramProposer, req, limit: int = 100) -> list[int]:
    (drafts,) = proposer.propose([req], [limit])
    return list(drafts)


# Repetitions


def repetition_by_definition(ids: list[int]) -> tuple[int, int]:
    best = (0, 0)
    for start in range(1, len(ids)):
        length = 0
        while length < min(start, MAX_MATCH) and ids[start - 1 - length] == ids[-1 - length]:
            length += 1
        if length and length >= best[1]:
            best = (start, length)
    return best


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_longest_repetition_is_found_and_of_equal_ones_the_last(ids: list[int]) -> None:
    assert find_repetition(np.array(ids, np.int32)) == repetition_by_definition(ids)


@pytest.mark.parametrize("length", [MAX_MATCH - 1, MAX_MATCH, MAX_MATCH + 5])
def test_a_repetition_has_a_largest_length(length: int) -> None:
    ids = [*range(50), 90, *range(length), 91, *range(length)]
    start, found = find_repetition(np.array(ids, np.int32))
    assert found == min(length, MAX_MATCH) and ids[start] == 91


def test_only_the_last_occurrences_of_a_token_are_compared() -> None:
    ids = [7, 8, 9, 5, *[1, 5] * (MAX_PLACES - 1), 7, 8, 9, 5]
    assert find_repetition(np.array(ids, np.int32)) == (4, 4)
    ids = [7, 8, 9, 5, *[1, 5] * MAX_PLACES, 7, 8, 9, 5]
    assert find_repetition(np.array(ids, np.int32)) == (len(ids) - 4, 1)


# Drafts of one request


def test_a_repetition_goes_on_as_before() -> None:
    req = make_req([*range(14), 50, *range(9)])
    assert proposed(NgramProposer(7, 16), req) == [9, 10, 11, 12, 13, 50, 0]
    assert proposed(NgramProposer(3, 16), req) == [9, 10, 11]
    assert proposed(NgramProposer(8, 16), req, limit=2) == [9, 10]
    assert proposed(NgramProposer(8, 16), req, limit=0) == []


def test_a_repetition_that_reaches_its_own_beginning_goes_on_in_circles() -> None:
    assert proposed(NgramProposer(7, 16), make_req([9, 1, 2, 3] + [1, 2, 3] * 4)) == [1, 2, 3, 1, 2, 3, 1]


def test_new_tokens_have_no_drafts() -> None:
    assert proposed(NgramProposer(8, 16), make_req(range(30))) == []
    assert proposed(NgramProposer(8, 16), make_req([5])) == []


def test_output_tokens_count_as_well() -> None:
    proposer, req = NgramProposer(4, 16), make_req([7, 8, 9])
    assert proposed(proposer, req) == []
    req.output_ids += [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    assert proposed(proposer, req) == [5, 6, 1]
    req.output_ids += range(20, 900)  # more than was allocated at first
    assert proposed(proposer, req) == []
    req.output_ids += range(30, 40)
    assert proposed(proposer, req) == [40, 41, 42, 43]  # a longer repetition


def test_a_request_learns_that_its_drafts_are_wrong_and_later_that_they_are_right() -> None:
    proposer, req = NgramProposer(8, 16), make_req([1, 2, 3])
    lengths = []
    for turn in range(12):  # what comes after 1, 2, 3 is always new
        req.output_ids += [100 + turn, 1, 2, 3]
        lengths.append(len(proposed(proposer, req)))
    assert lengths[0] > 0 and lengths == sorted(lengths, reverse=True) and lengths[-1] == 0
    for _ in range(12):  # nothing is proposed, but the guesses are right
        req.output_ids += [100, 1, 2, 3]
        lengths.append(len(proposed(proposer, req)))
    assert lengths[-1] == 8


def test_requests_have_histories_of_their_own_until_they_end() -> None:
    queues = RequestQueues()
    proposer = make_proposer(ServerArgs(model_path="m", speculative_algorithm="NGRAM"), queues)
    assert proposer is not None
    reqs = [make_req([*range(10, 20), *range(10, 16)], 0), make_req([*range(30, 40), *range(30, 36)], 1)]
    first, second = proposer.propose(reqs, [3, 2])
    assert (list(first), list(second)) == ([16, 17, 18], [36, 37])
    for req in reqs:
        queues.add(req)
        queues.finish(req)
    assert not proposer._histories


def test_without_the_setting_there_is_no_proposer() -> None:
    queues = RequestQueues()
    assert make_proposer(ServerArgs(model_path="m"), queues) is None and not queues.on_end


def test_a_step_of_many_requests_has_no_drafts() -> None:
    reqs = [make_req([1, 2] * 10, number) for number in range(16)]
    proposer = NgramProposer(8, 16)
    assert [len(drafts) for drafts in proposer.propose(reqs, [9] * 16)] == [0] * 16
    few = [len(drafts) for drafts in proposer.propose(reqs[:4], [9] * 4)]
    assert 0 < sum(few) <= 12


def test_drafts_that_take_too_long_are_not_proposed() -> None:
    proposer, req = NgramProposer(8, 16), make_req([1, 2, 3, 4, 7, 8, 9, 1, 2, 3])
    assert proposed(proposer, req) == [4, 7, 8]
    for _ in range(100):
        proposer.observe(1, 1, 0.01)
        proposer.observe(1, 9, 0.1)
    assert proposed(proposer, req) == []
