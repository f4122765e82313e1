"""A pause of the scheduler on the fake runner: no step runs, and the tokens are those of an undisturbed run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers import pause
from tercet.srt.io_struct import FlushCacheReply, FlushCacheReq, LengthFinish
from tercet.srt.pause_messages import ContinueReq, PauseReply, PauseReq

MODULE = pause  # the module under test, inside a Scheduler


def start(rig: Rig, num: int = 3, length: int = 30, turns: int = 6) -> None:
    for index in range(num):
        rig.add(f"r{index}", [index] * 9, max_new_tokens=length)
    for _ in range(turns):
        rig.turn()


def tell(rig: Rig, message: object) -> list[object]:
    """The replies to a message, in the turn that handles it."""
    rig.tokenizer.messages.clear()
    rig.inbox.messages.append(message)
    rig.turn()
    return [one for one in rig.tokenizer.messages if isinstance(one, PauseReply | FlushCacheReply)]


def assert_undisturbed(rig: Rig, num: int = 3, length: int = 30) -> None:
    for index in range(num):
        assert rig.heard[f"r{index}"].ids == expected_output([index] * 9, 1, length, 97)
        assert rig.heard[f"r{index}"].finish == LengthFinish(length)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("retract", [False, True])
def test_no_step_runs_after_the_reply(overlap: bool, retract: bool) -> None:
    rig = Rig(overlap=overlap)
    start(rig)
    assert tell(rig, PauseReq(7, retract)) == [PauseReply(7)]
    assert rig.in_flight is None and rig.scheduler.state().is_paused
    num_steps, num_sleeps = len(rig.runner.steps), rig.inbox.num_sleeps
    rig.add("new", [50] * 9, max_new_tokens=4)
    for _ in range(10):
        rig.turn()
    assert len(rig.runner.steps) == num_steps
    assert rig.inbox.num_sleeps == num_sleeps + 10, "a paused loop must not spin"
    state = rig.scheduler.state()
    assert (state.num_running, state.num_waiting) == ((0, 4) if retract else (3, 1))
    assert tell(rig, ContinueReq(8)) == [PauseReply(8)]
    assert not rig.scheduler.state().is_paused
    rig.run()
    assert_undisturbed(rig)
    assert rig.heard["new"].ids == expected_output([50] * 9, 1, 4, 97)


def test_a_retracting_pause_lets_the_cache_be_flushed() -> None:
    rig = Rig()
    start(rig)
    tell(rig, PauseReq(1, False))
    assert tell(rig, FlushCacheReq(2)) == [FlushCacheReply(2, 3)]
    tell(rig, PauseReq(3, True))
    assert tell(rig, FlushCacheReq(4)) == [FlushCacheReply(4, 0)]
    assert rig.kv.allocator.num_free == rig.kv.allocator.size
    tell(rig, ContinueReq(5))
    rig.run()
    assert_undisturbed(rig)
    assert all(heard.last.counts.num_retractions == 1 for heard in rig.heard.values())


def test_a_prompt_in_chunks_survives_a_retracting_pause() -> None:
    rig = Rig(chunked_prefill_size=16, max_prefill_tokens=16)
    rig.add("long", list(range(90)), max_new_tokens=5)
    rig.turn()
    assert rig.scheduler.queues.unfinished
    tell(rig, PauseReq(1, True))
    assert not rig.scheduler.queues.unfinished
    tell(rig, FlushCacheReq(2))
    tell(rig, ContinueReq(3))
    rig.run()
    assert rig.heard["long"].ids == expected_output(list(range(90)), 1, 5, 97)


def test_aborts_are_handled_during_a_pause() -> None:
    rig = Rig()
    start(rig)
    tell(rig, PauseReq(1, False))
    rig.abort("r1")
    rig.turn()
    assert rig.heard["r1"].finish is not None
    tell(rig, ContinueReq(2))
    rig.run()
    assert rig.heard["r0"].ids == expected_output([0] * 9, 1, 30, 97)


def test_paused_time_is_no_waiting_and_no_running_time() -> None:
    rig = Rig(max_running=3, waiting_timeout=5.0, running_timeout=50.0)
    start(rig)
    rig.add("new", [50] * 9, max_new_tokens=4)
    tell(rig, PauseReq(1, True))
    rig.clock.now += 1e6
    rig.turn()
    tell(rig, ContinueReq(2))
    rig.run()
    assert_undisturbed(rig)
    assert rig.heard["new"].finish == LengthFinish(4)


def test_the_time_runs_again_after_a_pause() -> None:
    rig = Rig(max_running=1, waiting_timeout=5.0, running_timeout=20.0)
    start(rig, num=2, length=100)
    tell(rig, PauseReq(1, False))
    tell(rig, ContinueReq(2))
    for waits_s, ended in ((4.0, set()), (2.0, {"r1"}), (15.0, {"r0", "r1"})):
        rig.clock.now += waits_s
        for _ in range(3):
            rig.turn()
        assert {rid for rid, heard in rig.heard.items() if heard.finish is not None} == ended


@pytest.mark.parametrize("retract", [(True, False), (False, True)])
def test_of_two_pauses_in_one_turn_one_is_enough_to_retract(retract: tuple[bool, bool]) -> None:
    rig = Rig()
    start(rig)
    rig.inbox.messages.append(PauseReq(1, retract[0]))
    assert tell(rig, PauseReq(2, retract[1])) == [PauseReply(1), PauseReply(2)]
    assert tell(rig, FlushCacheReq(3)) == [FlushCacheReply(3, 0)]


def test_a_pause_does_not_lower_the_rate_of_the_queue() -> None:
    rig = Rig(max_running=2, max_queue_time_s=2.0)
    for index in range(20):
        rig.add(f"r{index}", [index] * 20, max_new_tokens=4)
    for _ in range(30):
        rig.clock.now += 0.01
        rig.turn()
    assert rig.scheduler.state().num_waiting > 0
    tell(rig, PauseReq(1, False))
    rig.clock.now += 50.0
    rig.add("in the pause", [50] * 9)
    rig.turn()
    tell(rig, ContinueReq(2))
    rig.turn()
    rig.add("after it", [51] * 9)
    rig.run()
    assert rig.heard["in the pause"].finish == rig.heard["after it"].finish == LengthFinish(8)


def test_a_pause_that_is_ended_at_once_has_both_replies() -> None:
    rig = Rig()
    start(rig)
    rig.inbox.messages.append(PauseReq(1, True))
    assert tell(rig, ContinueReq(2)) == [PauseReply(1), PauseReply(2)]
    rig.run()
    assert_undisturbed(rig)


EVENTS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["retract", "in_place", "continue", "flush", "abort"])), max_size=14
)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 25), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8),
    events=EVENTS,
    overlap=st.booleans(),
    mixed=st.booleans(),
    pool_size=st.sampled_from([64, 96, 512]),
    page_size=st.sampled_from([1, 4]),
    max_drafts=st.sampled_from([0, 3]),
)
@settings(max_examples=60, deadline=None)
def test_tokens_do_not_depend_on_pauses(
    prompts: list, events: list, overlap: bool, mixed: bool, pool_size: int, page_size: int, max_drafts: int
) -> None:
    rig = Rig(
        overlap=overlap,
        mixed=mixed,
        pool_size=pool_size,
        page_size=page_size,
        max_drafts=max_drafts,
        max_running=4,
        chunked_prefill_size=16,
        max_prefill_tokens=24,
    )
    for turn in range(45):
        for index, (at, prompt_len, length) in enumerate(prompts):
            if at == turn:
                rig.add(
                    f"r{index}",
                    [7] * (prompt_len // 2) + [index] * (prompt_len - prompt_len // 2),
                    max_new_tokens=length,
                )
        for at, event in events:
            if at == turn and event == "abort":
                rig.abort("r0")
            elif at == turn:
                message = {
                    "retract": PauseReq(turn, True),
                    "in_place": PauseReq(turn, False),
                    "continue": ContinueReq(turn),
                    "flush": FlushCacheReq(turn),
                }[event]
                rig.inbox.messages.append(message)
        rig.turn()
    rig.inbox.messages.append(ContinueReq(99))
    rig.run()
    replies = [one.call_id for one in rig.tokenizer.messages if isinstance(one, PauseReply)]
    assert len(replies) == 1 + sum(event in ("retract", "in_place", "continue") for _, event in events)
    for index, (_, prompt_len, length) in enumerate(prompts):
        ids = [7] * (prompt_len // 2) + [index] * (prompt_len - prompt_len // 2)
        heard = rig.heard[f"r{index}"]
        expected = expected_output(ids, 1, length, 97)
        if isinstance(heard.finish, LengthFinish):
            assert heard.ids == expected
        else:
            assert index == 0 and heard.ids == expected[: len(heard.ids)]
