"""The scheduler on the fake runner: outputs never depend on the schedule, every slot is accounted for every turn."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers.schedule_policy import POLICIES
from tercet.srt.errors import PromptTooLong
from tercet.srt.io_struct import (
    AbortFinish,
    BrokenMessage,
    FlushCacheReq,
    Heartbeat,
    LengthFinish,
    StateReq,
    StopFinish,
)

SCHEDULES = int(os.environ.get("TERCET_SCHEDULES", "50"))
"""Random schedules that a property is tried on; set TERCET_SCHEDULES=500 for the long run."""
ORDINARY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=SCHEDULES)

rigs = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 1, 4, 16]),
        "pool_size": st.sampled_from([64, 96, 160, 512]),
        "max_running": st.integers(1, 10),
        "max_prefill_tokens": st.sampled_from([16, 24, 64, 256]),
        "chunked_prefill_size": st.sampled_from([16, 20, 64]),
        "radix": st.booleans(),
        "policy": st.sampled_from(sorted(POLICIES)),
        "mixed": st.booleans(),
        "eviction": st.sampled_from(["value", "lru", "lfu", "fifo", "mru", "filo"]),
        "stream_interval": st.sampled_from([1, 1, 3]),
        "max_drafts": st.sampled_from([0, 0, 1, 5]),
    }
)


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple]:
    """Requests from a few prompt families (shared prefixes), with times of arrival and of abort in turns."""
    families = [draw(st.lists(st.integers(0, 3), min_size=4, max_size=60)) for _ in range(draw(st.integers(1, 3)))]
    work = []
    for index in range(draw(st.integers(1, 24))):
        family = draw(st.sampled_from(families))
        prompt = family[: draw(st.integers(1, len(family)))] + draw(st.lists(st.integers(0, 5), max_size=20))
        sampling = {
            "max_new_tokens": draw(st.integers(0, 64 - 1)),
            "ignore_eos": draw(st.booleans()),
            "sampling_seed": draw(st.integers(0, 3)),
        }
        if draw(st.integers(0, 5)) == 0:
            sampling["stop"] = f"{draw(st.integers(0, 9))}"
        abort_at = draw(st.one_of(st.none(), st.none(), st.integers(0, 60)))
        work.append((f"r{index}", prompt, sampling, draw(st.integers(0, 40)), abort_at))
    return work


def play(rig: Rig, work: list[tuple], eos_ids: frozenset[int]) -> None:
    """Runs a workload and checks every request against the fake model's own words."""
    turn = 0
    todo = list(work)
    aborts = [(at, rid) for rid, _, _, _, at in work if at is not None]
    while todo or rig.is_busy:
        for item in [item for item in todo if item[3] <= turn]:
            rig.add(item[0], item[1], **item[2])
            todo.remove(item)
        for at, rid in aborts:
            if at == turn:
                rig.abort(rid)
        rig.turn()
        turn += 1
        assert turn < 5_000, "hung"
    limit = min(256, rig.kv.allocator.size)
    for rid, prompt, sampling, _, abort_at in work:
        heard = rig.heard[rid]
        if len(prompt) + sampling["max_new_tokens"] > limit:
            assert isinstance(heard.finish, AbortFinish)
            assert heard.finish.err_type == PromptTooLong.__name__
            continue
        stops = frozenset() if sampling["ignore_eos"] else eos_ids
        if "stop" in sampling:
            stops |= {int(sampling["stop"])}
        expected = expected_output(prompt, sampling["sampling_seed"], sampling["max_new_tokens"], 97, stops)
        if isinstance(heard.finish, AbortFinish):
            assert abort_at is not None, heard.finish
            assert heard.ids == expected[: len(heard.ids)]
        else:
            assert heard.ids == expected
            assert heard.finish is not None
            if expected and expected[-1] in stops:
                assert isinstance(heard.finish, StopFinish)
            else:
                assert heard.finish == LengthFinish(len(expected))
    rig.kv.audit([])
    assert rig.scheduler.state().num_kv_repairs == 0


