"""What an idle engine does, one slice a turn, and that no request waits for the rest."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from random_steps.files import FakeStorage
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers.idle_audit import IdleAudit
from tercet.managers.idle_work import IdleWork
from tercet.managers.touch_ahead import TouchAhead
from tercet.mem_cache.block_events import BlockEvents
from tercet.mem_cache.block_keys import BlockKeys
from tercet.srt.kv_events import BlockStored
from tercet.srt.pause_messages import PauseReq

PROMPT = list(range(40))


class Pool:
    """Each slot is a slice of its own."""

    bytes_per_slot = 2 << 20

    def __init__(self) -> None:
        self.num_touched = 0

    def touch(self, start: int, end: int) -> None:
        assert end == start + 1
        self.num_touched += 1


def touching_rig() -> tuple[Rig, Pool]:
    rig, pool = Rig(audit=False), Pool()
    audit = IdleAudit(rig.kv, rig.clock)
    rig.scheduler._idle_work = IdleWork(audit, TouchAhead(rig.kv.allocator, pool, rig.clock))
    return rig, pool


def test_one_slice_a_turn_without_sleep_and_then_sleep() -> None:
    rig, pool = touching_rig()
    rig.turn()  # falls idle
    slept = rig.inbox.num_sleeps
    for touched in range(2, 129):
        rig.turn()
        assert pool.num_touched == touched
    assert rig.inbox.num_sleeps == slept
    rig.turn()
    assert rig.inbox.num_sleeps == slept + 1 and pool.num_touched == 128


def test_a_request_is_served_between_two_slices_and_the_rest_comes_after_it() -> None:
    rig, pool = touching_rig()
    for _ in range(5):
        rig.turn()
    rig.add("r", PROMPT)
    rig.run()
    assert pool.num_touched <= 6
    assert rig.heard["r"].ids == expected_output(PROMPT, 1, 8, 97)
    for _ in range(200):
        rig.turn()
    assert pool.num_touched == 5 + 128


def test_a_pause_with_requests_sleeps_although_work_is_due() -> None:
    rig, pool = touching_rig()
    rig.add("r", PROMPT, max_new_tokens=30)
    for _ in range(3):
        rig.turn()
    rig.inbox.messages.append(PauseReq(1, False))
    rig.turn()
    slept, touched = rig.inbox.num_sleeps, pool.num_touched
    for _ in range(10):
        rig.turn()
    assert rig.inbox.num_sleeps == slept + 10 and pool.num_touched == touched


def test_an_idle_engine_does_not_sleep_before_it_has_reported_all_files() -> None:
    rig = Rig(page_size=4, host_blocks=2, audit=False)
    storage = rig.kv.tiers._storage = FakeStorage(rig.runner.host.reshape(2, -1).view(np.uint8), seed="0")
    keys = BlockKeys(b"fake", "", 8)
    tokens = np.arange(40 * 8, dtype=np.int32)
    for index, key in enumerate(keys.cover(tokens)):
        storage.contents[key] = keys.content(tokens, index)
    events = BlockEvents(4)
    rig.kv.watch(events)
    rig.scheduler._kv_events = SimpleNamespace(flush=rig.kv.report_files)
    rig.turn()
    slept = rig.inbox.num_sleeps
    while rig.kv.tiers.has_file_changes:
        rig.turn()
    assert rig.inbox.num_sleeps == slept
    rig.turn()
    assert rig.inbox.num_sleeps == slept + 1
    assert sum(isinstance(event, BlockStored) for event in events.take()) == 40
