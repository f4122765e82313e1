"""The work of an arrival and of an admission, while thousands of requests wait and each has another priority.

Work is counted in instructions of the interpreter, so no test depends on the speed of the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from kv_makers import make_req
from scheduler_rig import Rig

from tercet.managers.req import Req
from tercet.managers.tenant_queue import TenantQueue
from tercet.managers.tenant_shares import TenantShares
from tercet.managers.waiting_queue import WaitingQueue

FEW, MANY = 256, 4096


class Urgency(int):
    """A comparison is no instruction of the interpreter if C code makes it. This one always is."""

    def __lt__(self, other: int) -> bool:
        return int(self) < int(other)

    def __ge__(self, other: int) -> bool:
        return int(self) >= int(other)

    def __neg__(self) -> Urgency:
        return Urgency(-int(self))

    def __hash__(self) -> int:
        return hash(int(self))

    def __eq__(self, other: object) -> bool:
        return int(self) == other


def num_instructions(call: Callable[[], object]) -> int:
    """The instructions of the interpreter that a call takes, with those of all functions that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def of(arrival: int, urgency: int) -> Req:
    req = make_req([1], arrival)
    req.urgency, req.queued_tokens, req.tenant = Urgency(urgency), 10, "ab"[arrival % 2]
    return req


def work_of_one(queue: WaitingQueue, num_waiting: int) -> dict[str, int]:
    """Instructions of each operation."""
    for arrival in range(num_waiting):
        queue.add(of(arrival, 2 * (arrival * 1999 % num_waiting)))
    waits = next(iter(queue))
    new = of(num_waiting, num_waiting | 1)
    calls: dict[str, Callable[[], object]] = {
        "estimate": lambda: queue.num_tokens_before(new),
        "give way": lambda: queue.gives_way_to(new),
        "arrive": lambda: queue.add(new),
        "first": lambda: next(iter(queue)),
        "admit": lambda: queue.remove(waits),
        "put back": lambda: queue.put_back([waits]),
    }
    if isinstance(queue, TenantQueue):
        calls["tenants"] = lambda: queue.has_several_tenants
        calls["in turn"] = lambda: queue.in_turn(8)
    return {name: num_instructions(call) for name, call in calls.items()}


@pytest.mark.parametrize("make", [WaitingQueue, lambda: TenantQueue(lambda urgency: TenantShares({}, 100))])
def test_the_work_of_the_queue_does_not_grow_with_the_number_of_priorities(make: Callable[[], WaitingQueue]) -> None:
    few, many = work_of_one(make(), FEW), work_of_one(make(), MANY)
    assert {name: (few[name], many[name]) for name in few if many[name] > 2 * few[name]} == {}


def work_of_one_turn(policy: str, num_waiting: int) -> int:
    """Instructions of a turn in which one request arrives and one is admitted."""
    rig = Rig(
        max_running=2,
        max_queued=MANY + 2,
        policy=policy,
        preemption_threshold=0,
        max_queue_time_s=1e9,
        overlap=False,
        audit=False,
    )
    for index in range(num_waiting):
        rig.add(f"r{index}", [index % 90, index // 90], tenant="ab"[index % 2], priority=index, max_new_tokens=1)
    for _ in range(3):
        rig.turn()
    before = len(rig.scheduler.queues.waiting)
    rig.add("new", [5, 5], priority=num_waiting // 2, max_new_tokens=1)
    work = num_instructions(lambda: rig.scheduler.turn(rig.in_flight))
    assert len(rig.scheduler.queues.waiting) <= before, "nobody was admitted"
    return work


@pytest.mark.parametrize("policy", ["lpm", "dlpm"])
def test_the_work_of_a_turn_does_not_grow_with_the_number_of_priorities(policy: str) -> None:
    assert work_of_one_turn(policy, MANY) <= 1.5 * work_of_one_turn(policy, FEW)