@ORDINARY
@given(rigs, workloads(), st.booleans())
def test_outputs_do_not_depend_on_the_schedule(options: dict, work: list, overlap: bool) -> None:
    eos_ids = frozenset({7, 11})
    play(Rig(overlap=overlap, eos_ids=eos_ids, **options), work, eos_ids)


def test_a_request_that_the_pool_can_never_hold_is_refused() -> None:
    """Not even with all others ended: it would be retracted for ever."""
    rig = Rig(pool_size=64, context_len=256)
    rig.add("fits", [5] * 40, max_new_tokens=24)
    rig.add("too long", [6] * 40, max_new_tokens=25)
    rig.run()
    assert rig.heard["fits"].finish == LengthFinish(24)
    finish = rig.heard["too long"].finish
    assert isinstance(finish, AbortFinish) and finish.err_type == PromptTooLong.__name__


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_of_0_tokens_caches_its_prompt_and_runs_no_decode_step(overlap: bool, page_size: int) -> None:
    rig = Rig(overlap=overlap, page_size=page_size, chunked_prefill_size=32)
    prompt = list(range(80))
    rig.add("warm", prompt, max_new_tokens=0)
    rig.run()
    last = rig.heard["warm"].last
    assert last is not None and last.token_ids == [] and last.finish == LengthFinish(0)
    assert (last.counts.prompt_tokens, last.counts.completion_tokens, last.counts.cached_tokens) == (80, 0, 0)
    assert rig.extend_sizes == [32, 32, 16] and len(rig.runner.steps) == 3
    rig.add("again", prompt, max_new_tokens=4)
    rig.run()
    last = rig.heard["again"].last
    assert last is not None and last.counts.cached_tokens == (79 if page_size == 1 else 64)
    assert rig.heard["again"].ids == expected_output(prompt, 1, 4, 97)


@ORDINARY
@given(rigs, workloads())
def test_normal_and_overlap_loop_stream_the_same_tokens(options: dict, work: list) -> None:
    work = [(*item[:4], None) for item in work]
    heard = []
    for overlap in (False, True):
        rig = Rig(overlap=overlap, eos_ids=frozenset({7, 11}), **options)
        play(rig, work, rig.eos_ids)
        heard.append({rid: (h.ids, h.finish) for rid, h in rig.heard.items()})
    assert heard[0] == heard[1]


def test_thousands_of_requests() -> None:
    rig = Rig(pool_size=4096, max_running=64, max_prefill_tokens=1024, chunked_prefill_size=256, audit=False)
    prompts = [[i % 7, i % 5, i % 3] * (1 + i % 20) for i in range(3000)]
    for index, prompt in enumerate(prompts):
        rig.add(f"r{index}", prompt, max_new_tokens=1 + index % 17)
    rig.run()
    assert len(rig.heard) == 3000
    for index in range(0, 3000, 50):
        assert rig.heard[f"r{index}"].ids == expected_output(prompts[index], 1, 1 + index % 17, 97)
    rig.kv.audit([])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_repeated_prompt_is_cached_but_for_its_last_token(page_size: int) -> None:
    rig = Rig(page_size=page_size, pool_size=1024)
    prompt = [i % 50 for i in range(200)]
    rig.add("first", prompt)
    rig.run()
    rig.add("again", prompt)
    rig.run()
    assert rig.heard["first"].last.counts.cached_tokens == 0
    assert rig.heard["again"].last.counts.cached_tokens == 199 // page_size * page_size


def test_retraction_keeps_the_output_and_is_reported() -> None:
    rig = Rig(pool_size=96, max_running=8)
    for index in range(6):
        rig.add(f"r{index}", [index] * 10, max_new_tokens=40)
    rig.run()
    for index in range(6):
        assert rig.heard[f"r{index}"].ids == expected_output([index] * 10, 1, 40, 97)
    assert rig.scheduler.state().num_retractions > 0
    assert any(heard.last.counts.num_retractions for heard in rig.heard.values())


