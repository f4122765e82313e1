"""--explain-schedule: each long wait is explained by the limit that caused it and by the requests before it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_makers import make_req
from patience import PATIENCE_S
from scheduler_rig import Rig

from tercet.managers import explained_planner, kv_tiers
from tercet.managers.explained_planner import Limit
from tercet.managers.req import Req
from tercet.managers.waiting_queue import WaitingQueue
from tercet.srt.io_struct import Resumed
from tercet.srt.pause_messages import ContinueReq, PauseReq

Lines = dict[str, dict[str, Any]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """The logged fields, by the sample that they are about, with the number of its retractions if there are any."""
    lines: Lines = {}

    def keep(logger: object, level: int, name: str, fields: dict[str, Any]) -> None:
        key = " ".join(filter(None, [fields["sample"], str(fields["num_retractions"] or "")]))
        assert name == "Waited" and key not in lines
        lines[key] = fields

    monkeypatch.setattr(explained_planner.log, "event", keep)
    yield lines


def run(rig: Rig, seconds: float = 1.0) -> None:
    while rig.is_busy:
        rig.turn()
        rig.clock.now += seconds


def only_limit(fields: dict[str, Any]) -> Limit:
    """The limit of nearly the whole wait."""
    name, seconds = max(fields["limits_s"].items(), key=lambda item: item[1])
    assert seconds >= 0.75 * fields["queue_s"], fields
    return Limit(name)


def make_rig(**settings: Any) -> Rig:
    return Rig(overlap=False, policy="fcfs", **{"explain_s": 3.0, **settings})


def test_a_wait_for_a_row(lines: Lines) -> None:
    rig = make_rig(max_running=1)
    rig.add("long", [1] * 5, max_new_tokens=20)
    rig.add("short", [2] * 5, max_new_tokens=1)
    run(rig)
    assert list(lines) == ["short"]
    fields = lines["short"]
    assert only_limit(fields) is Limit.RUNNING and fields["queue_s"] >= 20
    assert fields["most_tokens_before"] == ["long"] and fields["tokens_admitted_before"] == 5


def test_a_wait_for_memory(lines: Lines) -> None:
    rig = make_rig(pool_size=64, radix=False)
    rig.add("large", [1] * 30, max_new_tokens=30)
    rig.turn()
    rig.add("next", [2] * 30, max_new_tokens=4)
    run(rig)
    assert only_limit(lines["next"]) is Limit.MEMORY
    assert lines["next"]["num_admitted_before"] == 0, "large had started before"


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_wait_for_memory_is_one_that_an_admission_would_refuse(page_size: int, is_cached: bool) -> None:
    """An admission locks the cached prefix of a request, so this prefix is no room for the rest of the request."""
    seen = []
    for length in range(41, 90):
        rig = Rig(pool_size=120, page_size=page_size, overlap=False, chunked_prefill_size=8, explain_s=1e9)
        if is_cached:
            rig.add("seed", [5] * 40, max_new_tokens=1)
            rig.run()
        rig.add("decodes", [1] * 4, max_new_tokens=20)
        rig.turn()
        rig.add("in chunks", [2] * 30, max_new_tokens=1)
        rig.turn()
        rig.planner.ratio.value = 0.0
        assert len(rig.planner.queues.running) == len(rig.planner.queues.unfinished) == 1
        req = make_req([5] * length, 9, max_new_tokens=3)
        assert rig.kv.device_match_len(req) == 40 * is_cached
        seen.append(rig.planner._has_memory_for(req))
        adder = rig.planner._make_adder([], None)
        adder._chunk_size = adder._tokens_left = 1000
        assert seen[-1] == any(extend.req is req for extend in adder.fill([req]))
    assert set(seen) == {False, True}


def test_a_wait_for_the_prompts_of_others(lines: Lines) -> None:
    rig = make_rig(max_prefill_tokens=16, chunked_prefill_size=16, max_running=16)
    for index in range(10):
        rig.add(f"r{index}", [index] * 16, max_new_tokens=1)
    run(rig)
    assert only_limit(lines["r9"]) is Limit.STEP
    assert lines["r9"]["num_admitted_before"] == 9 and lines["r9"]["tokens_admitted_before"] == 9 * 16
    assert len(lines["r9"]["most_tokens_before"]) == explained_planner.MAX_NAMES


def test_a_wait_for_decode_steps(lines: Lines) -> None:
    """Three decode steps follow each step of prompts, while somebody decodes."""
    rig = make_rig(max_prefill_tokens=16, chunked_prefill_size=16, max_running=16, explain_s=1.0)
    rig.add("decoding", [1] * 8, max_new_tokens=60)
    rig.turn()
    for index in range(4):
        rig.add(f"r{index}", [index + 2] * 16, max_new_tokens=1)
    run(rig)
    waits = lines["r3"]["limits_s"]
    assert waits[Limit.DECODES.value] > 2 * waits[Limit.STEP.value] > 0
    assert lines["r3"]["most_kv_now"][0] == "decoding"


def test_each_wait_of_a_retracted_request_is_explained(lines: Lines) -> None:
    rig = make_rig(pool_size=24, max_running=4, conservativeness=0.01, explain_s=5.0)
    for name in "abc":
        rig.add(name, [ord(name), 2, 3], max_new_tokens=16)
    run(rig)
    retracted = {
        name: heard.last.counts.num_retractions
        for name, heard in rig.heard.items()
        if heard.last and heard.last.counts.num_retractions
    }
    assert retracted
    for name in retracted:
        fields = lines[f"{name} 1"]
        assert fields["queue_s"] >= 5.0 and only_limit(fields) is Limit.MEMORY
    assert not lines.keys() & retracted.keys(), "their first waits were short"


@pytest.mark.parametrize("seed", range(4))
def test_the_plans_are_the_same_and_each_second_is_explained(lines: Lines, seed: int) -> None:
    def steps(explain_s: float | None) -> list[Any]:
        draw = random.Random(seed)
        settings = {"pool_size": 160, "max_running": 4, "max_prefill_tokens": 32, "chunked_prefill_size": 16}
        rig = Rig(overlap=bool(seed % 2), explain_s=explain_s, **settings)
        for index in range(40):
            length = draw.randint(1, 60)
            rig.add(f"r{index}", [draw.randrange(97) for _ in range(length)], max_new_tokens=draw.randint(1, 30))
            if draw.random() < 0.1:
                rig.abort(f"r{draw.randrange(index + 1)}")
            for _ in range(draw.randrange(4)):
                rig.turn()
                rig.clock.now += 1.0
        run(rig)
        return [(step.seq_lens.tolist(), step.rows.tolist()) for step in rig.runner.steps]

    assert steps(None) == steps(0.0)
    assert len(lines) > 20
    for fields in lines.values():
        explained = sum(fields["limits_s"].values())
        assert fields["queue_s"] - 1.001 <= explained <= fields["queue_s"] + 0.001, fields


def test_a_request_may_be_preempted_and_start_again_in_one_plan(lines: Lines) -> None:
    """It makes room for a long request. But that one waits for the prefix of a short one, which starts before it."""
    rig = Rig(overlap=False, policy="shortest-prefill-first", pool_size=160, preemption_threshold=0, explain_s=0.0)
    rig.add("runs", [1] * 5, max_new_tokens=40)
    rig.turn()
    rig.add("long", list(range(90)) + [1] * 50, priority=1)
    rig.add("short", list(range(40)), priority=1)
    rig.turn()
    runs = rig.scheduler.queues.find("runs")
    assert runs.row and runs.num_retractions == 1
    run(rig)
    assert set(lines) == {"long", "short", "runs", f"runs {runs.num_retractions}"}


def test_a_retraction_in_an_engine_that_has_died_is_no_wait(lines: Lines) -> None:
    rig = make_rig(explain_s=3.0)
    rig.turn()
    rig.clock.now += 100.0
    rig.add("resumed", [1] * 5, resumed=Resumed([7], None, num_retractions=1), waited_s=None)
    run(rig)
    assert not lines


def test_a_request_that_ended_in_the_turn_of_its_arrival_is_forgotten(lines: Lines) -> None:
    rig = make_rig(explain_s=0.0)
    rig.inbox.messages.append(PauseReq(1, False))
    rig.turn()
    rig.add("leaves", [1] * 5)
    rig.abort("leaves")
    rig.turn()
    rig.inbox.messages.append(ContinueReq(2))
    rig.turn()
    assert set(lines) == {"leaves"}
    assert not rig.planner._arrivals and not rig.planner._new


def test_a_wait_for_a_grammar(lines: Lines) -> None:
    """Others pass the request meanwhile. Their waits are for their own reasons."""
    rig = make_rig(max_running=1)
    for name in ("constrained", "runs", "waits"):
        rig.add(name, [1] * 5, max_new_tokens=9)
        rig.scheduler._handle(rig.inbox.messages.pop())
    constrained = rig.scheduler.queues.find("constrained")
    constrained.awaits_grammar = True
    for _ in range(30):
        rig.turn()
        rig.clock.now += 1.0
    constrained.awaits_grammar = False
    run(rig)
    assert only_limit(lines["waits"]) is Limit.RUNNING
    assert lines["constrained"]["limits_s"][Limit.GRAMMAR.value] >= 10.0


def test_the_samples_that_a_line_names_are_those_with_the_most_tokens(lines: Lines) -> None:
    """Tokens that the cache has are not computed. The sample of the line itself is not among those beside it."""
    rig = make_rig(max_running=3, max_prefill_tokens=256, chunked_prefill_size=256)
    rig.add("seed", [9] * 90, max_new_tokens=1)
    rig.run()
    for name, length in (("first", 30), ("second", 60), ("third", 10)):
        rig.add(name, [ord(name[0]) % 90] * length, max_new_tokens=20 if name == "second" else 40)
    rig.turn()
    for name, prompt in (("cached", [9] * 90 + [1]), ("small", [2] * 20), ("large", [3] * 50)):
        rig.add(name, prompt, max_new_tokens=40 if name == "large" else 1)
    rig.add("last", [4] * 70, max_new_tokens=1)
    run(rig)
    fields = lines["last"]
    assert fields["most_tokens_before"] == ["large", "small", "cached"]
    assert fields["tokens_admitted_before"] == 50 + 20 + 1
    assert lines["large"]["most_kv_now"] == ["first", "third"]


def test_a_wait_is_long_from_the_given_length_on(lines: Lines) -> None:
    rig = make_rig(max_running=1, explain_s=5.0)
    rig.add("runs", [1] * 5, max_new_tokens=60)
    rig.turn()
    for name in ("short", "long"):
        rig.add(name, [2] * 5)
    rig.turn()
    for name, seconds in (("short", 4.999), ("long", 0.001)):
        rig.clock.now += seconds
        rig.abort(name)
        rig.turn()
    assert set(lines) == {"long"}


def test_in_a_pause_new_requests_need_places_in_the_queue() -> None:
    rig = make_rig(max_queued=2)
    rig.inbox.messages.append(PauseReq(1, False))
    rig.turn()
    assert rig.planner.queues.num_startable == 0


def test_a_wait_for_a_pause(lines: Lines) -> None:
    rig = make_rig()
    rig.inbox.messages.append(PauseReq(1, False))
    rig.turn()
    rig.clock.now += 30.0
    rig.add("new", [1] * 5)
    rig.turn()
    rig.clock.now += 40.0
    rig.inbox.messages.append(ContinueReq(2))
    run(rig)
    assert lines["new"]["limits_s"] == {"pause": 40.0} and lines["new"]["queue_s"] == 40.0


def test_a_wait_for_files(lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tiers, "CLOSE_TIMEOUT_S", PATIENCE_S)
    first = make_rig(page_size=4, host_blocks=64, storage=tmp_path)
    first.add("a", list(range(41)))
    first.run()
    first.scheduler.run(lambda: True)  # writes its files
    rig = make_rig(page_size=4, host_blocks=64, storage=tmp_path, explain_s=1.0)
    monkeypatch.setattr(rig.kv.tiers._storage, "read", lambda job: None)  # a disk that never answers
    rig.add("b", list(range(41)))
    run(rig, seconds=0.5)
    assert only_limit(lines["b"]) is Limit.FILES


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_request_that_never_starts_is_explained_at_its_end(lines: Lines, is_paused: bool) -> None:
    rig = make_rig(max_running=1)
    rig.add("long", [1] * 5, max_new_tokens=90)
    rig.turn()
    rig.add("late", [2] * 5, waiting_timeout=20.0)
    rig.add("leaves", [3] * 5)
    for _ in range(30):
        rig.turn()
        rig.clock.now += 1.0
    if is_paused:
        rig.inbox.messages.append(PauseReq(1, False))
        rig.turn()
        rig.add("in the pause", [4] * 5)
        rig.turn()
        rig.clock.now += 10.0
        rig.abort("in the pause")
    rig.abort("leaves")
    rig.turn()
    fields = lines["late"]
    assert 20 <= fields["queue_s"] <= 21 and only_limit(fields) is Limit.RUNNING
    assert fields["ended"] == rig.heard["late"].finish.message
    assert lines["leaves"]["ended"] and lines["leaves"]["queue_s"] >= 29
    if is_paused:
        assert lines["in the pause"]["limits_s"] == {"pause": 10.0}
    rig.inbox.messages.append(ContinueReq(2))
    rig.add("starts", [5] * 5)
    run(rig)
    assert lines["starts"]["ended"] is None


def test_waiting_requests_cost_nothing_until_they_start(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a turn without an arrival or an end, at most the first request of the queue is looked at."""
    num_read = 0

    def counted(queue: WaitingQueue) -> Iterator[Req]:
        nonlocal num_read
        for level in queue.levels():
            for req in level.reqs:
                num_read += 1
                yield req

    rig = make_rig(max_running=1, max_itl_s=1.0)
    rig.add("long", [1] * 5, max_new_tokens=60)
    rig.turn()
    for index in range(200):
        rig.add(f"r{index}", [2] * 5, max_new_tokens=1)
    rig.turn()
    monkeypatch.setattr(WaitingQueue, "__iter__", counted)
    for _ in range(20):
        rig.turn()
        assert not rig.planner._has_interrupted()
    assert len(rig.planner.queues.waiting) == 200
    assert num_read <= 20
