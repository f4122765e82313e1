"""The view of the engine for people: its steps, its requests, its hottest prefixes."""

from __future__ import annotations

import itertools

import pytest
from scheduler_rig import Rig

from tercet.managers import engine_view
from tercet.srt.io_struct import EngineView, ViewReply, ViewReq


def view(rig: Rig, after_step: int = 0) -> EngineView:
    rig.inbox.messages.append(ViewReq(7, after_step))
    rig.turn()
    (reply,) = [message for message in rig.tokenizer.messages if isinstance(message, ViewReply)]
    rig.tokenizer.messages.clear()
    assert reply.call_id == 7
    return reply.view


def test_an_idle_engine() -> None:
    rig = Rig()
    empty = view(rig)
    assert (empty.steps, empty.requests, empty.prefixes) == ([], [], [])
    assert empty.state.max_total_num_tokens == 512


@pytest.mark.parametrize("overlap", [False, True])
def test_the_steps_of_a_request(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.add("a", list(range(20)), max_new_tokens=4)
    rig.run()
    steps = view(rig).steps
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [(step.prompt_tokens, step.decodes) for step in steps] == [(20, 0), (0, 1), (0, 1), (0, 1)]
    for earlier, later in itertools.pairwise(steps):
        assert earlier.duration_s >= 0 and later.start_s >= earlier.start_s + earlier.duration_s
    assert [step.number for step in view(rig, after_step=2).steps] == [3, 4]


def test_a_step_that_only_copies_kv_has_no_tokens() -> None:
    rig = Rig(host_blocks=8, block_pages=8, overlap=False)
    rig.add("a", list(range(20)), max_new_tokens=2)
    rig.run()
    while rig.kv.has_copies:
        rig.turn()
    assert [(step.prompt_tokens, step.decodes) for step in view(rig).steps] == [(20, 0), (0, 1), (0, 0)]


def test_a_client_that_knows_steps_of_an_engine_before_a_restart_gets_all() -> None:
    rig = Rig()
    rig.add("a", list(range(20)), max_new_tokens=3)
    rig.run()
    assert [step.number for step in view(rig, after_step=3).steps] == []
    assert [step.number for step in view(rig, after_step=4).steps] == [1, 2, 3]


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_first_tokens_and_accepted_drafts_are_generated_tokens(max_drafts: int) -> None:
    rig = Rig(overlap=False, max_drafts=max_drafts)
    assert view(rig).generated_tokens == 0
    rig.add("a", list(range(20)), max_new_tokens=40)
    rig.run()
    seen = view(rig)
    assert seen.generated_tokens == 40, "drafts beyond the maximum length may be right, too"
    assert (len(seen.steps) < 40) is (max_drafts > 0)


def test_the_requests_with_their_stages() -> None:
    rig = Rig(max_running=2, chunked_prefill_size=16, max_prefill_tokens=16)
    rig.add("short", list(range(8)), max_new_tokens=50)
    for _ in range(4):
        rig.turn()
    rig.add("long", list(range(100, 164)), max_new_tokens=4)
    rig.add("late", list(range(200, 208)), max_new_tokens=4)
    rig.turn()
    seen = {request.rid: request for request in view(rig).requests}
    assert {rid: request.stage for rid, request in seen.items()} == {
        "short": "decoding",
        "long": "extending",
        "late": "waiting",
    }
    assert seen["short"].prompt_tokens == 8 and seen["short"].output_tokens >= 2
    assert 0 < seen["long"].computed_tokens < 64 and seen["late"].computed_tokens == 0


def test_the_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_view, "MAX_REQUESTS", 3)
    rig = Rig()
    for number in range(9):
        rig.add(f"{number}", [number + 1] * 8, max_new_tokens=200)
    for _ in range(300):
        rig.turn()
    crowded = view(rig)
    assert len(crowded.requests) == 3 and len(crowded.steps) == engine_view.MAX_STEPS


def test_a_shared_prefix_is_hot() -> None:
    rig = Rig()
    for number in range(4):
        rig.add(f"{number}", [*range(40), 50 + number])
        rig.run()
    hottest = view(rig).prefixes[0]
    assert hottest.num_tokens == 40 and hottest.num_uses >= 4
    assert hottest.token_ids == list(range(40))