def test_short_prompts_pass_beside_a_long_one() -> None:
    rig = Rig(pool_size=8192, context_len=4096, max_prefill_tokens=64, chunked_prefill_size=64)
    rig.add("long", [1] * 2000, max_new_tokens=1)
    rig.add("short", [2] * 20, max_new_tokens=1)
    rig.run()
    order = list(rig.heard)
    assert order == ["short", "long"]


def test_equal_prompts_that_arrive_together_share_their_prefill() -> None:
    rig = Rig(pool_size=4096, max_prefill_tokens=1024, chunked_prefill_size=1024)
    prompt = [i % 31 for i in range(100)]
    for index in range(4):
        rig.add(f"r{index}", prompt, sampling_seed=index)
    rig.run()
    assert sum(rig.extend_sizes) == 100 + 3
    assert [rig.heard[f"r{i}"].last.counts.cached_tokens for i in range(4)] == [0, 99, 99, 99]


def test_equal_prompts_do_not_wait_for_one_another_where_nothing_is_shared() -> None:
    rig = Rig(pool_size=4096, max_prefill_tokens=1024, chunked_prefill_size=1024, radix=False)
    for index in range(4):
        rig.add(f"r{index}", [i % 31 for i in range(100)])
    rig.run()
    assert rig.extend_sizes == [400]


def test_namespaces_share_nothing() -> None:
    rig = Rig()
    prompt = list(range(50))
    for salt in ("a", "b", "a"):
        rig.add(f"{salt}{len(rig.heard)}", prompt, salt=salt)
        rig.run()
    assert [heard.last.counts.cached_tokens for heard in rig.heard.values()] == [0, 0, 49]


def test_flush_refuses_while_busy_and_empties_when_idle() -> None:
    rig = Rig()
    rig.add("r", list(range(40)), max_new_tokens=5)
    rig.turn()
    rig.inbox.messages.append(FlushCacheReq(1))
    rig.run()
    rig.inbox.messages.append(FlushCacheReq(2))
    rig.inbox.messages.append(StateReq(3))
    rig.turn()
    replies = {message.call_id: message for message in rig.tokenizer.messages if hasattr(message, "call_id")}
    assert replies[1].num_busy == 1
    assert replies[2].num_busy == 0
    assert replies[3].state.num_free_tokens == replies[3].state.max_total_num_tokens


def test_a_heartbeat_tells_the_state() -> None:
    rig = Rig(chunked_prefill_size=16, max_prefill_tokens=16)
    rig.add("r", list(range(40)))
    rig.turn()
    (beat,) = (message for message in rig.tokenizer.messages if isinstance(message, Heartbeat))
    assert beat.state == rig.scheduler.state()
    assert (beat.state.num_running, beat.state.num_waiting) == (1, 0), "a prompt in chunks counts as running"


def test_a_heartbeat_leaves_every_half_second_of_the_scheduler_s_clock() -> None:
    rig = Rig()
    num_beats = []
    for pause_s in (0.0, 0.0, 0.4, 0.1, 0.4, 3.0):
        rig.clock.now += pause_s
        rig.turn()
        num_beats.append(sum(isinstance(message, Heartbeat) for message in rig.tokenizer.messages))
    assert num_beats == [1, 1, 1, 2, 2, 3]


def test_nothing_to_do_sleeps() -> None:
    rig = Rig()
    rig.turn()
    assert rig.inbox.num_sleeps == 1
    rig.add("r", [1, 2, 3])
    rig.run()
    slept = rig.inbox.num_sleeps
    assert slept <= 2, "a busy scheduler must not sleep"


def test_without_streaming_only_the_first_token_and_the_end_are_told() -> None:
    rig = Rig()
    rig.add("r", [1, 2, 3], stream=False, max_new_tokens=30)
    told = 0
    while rig.is_busy:
        before = rig.heard["r"].last
        rig.turn()
        told += rig.heard["r"].last is not before
    assert told == 2
    assert len(rig.heard["r"].ids) == 30


