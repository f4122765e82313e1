from __future__ import annotations

import numpy as np

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
