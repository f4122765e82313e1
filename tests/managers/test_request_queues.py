from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tercet.managers.req import Req, Stage
from tercet.managers.request_queues import RequestQueues
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams


class CountedReq(Req):
    """Counts comparisons of requests, as a search through a list makes them."""

    num_comparisons = 0
    __hash__ = Req.__hash__

    def __eq__(self, other: object) -> bool:
        CountedReq.num_comparisons += 1
        return self is other


def filled(count: int) -> tuple[RequestQueues, list[Req]]:
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=4, sampling_seed=0))
    reqs: list[Req] = [
        CountedReq(f"r{i}", np.array([1, 2, 3], dtype=np.int32), options, arrival=i) for i in range(count)
    ]
    queues = RequestQueues()
    for req in reqs:
        queues.add(req)
    return queues, reqs


def test_a_request_is_found_by_its_id_wherever_it_is() -> None:
    queues, (waiting, chunked, running, ended) = filled(4)
    queues.start(chunked, whole=False)
    queues.start(running, whole=True)
    queues.start(ended, whole=True)
    queues.finish(ended)
    assert [queues.find(f"r{i}") for i in range(4)] == [waiting, chunked, running, None]
    assert queues.live() == [waiting, chunked, running] and len(queues) == 3
    assert queues.holders() == [running, chunked]
    assert ended.stage is Stage.FINISHED


def test_finding_and_removing_compares_no_requests() -> None:
    queues, reqs = filled(1000)
    for req in reqs[500:]:
        queues.start(req, whole=True)
    CountedReq.num_comparisons = 0
    for req in reversed(reqs):
        assert queues.find(req.rid) is req
        queues.finish(req)
    assert CountedReq.num_comparisons == 0
    assert not queues.is_busy


def test_retracted_requests_wait_at_their_places_in_the_order_of_arrival() -> None:
    queues, reqs = filled(6)
    for index in (4, 1, 5):
        queues.start(reqs[index], whole=True)
    queues.start(reqs[0], whole=False)
    queues.send_back([reqs[5], reqs[0], reqs[1]])
    assert list(queues.waiting) == [reqs[i] for i in (0, 1, 2, 3, 5)]
    assert list(queues.running) == [reqs[4]] and not queues.unfinished
    assert {req.stage for req in queues.waiting} == {Stage.WAITING}


def test_requests_that_enter_the_queue_or_end_are_told() -> None:
    queues, reqs = filled(3)
    told: list[tuple[str, Req]] = []
    queues.on_wait.append(lambda req: told.append(("wait", req)))
    queues.on_end.append(lambda req: told.append(("end", req)))
    queues.start(reqs[0], whole=True)
    queues.start(reqs[1], whole=False)
    queues.send_back([reqs[0], reqs[1]])
    queues.finish(reqs[2])
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=4, sampling_seed=0))
    new = Req("new", np.array([1], dtype=np.int32), options, arrival=3)
    queues.add(new)
    assert told == [("wait", reqs[0]), ("wait", reqs[1]), ("end", reqs[2]), ("wait", new)]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["start", "chunk", "send back", "token", "finish"]))))
def test_requests_with_output_and_without_kv_are_interrupted(moves: list[tuple[int, str]]) -> None:
    """A token may also come after a retraction, from a step in flight."""
    queues, reqs = filled(4)
    sampling = SamplingParams(max_new_tokens=4, sampling_seed=0, json_schema="{}")
    options = RequestOptions(sampling=sampling, return_hidden_states=True)
    resumed = Req("resumed", np.array([1], dtype=np.int32), options, arrival=4)
    resumed.output_ids = [7]
    queues.add(resumed)
    reqs.append(resumed)
    had_row: set[Req] = set()
    for index, move in moves:
        req = reqs[index]
        if move in ("start", "chunk") and req.stage in (Stage.WAITING, Stage.EXTENDING):
            queues.start(req, whole=move == "start")
            had_row.add(req)
        elif move == "send back" and req.stage in (Stage.DECODING, Stage.EXTENDING):
            queues.send_back([req])
        elif move == "token" and (req.stage is Stage.DECODING or (req.stage is Stage.WAITING and req in had_row)):
            req.output_ids.append(1)
        elif move == "finish" and req.stage is not Stage.FINISHED:
            queues.finish(req)
        without_kv = [*queues.waiting, *queues.unfinished]
        assert {one for one in without_kv if one.output_ids} == {one for one in queues.interrupted if one.output_ids}
        assert queues.num_with_hidden == queues.num_constrained == (resumed in queues.live())
