"""Drafts from a request's own tokens: repetitions, and what a request learns from them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kv_makers import make_req

from tercet.managers.ngram_proposer import LENGTHS, NgramProposer, find_repetition, make_proposer
from tercet.managers.request_queues import RequestQueues
from tercet.srt.server_args import ServerArgs


def proposed(proposer: NgramProposer, req, limit: int = 100) -> list[int]:
    (drafts,) = proposer.propose([req], [limit])
    return list(drafts)


# Repetitions


def find(ids: list[int]) -> tuple[int, int]:
    return find_repetition(bytearray(np.array(ids, "<i4").tobytes()))


def repetition_by_definition(ids: list[int]) -> tuple[int, int]:
    for index, length in reversed(list(enumerate(LENGTHS))):
        for start in range(len(ids) - 1, length - 1, -1):
            if ids[start - length : start] == ids[len(ids) - length :]:
                return start, index
    return 0, -1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_longest_repetition_is_found_and_of_equal_ones_the_last(ids: list[int]) -> None:
    assert find(ids) == repetition_by_definition(ids)


@given(st.lists(st.sampled_from([0, 1, 256, 257, 1 << 16, (1 << 16) + 1, 0x010101, 0x01000000]), max_size=40))
def test_bytes_of_two_tokens_are_no_token(ids: list[int]) -> None:
    """Of these tokens, parts of two in a row often look like one."""
    ids = [*ids, 1]
    assert find(ids) == repetition_by_definition(ids)


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


# Predictions


def test_the_first_drafts_are_the_beginning_of_the_prediction() -> None:
    prediction = list(range(50, 70))
    req = make_req([1, 2, 3], prediction=prediction, output=[50])
    assert proposed(NgramProposer(4, 16), req) == [51, 52, 53, 54]
    other = make_req([1, 2, 3], prediction=prediction, output=[9])
    proposer = NgramProposer(4, 16)
    assert proposed(proposer, other) == []
    other.output_ids += [50, 51]
    assert proposed(proposer, other)[:2] == [52, 53]


def test_drafts_follow_the_prediction_after_a_change() -> None:
    """The output differs from the prediction in one token, of 40. A draft is wrong there, and those after it."""
    prediction = list(range(40))
    output = [*range(20), 99, *range(21, 40)]
    req, proposer, num_steps = make_req([90, 91], prediction=prediction, output=output[:1]), NgramProposer(7, 16), 1
    while len(req.output_ids) < len(output):
        ahead = output[len(req.output_ids) :]
        drafts = proposed(proposer, req, len(ahead) - 1)
        num_right = next((i for i, (a, b) in enumerate(zip(drafts, ahead, strict=False)) if a != b), len(drafts))
        req.output_ids += ahead[: num_right + 1]
        num_steps += 1
    assert num_steps <= 9


def test_a_prediction_goes_before_the_prompt() -> None:
    """Both have the newest tokens. The prediction is nearer to the output."""
    req = make_req([1, 2, 3, 4, 5], prediction=[8, 1, 2, 3, 6, 7], output=[0, 1, 2, 3])
    assert proposed(NgramProposer(1, 16), req) == [6]


def test_a_resumed_request_finds_its_place_in_the_prediction() -> None:
    req = make_req([90], prediction=range(40), output=range(15))
    assert proposed(NgramProposer(3, 16), req) == [15, 16, 17]


# Several requests


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
