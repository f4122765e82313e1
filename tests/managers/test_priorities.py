"""Priorities on the whole scheduler with the fake runner: order, preemption, and who leaves a full queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers.schedule_policy import POLICIES
from tercet.srt.errors import QueueFull
from tercet.srt.io_struct import AbortFinish


def ends(rig: Rig) -> list[str]:
    """The requests in the order of their first output."""
    return list(rig.heard)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("low_first", "expected"), [(False, "bdac"), (True, "cadb")])
def test_the_most_urgent_goes_first_under_every_policy(policy: str, low_first: bool, expected: str) -> None:
    rig = Rig(max_running=1, policy=policy, low_first=low_first, preemption_threshold=100)
    for index, (rid, priority) in enumerate({"a": 1, "b": 3, "c": -5, "d": 2}.items()):
        rig.add(rid, [index] * 9, priority=priority, max_new_tokens=2)
    rig.run()
    assert "".join(ends(rig)) == expected


@pytest.mark.parametrize(("priority", "is_preempted"), [(10, False), (11, True)])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_difference_above_the_threshold_preempts_for_a_row(priority: int, is_preempted: bool, overlap: bool) -> None:
    rig = Rig(max_running=1, preemption_threshold=10, overlap=overlap)
    rig.add("low", [1] * 9, max_new_tokens=30)
    for _ in range(6):
        rig.turn()
    num_kept = len(rig.heard["low"].ids)
    rig.add("high", [2] * 9, priority=priority, max_new_tokens=5)
    rig.run()
    assert 0 < num_kept < 30
    assert rig.heard["low"].ids == expected_output([1] * 9, 1, 30, 97)
    assert rig.heard["high"].ids == expected_output([2] * 9, 1, 5, 97)
    assert rig.heard["low"].last.counts.num_retractions == is_preempted
    assert rig.heard["high"].last.counts.num_retractions == 0


def test_nobody_is_preempted_whose_last_token_is_in_flight() -> None:
    """Its row is free in the next turn anyway."""
    rig = Rig(max_running=1, preemption_threshold=0)
    rig.add("low", [1] * 9, max_new_tokens=3)
    for _ in range(3):
        rig.turn()
    low = rig.scheduler.queues.find("low")
    assert low.num_steps_in_flight and low.awaits_results
    rig.add("high", [2] * 9, priority=1, max_new_tokens=2)
    rig.run()
    assert rig.planner.num_retractions == 0
    assert rig.heard["high"].ids == expected_output([2] * 9, 1, 2, 97)


def test_without_priority_scheduling_nothing_is_preempted() -> None:
    rig = Rig(max_running=1)
    rig.add("first", [1] * 9, max_new_tokens=30)
    rig.turn()
    rig.add("second", [2] * 9, priority=1000, max_new_tokens=5)
    rig.run()
    assert rig.planner.num_retractions == 0


def test_as_few_as_needed_are_preempted_the_least_urgent_and_the_newest_first() -> None:
    rig = Rig(pool_size=100, preemption_threshold=0, overlap=False, conservativeness=0.01)
    for rid, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 9)):
        rig.add(rid, [ord(rid) % 9] * 12, priority=priority, max_new_tokens=8)
    for _ in range(3):
        rig.turn()
    rig.add("urgent", [5] * 50, priority=9, max_new_tokens=2)
    rig.run()
    retracted = {rid: heard.last.counts.num_retractions for rid, heard in rig.heard.items()}
    assert retracted == {"a": 0, "b": 0, "c": 1, "d": 0, "urgent": 0}


def test_nobody_is_preempted_if_that_is_not_enough() -> None:
    rig = Rig(pool_size=100, preemption_threshold=0, overlap=False)
    rig.add("equal", [1] * 50, priority=9, max_new_tokens=20)
    rig.add("low", [2] * 5, max_new_tokens=15)
    for _ in range(3):
        rig.turn()
    rig.add("urgent", [7] * 60, priority=9, max_new_tokens=2)
    rig.run()
    assert rig.planner.num_retractions == 0
    assert rig.heard["urgent"].ids == expected_output([7] * 60, 1, 2, 97)


@pytest.mark.parametrize(("other_shares", "num_preempted"), [(True, 0), (False, 2)])
def test_kv_that_others_share_is_not_counted_as_freed(other_shares: bool, num_preempted: int) -> None:
    """The two less urgent requests hold a prefix together, and perhaps an equally urgent one holds it, too."""
    rig = Rig(pool_size=128, preemption_threshold=0, overlap=False, conservativeness=0.01)
    prefix = [1] * 40
    rig.add("equal", [*(prefix if other_shares else []), 2], priority=9, max_new_tokens=20)
    rig.turn()
    for rid, tail in (("a", 3), ("b", 4)):
        rig.add(rid, [*prefix, tail], max_new_tokens=20)
        for _ in range(4):
            rig.turn()
    assert len(rig.scheduler.queues.running) == 3
    rig.add("urgent", [7] * 90, priority=9, max_new_tokens=2)
    for _ in range(3):
        rig.turn()
    assert rig.planner.num_retractions == num_preempted
    assert bool(rig.scheduler.queues.find("urgent").row) == (num_preempted > 0)
    rig.run()
    assert rig.heard["a"].ids == expected_output([*prefix, 3], 1, 20, 97)


def test_kv_of_decodes_that_join_the_step_is_not_free() -> None:
    """Without what they take, the victims would be enough, and the candidate would be refused all the same."""
    preempted = []
    for size in range(80, 130):
        rig = Rig(pool_size=size, preemption_threshold=0, overlap=False, conservativeness=0.01, mixed=True)
        for rid, priority in (("equal", 9), ("low", 0)):
            rig.add(rid, [ord(rid[0]) % 9] * 20, priority=priority, max_new_tokens=40)
        for _ in range(4):
            rig.turn()
        rig.add("urgent", [7] * 60, priority=9, max_new_tokens=2)
        rig.turn()
        preempted.append(rig.planner.num_retractions)
        assert preempted[-1] <= bool(rig.scheduler.queues.find("urgent").row)
        rig.run()
    assert set(preempted) == {0, 1}


@pytest.mark.parametrize("page_size", [1, 4])
def test_with_one_preempted_request_less_there_would_be_no_room(page_size: int) -> None:
    """What the preempted decodes would take in the step is free, too."""

    def make_rig(size: int) -> Rig:
        settings: dict[str, Any] = {"pool_size": size, "page_size": page_size, "conservativeness": 0.01, "mixed": True}
        rig = Rig(preemption_threshold=0, overlap=False, **settings)
        for rid, priority in (("equal", 9), ("a", 0), ("b", 0)):
            rig.add(rid, [ord(rid[0]) % 9] * 20, priority=priority, max_new_tokens=40)
        while sum(map(len, (heard.ids for heard in rig.heard.values()))) < 3 * 5:
            rig.turn()
        rig.add("urgent", [1] * 60, priority=9, max_new_tokens=2)
        return rig

    seen = set()
    for size in range(108, 160, page_size):
        rig = make_rig(size)
        rig.turn()
        num_preempted = rig.planner.num_retractions
        seen.add(num_preempted)
        if num_preempted:
            fewer = make_rig(size)
            victims = [fewer.scheduler.queues.find(rid) for rid in "ba"[: num_preempted - 1]]
            for victim in victims:
                fewer.planner._retract(victim)
            fewer.scheduler.queues.send_back(victims)
            fewer.planner._limits = replace(fewer.planner._limits, preemption_threshold=None)
            fewer.turn()
            assert rig.scheduler.queues.find("urgent").row and not fewer.scheduler.queues.find("urgent").row, size
    assert seen == {0, 1, 2}


def test_nobody_is_preempted_while_an_equally_urgent_prompt_is_in_chunks() -> None:
    """The preempted row would stay empty, because the waiting prompt may not start beside the other one."""
    rig = Rig(pool_size=2048, max_running=2, context_len=1024, preemption_threshold=0, overlap=False)
    rig.add("low", [1] * 9, max_new_tokens=100)
    rig.turn()
    for index in range(2):
        rig.add(f"high{index}", [2 + index] * 500, priority=1, max_new_tokens=1)
        rig.turn()
    assert [req.rid for req in rig.scheduler.queues.unfinished] == ["high0"]
    rig.run()
    assert rig.planner.num_retractions == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_is_preempted_for_a_request_that_waits_for_a_prefix(overlap: bool) -> None:
    """The preempted request would start again before it in each step, and leave the prompt in chunks no room."""
    rig = Rig(max_running=2, preemption_threshold=0, overlap=overlap, chunked_prefill_size=16)
    rig.add("low", [1] * 5, max_new_tokens=200)
    rig.turn()
    rig.add("in chunks", list(range(90)), priority=1, max_new_tokens=1)
    rig.turn()
    rig.add("urgent", list(range(91)), priority=2, max_new_tokens=1)
    rig.run()
    assert rig.ended == ["urgent", "in chunks", "low"]
    assert rig.heard["low"].last.counts.num_retractions == 1


@pytest.mark.parametrize(
    ("watermark", "num_cached", "is_preempted"), [(0.0, 0, False), (0.3, 0, True), (0.0, 30, False)]
)
def test_a_preemption_counts_the_watermark_and_the_cached_prefix(
    watermark: float, num_cached: int, is_preempted: bool
) -> None:
    """30 of 100 tokens run. The urgent prompt has 40, of which some are cached."""
    rig = Rig(pool_size=100, watermark=watermark, preemption_threshold=0, overlap=False)
    if num_cached:
        rig.add("seed", [5] * num_cached, max_new_tokens=1)
        rig.run()
    rig.add("low", [1] * 30, max_new_tokens=8)
    rig.turn()
    rig.add("high", [5] * 40, priority=1, max_new_tokens=1)
    rig.turn()
    assert rig.planner.num_retractions == is_preempted
    assert rig.scheduler.queues.find("high") is None or rig.scheduler.queues.find("high").row
    rig.run()


def test_decode_steps_that_nobody_needs_delay_no_preemption() -> None:
    """The only decode ends, while more decode steps are due before the next part of a prompt in chunks."""
    rig = Rig(pool_size=112, preemption_threshold=0, overlap=False, max_prefill_tokens=8, chunked_prefill_size=8)
    rig.add("short", [1] * 4, max_new_tokens=3)
    rig.turn()
    rig.add("long", [2] * 90, max_new_tokens=1)
    while rig.heard["short"].finish is None:
        rig.turn()
        rig.planner._num_decodes_due = 1000
    assert [req.rid for req in rig.scheduler.queues.unfinished] == ["long"]
    rig.add("urgent", [4] * 60, priority=1, max_new_tokens=1)
    rig.run()
    assert ends(rig) == ["short", "urgent", "long"]


def test_decode_steps_that_no_request_can_join_delay_no_preemption() -> None:
    """The last token of the only decode is in flight. A part of a prompt in chunks would come before the urgent one."""
    rig = Rig(pool_size=112, preemption_threshold=0, max_prefill_tokens=8, chunked_prefill_size=8)
    rig.add("short", [1] * 4, max_new_tokens=3)
    rig.turn()
    rig.add("long", [2] * 90, max_new_tokens=1)
    queues = rig.scheduler.queues
    while not all(req.awaits_results for req in queues.running):
        rig.turn()
        rig.planner._num_decodes_due = 1 if queues.unfinished else 0
    assert queues.running and [req.rid for req in queues.unfinished] == ["long"]
    rig.planner._num_decodes_due = 1000
    rig.add("urgent", [4] * 60, priority=1, max_new_tokens=1)
    rig.turn()
    assert [req.rid for req in queues.unfinished] == ["urgent"]
    rig.run()
    assert ends(rig) == ["short", "urgent", "long"]


@pytest.mark.parametrize("overlap", [False, True])
def test_with_too_little_memory_the_least_urgent_is_retracted(overlap: bool) -> None:
    """Whoever has more output. The difference is below the threshold, so nobody is preempted."""
    rig = Rig(pool_size=128, conservativeness=0.01, preemption_threshold=10, overlap=overlap)
    rig.add("low", [1] * 9, max_new_tokens=90)
    for _ in range(30):
        rig.turn()
    rig.add("urgent", [2] * 9, priority=5, max_new_tokens=70)
    rig.run()
    assert rig.heard["low"].last.counts.num_retractions > 0
    assert rig.heard["urgent"].last.counts.num_retractions == 0
    assert rig.heard["low"].ids == expected_output([1] * 9, 1, 90, 97)
    assert rig.heard["urgent"].ids == expected_output([2] * 9, 1, 70, 97)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_urgent_prompt_in_chunks_is_not_retracted_for_a_less_urgent_one_that_decodes(overlap: bool) -> None:
    rig = Rig(
        pool_size=100, conservativeness=0.01, preemption_threshold=10, overlap=overlap, max_prefill_tokens=8,
        chunked_prefill_size=8,
    )  # fmt: skip
    rig.add("low", [1] * 4, max_new_tokens=60)
    for _ in range(4):
        rig.turn()
    rig.planner.ratio.value = 0.0  # the outputs of "low" will be more than expected
    rig.add("urgent", [2] * 80, priority=5, max_new_tokens=2)
    rig.run()
    assert rig.heard["low"].last.counts.num_retractions == 1
    assert rig.heard["urgent"].last.counts.num_retractions == 0
    assert rig.heard["low"].ids == expected_output([1] * 4, 1, 60, 97)


def test_the_least_urgent_and_newest_leaves_a_full_queue() -> None:
    rig = Rig(max_queued=3, max_running=1, preemption_threshold=100)
    rig.add("runs", [0] * 5, max_new_tokens=20)
    rig.turn()
    for rid, priority in (("a", 0), ("b", 1), ("c", 0)):
        rig.add(rid, [1] * 5, priority=priority)
    rig.turn()
    for rid, priority in (("d", 0), ("e", 2), ("f", 2), ("g", 1), ("h", 5)):
        rig.add(rid, [1] * 5, priority=priority)
    rig.run()
    refused = {rid: heard.finish for rid, heard in rig.heard.items() if isinstance(heard.finish, AbortFinish)}
    assert set(refused) == {"d", "c", "a", "g", "b"}
    assert all(finish.err_type == QueueFull.__name__ and finish.status_code == 503 for finish in refused.values())


def test_a_request_with_output_keeps_its_place_in_a_full_queue() -> None:
    rig = Rig(max_queued=1, max_running=1, preemption_threshold=0)
    rig.add("low", [0] * 5, max_new_tokens=20)
    for _ in range(5):
        rig.turn()
    rig.add("high", [1] * 5, priority=1, max_new_tokens=20)
    for _ in range(3):
        rig.turn()
    rig.add("higher", [2] * 5, priority=1)
    rig.run()
    assert isinstance(rig.heard["higher"].finish, AbortFinish)
    assert rig.heard["low"].ids == expected_output([0] * 5, 1, 20, 97)


@pytest.mark.parametrize("seed", range(25))
def test_tokens_do_not_depend_on_priorities(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rig = Rig(
        pool_size=int(rng.choice([96, 128, 512])),
        page_size=int(rng.choice([1, 16])),
        max_running=int(rng.integers(1, 6)),
        max_prefill_tokens=int(rng.choice([16, 64])),
        policy=str(rng.choice(list(POLICIES))),
        preemption_threshold=int(rng.choice([0, 2])),
        watermark=float(rng.choice([0.0, 0.1])),
        conservativeness=float(rng.choice([0.01, 1.0])),
        radix=bool(rng.random() < 0.7),
        mixed=bool(rng.random() < 0.5),
        overlap=bool(rng.random() < 0.5),
        max_drafts=int(rng.choice([0, 3])),
    )
    requests = {}
    for index in range(24):
        prompt = [index % 3] * int(rng.integers(1, 40)) + rng.integers(0, 9, 3).tolist()
        requests[f"r{index}"] = prompt, int(rng.integers(1, 40))
        rig.add(f"r{index}", prompt, priority=int(rng.integers(-3, 4)), max_new_tokens=requests[f"r{index}"][1])
        for _ in range(int(rng.integers(0, 4))):
            rig.turn()
    rig.run(max_turns=3000)
    for rid, (prompt, max_new_tokens) in requests.items():
        assert rig.heard[rid].ids == expected_output(prompt, 1, max_new_tokens, 97)
