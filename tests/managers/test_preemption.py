"""Whom a request of higher priority preempts, compared with what an admission needs, and when nobody is preempted."""

from __future__ import annotations

import pytest
from kv_makers import make_req
from scheduler_rig import Rig

from tercet.managers.req import Req
from tercet.srt.io_struct import AbortFinish


def full_rig(size: int, page_size: int, *, has_equal: bool, joins: str) -> Rig:
    """A decode and two prompts in chunks hold KV, and perhaps a decode that is as urgent as the candidate."""
    rig = Rig(
        pool_size=size,
        page_size=page_size,
        max_prefill_tokens=64,
        chunked_prefill_size=16,
        preemption_threshold=0,
        watermark=0.05,
        overlap=False,
        audit=False,
        mixed=joins == "by flag",
        max_itl_s=1000.0 if joins == "if cheap" else None,
    )
    if has_equal:
        rig.add("equal", [1] * 20, priority=9, max_new_tokens=40)
    rig.add("decodes", [2] * 19, max_new_tokens=30, ignore_eos=True)
    rig.turn()
    for rid, token, length in (("long", 3, 80), ("short", 4, 20)):
        rig.add(rid, [token] * length, priority=1, max_new_tokens=7)
        rig.turn()
    rig.planner.ratio.value = 0.25
    rig.planner._num_decodes_due = 0
    return rig


def victims_of(rig: Rig) -> list[Req]:
    victims = [req for req in rig.scheduler.queues.holders() if req.urgency < 9]
    return sorted(victims, key=lambda req: req.place, reverse=True)


def make_candidate() -> Req:
    candidate = make_req([7] * 41, 99, max_new_tokens=3)
    candidate.urgency = 9
    return candidate


def starts(rig: Rig) -> bool:
    """Whether the candidate could be admitted now."""
    has_joins = rig.planner._limits.enable_mixed_chunk or rig.planner.gap is not None
    adder = rig.planner._make_adder(rig.planner._ready() if has_joins else [], None)
    candidate = make_candidate()
    return adder._fits(candidate, candidate.num_tokens)


@pytest.mark.parametrize("joins", ["no", "by flag", "if cheap"])
@pytest.mark.parametrize("has_equal", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_fewest_that_let_the_candidate_start_are_preempted(page_size: int, has_equal: bool, joins: str) -> None:
    seen = set()
    for size in range(160, 240, page_size):
        rig = full_rig(size, page_size, has_equal=has_equal, joins=joins)
        victims = victims_of(rig)
        if len(victims) < 2:
            continue
        found = rig.planner._enough_for(make_candidate(), victims)
        assert found == victims[: len(found)]
        enough = 0
        while not starts(rig) and enough < len(victims):
            rig.planner._retract(victims[enough])
            rig.scheduler.queues.send_back([victims[enough]])
            enough += 1
        assert len(found) == (enough if starts(rig) else 0), size
        seen.add(len(found))
    assert len(seen) > 1


def test_alone_in_the_engine_a_candidate_needs_no_more_than_its_prompt() -> None:
    """Whatever the watermark leaves free."""
    rig = Rig(pool_size=100, watermark=0.9, preemption_threshold=0, overlap=False)
    rig.add("low", [1] * 60, max_new_tokens=8)
    rig.turn()
    rig.add("urgent", [2] * 60, priority=1, max_new_tokens=8)
    rig.turn()
    assert rig.scheduler.queues.find("urgent").row and rig.planner.num_retractions == 1


@pytest.mark.parametrize(
    "reason",
    ["none", "aborted", "grammar", "files", "victim is aborted", "victim may have its last token"],
)
def test_nobody_is_preempted_for_a_request_that_cannot_start(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_running=1, preemption_threshold=0, overlap=False)
    rig.add("low", [1] * 9, max_new_tokens=30)
    rig.turn()
    rig.add("high", [2] * 9, priority=1)
    rig.scheduler._handle(rig.inbox.messages.pop())
    low, high = (rig.scheduler.queues.find(rid) for rid in ("low", "high"))
    match reason:
        case "aborted":
            high.pending_abort = AbortFinish("")
        case "grammar":
            high.awaits_grammar = True
        case "files":
            monkeypatch.setattr(rig.kv, "awaits_storage", lambda req: req is high)
        case "victim is aborted":
            low.pending_abort = AbortFinish("")
        case "victim may have its last token":
            low.max_kv_len = low.kv_len
    assert rig.planner._preempt(0) == (reason == "none")
