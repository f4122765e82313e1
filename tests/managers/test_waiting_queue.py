"""The waiting queue: its order, its sums, and who gives way to whom."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_makers import make_req

from tercet.managers import waiting_queue
from tercet.managers.req import Req
from tercet.managers.waiting_queue import WaitingQueue
from tercet.srt.io_struct import AbortFinish


def of(arrival: int, urgency: int = 0, *, num_tokens: int = 10, output: tuple[int, ...] = ()) -> Req:
    req = make_req([1], arrival, output=list(output))
    req.urgency, req.queued_tokens = urgency, num_tokens
    return req


def filled(*reqs: Req) -> WaitingQueue:
    queue = WaitingQueue()
    for req in reqs:
        queue.add(req)
    return queue


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "retract"]), st.integers(-2, 2), st.integers(0, 99))))
@settings(deadline=None)
def test_it_is_in_the_order_of_the_places_and_counts_its_tokens(acts: list[tuple[str, int, int]]) -> None:
    queue, running, num_arrived = WaitingQueue(), [], 0
    waiting: set[Req] = set()
    for act, urgency, number in acts:
        if act == "add":
            num_arrived += 1
            waiting.add(req := of(num_arrived, urgency, num_tokens=number))
            queue.add(req)
        elif act == "remove" and waiting:
            req = sorted(waiting, key=lambda one: one.arrival)[number % len(waiting)]
            queue.remove(req)
            waiting.remove(req)
            running.append(req)
        elif act == "retract":
            queue.put_back(running)
            waiting |= set(running)
            running = []
        assert list(queue) == sorted(waiting, key=lambda req: req.place)
        assert len(queue) == len(waiting) and all(req in queue for req in waiting)
        assert queue.num_tokens == sum(req.queued_tokens for req in waiting)
        assert not any(req in queue for req in running)
        for of_new in range(-3, 4):
            ahead = sum(req.queued_tokens for req in waiting if req.urgency >= of_new)
            assert queue.num_tokens_before(of(1000, of_new)) == ahead


def test_urgencies_beyond_64_bits_count_as_equal() -> None:
    queue = filled(of(0, 2**70), of(1, 0), of(2, -(2**70)))
    assert [queue.num_tokens_before(of(9, urgency)) for urgency in (2**71, 0, -(2**71))] == [10, 20, 30]


def test_it_counts_its_changes_and_forgets_urgencies_without_requests() -> None:
    queue, reqs = WaitingQueue(), [of(0, 5), of(1, -3)]
    seen = {queue.num_changes}
    for req in reqs:
        queue.add(req)
        seen.add(queue.num_changes)
    for req in reqs:
        queue.remove(req)
        seen.add(queue.num_changes)
    assert not queue._tokens_by_urgency._sums and queue.num_tokens == 0
    queue.put_back(reqs)
    seen.add(queue.num_changes)
    assert len(seen) == 6


def test_requests_that_come_back_are_compared_with_older_ones_only(monkeypatch) -> None:
    """A hundred thousand others may wait behind them."""
    looked_at: list[int] = []
    monkeypatch.setattr(waiting_queue, "_arrival_of", lambda req: looked_at.append(req.arrival) or req.arrival)
    queue = filled(*(of(arrival, urgency=0) for arrival in (0, 3, *range(5, 1000))))
    queue.put_back([of(4, 0), of(1, 0), of(2, 0)])
    assert [req.arrival for req in queue] == [*range(1000)]
    assert set(looked_at) == {0, 1, 2, 3, 4}


def test_an_arrival_that_overtakes_others_sorts_no_requests(monkeypatch) -> None:
    monkeypatch.setattr(waiting_queue, "_arrival_of", None)
    queue = filled(*(of(arrival, urgency=arrival % 3) for arrival in range(9)))
    assert [req.arrival for req in queue] == [2, 5, 8, 1, 4, 7, 0, 3, 6]


def test_the_newest_of_the_least_urgent_gives_way_to_a_more_urgent_one() -> None:
    queue = filled(of(0, 1), of(1, 0), of(2, 0), of(3, 1))
    assert queue.gives_way_to(of(9, 0)) is None
    refused = queue.gives_way_to(of(9, 1))
    assert refused is not None and refused.arrival == 2
    for arrival in (2, 1, 3, 0):
        refused = queue.gives_way_to(of(9, 2))
        assert refused is not None and refused.arrival == arrival
        queue.remove(refused)
    assert queue.gives_way_to(of(9, 2)) is None


def test_who_has_output_or_ends_anyway_does_not_give_way() -> None:
    aborted = of(2)
    aborted.pending_abort = AbortFinish("")
    queue = filled(of(0), of(1, output=(5,)), aborted)
    refused = queue.gives_way_to(of(9, 1))
    assert refused is not None and refused.arrival == 0
    queue.remove(refused)
    assert queue.gives_way_to(of(9, 1)) is None
    queue.add(of(4, 1))
    refused = queue.gives_way_to(of(9, 2))
    assert refused is not None and refused.arrival == 4, "no less urgent one may be refused"
