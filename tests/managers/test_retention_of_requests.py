"""Retention in the whole scheduler with the fake runner, on a clock that stands until a test moves it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from fakes import expected_output
from tercet.srt.io_struct import RetainReq, StopFinish, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

POOL = 120


def make(eviction: str = "value", **more: object) -> Rig:
    return Rig(pool_size=POOL, eviction=eviction, context_len=POOL, **more)  # type: ignore[arg-type]


def prompt(number: int, length: int = 20) -> list[int]:
    return [number, *range(length - 1)]


def cached_of(rig: Rig, rid: str) -> int:
    last = rig.heard[rid].last
    assert last is not None
    return last.counts.cached_tokens


def sweep(rig: Rig, count: int = 12) -> None:
    """One-shot prompts, which together are larger than the pool."""
    for number in range(count):
        rig.add(f"document {rig.clock()} {number}", prompt(50 + number % 40, 30), max_new_tokens=1)
        rig.run()
        rig.clock.now += 0.1


@pytest.mark.parametrize(("eviction", "seconds", "found"), [("value", 30.0, 27), ("value", None, 0), ("lru", None, 0)])
def test_a_retained_prefix_survives_a_sweep(eviction: str, seconds: float | None, found: int) -> None:
    rig = make(eviction)
    rig.add("turn 1", prompt(1), retention_seconds=seconds, max_new_tokens=8)
    rig.run()
    sweep(rig)
    rig.add("turn 2", [*prompt(1), *rig.heard["turn 1"].ids, 7])
    rig.run()
    assert cached_of(rig, "turn 2") == found


def test_a_retention_that_has_lapsed_protects_nothing() -> None:
    rig = make()
    rig.add("turn 1", prompt(1), retention_seconds=30.0)
    rig.run()
    rig.clock.now += 31.0
    sweep(rig)
    rig.add("turn 2", prompt(1))
    rig.run()
    assert cached_of(rig, "turn 2") == 0


def test_a_tool_call_retains_the_prefix_of_a_request_that_has_ended() -> None:
    rig = make()
    rig.add("turn 1", prompt(1), tenant="me", session_id="s")
    rig.run()
    options = RequestOptions(sampling=SamplingParams(), tenant="me", session_id="s")
    token_ids = pack_ids([*prompt(1), *rig.heard["turn 1"].ids])
    rig.inbox.messages.append(RetainReq("turn 1", token_ids, options, 30.0))
    rig.turn()
    sweep(rig)
    rig.add("turn 2", prompt(1), tenant="me", session_id="s")
    rig.run()
    assert cached_of(rig, "turn 2") == 19
    assert rig.kv.cache.retentions.num_live == 0, "the end of the session's next turn has ended it"


def test_namespaces_and_tenants_have_sessions_of_their_own() -> None:
    rig = make()
    for salt, tenant in (("", "a"), ("", "b"), ("salt", "a")):
        rig.add(f"{salt}{tenant}", prompt(1, 12), salt=salt, tenant=tenant, session_id="s", retention_seconds=30.0)
        rig.run()
    assert rig.kv.cache.retentions.num_live == 3
    rig.add("end", prompt(1, 12), tenant="b", session_id="s", retention_seconds=0.0)
    rig.run()
    assert rig.kv.cache.retentions.num_live == 2


def test_an_abort_retains_nothing() -> None:
    rig = make()
    rig.add("a", prompt(1), retention_seconds=30.0, max_new_tokens=50)
    for _ in range(4):
        rig.turn()
    rig.abort("a")
    rig.run()
    assert rig.kv.cache.retentions.num_live == 0


def test_what_is_retained_never_keeps_a_request_waiting() -> None:
    """The whole pool is retained, as far as it can be, and a request needs all of it."""
    rig = make()
    for number in range(12):
        rig.add(str(number), prompt(number, 12), tenant=str(number), retention_seconds=3600.0, max_new_tokens=2)
        rig.run()
    assert 0 < rig.scheduler.state().num_retained_tokens == rig.kv.cache.retentions.max_tokens
    rig.add("large", prompt(60, POOL - 20), max_new_tokens=19)
    num_turns = rig.run()
    assert isinstance(rig.heard["large"].finish, StopFinish) or len(rig.heard["large"].ids) == 19
    assert num_turns < 30 and rig.planner.num_retractions == 0


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(1, 40), st.sampled_from([None, 0.0, 5.0, 3600.0]), st.sampled_from(["", "s"])
        ),
        max_size=12,
    ),
    host_blocks=st.sampled_from([0, 80]),
)
def test_tokens_do_not_depend_on_retention(turns: list[tuple[int, int, float | None, str]], host_blocks: int) -> None:
    """Random requests, several at once, in a pool that is too small for all. Each turn audits the memory."""
    rig = make(host_blocks=host_blocks)
    for place, (number, length, seconds, session) in enumerate(turns):
        rig.add(
            str(place), prompt(number, length), retention_seconds=seconds, session_id=session, tenant=str(number % 2)
        )
        for _ in range(number):
            rig.turn()
        rig.clock.now += float(number)
    rig.run()
    for place, (number, length, _, _) in enumerate(turns):
        assert rig.heard[str(place)].ids == expected_output(prompt(number, length), 1, 8, 97)
    assert rig.kv.cache.retentions.num_tokens <= rig.kv.cache.retentions.max_tokens