def test_an_abort_tells_what_was_not_told_yet() -> None:
    rig = Rig()
    rig.add("r", [1, 2, 3], stream=False, max_new_tokens=30)
    for _ in range(10):
        rig.turn()
    assert len(rig.heard["r"].ids) == 1
    rig.abort("r")
    rig.run(max_turns=4)
    heard = rig.heard["r"]
    assert isinstance(heard.finish, AbortFinish)
    assert heard.ids == expected_output([1, 2, 3], 1, 30, 97)[: len(heard.ids)]
    assert len(heard.ids) >= 8


def test_abort_all() -> None:
    rig = Rig(max_running=2)
    for index in range(5):
        rig.add(f"r{index}", [index] * 9, max_new_tokens=100)
    for _ in range(4):
        rig.turn()
    rig.abort(None)
    rig.run(max_turns=4)
    assert all(isinstance(heard.finish, AbortFinish) for heard in rig.heard.values())
    assert rig.scheduler.state().num_aborted == 5


class BrokenStopChecker:
    quiet = ()

    def push(self, token: int) -> str | None:
        raise ZeroDivisionError


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_checker_that_raises_ends_its_own_request_alone(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.add("bad", [1] * 10, stop="3", max_new_tokens=20)
    rig.add("good", [2] * 10, max_new_tokens=20)
    rig.turn()
    rig.turn()
    bad = rig.scheduler.queues.find("bad")
    assert bad is not None
    bad.stop_checker = BrokenStopChecker()
    rig.run()
    assert rig.heard["bad"].finish == AbortFinish(
        "the stop strings of this request could not be checked", 500, "TercetError"
    )
    assert rig.heard["good"].ids == expected_output([2] * 10, 1, 20, 97)


def test_a_request_that_cannot_be_made_ends_with_an_error_alone() -> None:
    rig = Rig()
    rig.add("before", [1] * 10)
    rig.add("bad", [2] * 10, stop="not a number, so the stop checker's constructor raises")
    rig.add("after", [3] * 10)
    rig.run()
    assert rig.heard["bad"].finish == AbortFinish("the scheduler could not create this request", 500, "TercetError")
    for rid, prompt in (("before", [1] * 10), ("after", [3] * 10)):
        assert rig.heard[rid].ids == expected_output(prompt, 1, 8, 97)


def test_a_broken_message_ends_the_requests_that_it_names_alone() -> None:
    rig = Rig()
    rig.add("runs", [1] * 10)
    rig.add("good", [2] * 10)
    rig.turn()
    rig.inbox.messages.append(BrokenMessage(["runs", "new"], "lost"))
    rig.add("after", [3] * 10)
    rig.run()
    for rid in ("runs", "new"):
        assert rig.heard[rid].finish == AbortFinish("lost", 500, "TercetError")
    for rid, prompt in (("good", [2] * 10), ("after", [3] * 10)):
        assert rig.heard[rid].ids == expected_output(prompt, 1, 8, 97)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_ends_once_and_for_the_first_reason(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.add("r", [1] * 10)
    rig.turn()
    rig.inbox.messages.append(BrokenMessage(["r"], "lost"))
    rig.abort("r")
    rig.run()
    assert rig.heard["r"].finish == AbortFinish("lost", 500, "TercetError")


class CountingRid(str):
    """A request's id that counts how often it is compared."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountingRid.num_compared += 1
        return str.__eq__(self, other)


def test_an_abort_looks_at_its_own_request_alone() -> None:
    rig = Rig(max_running=4)
    for index in range(4096):
        rig.add(CountingRid(f"r{index}"), [index % 90] * 9, max_new_tokens=100)
    rig.turn()
    CountingRid.num_compared = 0
    for index in range(4096):
        rig.abort(CountingRid(f"r{index}"))
        rig.abort(CountingRid(f"gone{index}"))
    rig.run(max_turns=4)
    assert rig.scheduler.state().num_aborted == 4096
    assert CountingRid.num_compared <= 3 * 4096
