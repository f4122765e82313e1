"""The audit of an idle engine finds mistakes in the KV books, and delays no request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scheduler_rig import Rig
from tier_asks import settle_copies

from fakes import expected_output
from tercet.managers.idle_audit import QUIET_S
from tercet.managers.weight_updates import LoadedWeights
from tercet.mem_cache import allocator as allocator_module
from tercet.mem_cache import radix_audit
from tercet.srt.io_struct import FlushCacheReq, RetainReq, StateReq, pack_ids
from tercet.srt.pause_messages import PauseReq
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.weight_messages import UpdateWeightsReq, WeightFacts

PROMPT = list(range(40))


class Slices:
    """Counts the slices of every audit of a rig."""

    def __init__(self, rig: Rig) -> None:
        self.num_begun = 0
        self.num_ended = 0
        self.num_slices = 0
        self._audit_slices = rig.kv.audit_slices
        rig.kv.audit_slices = self._counted

    def _counted(self, reqs: list) -> Iterator[None]:
        self.num_begun += 1
        for _ in self._audit_slices(reqs):
            self.num_slices += 1
            yield
        self.num_ended += 1


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit of a small pool has many slices."""
    monkeypatch.setattr(radix_audit, "_SLICE_WORK", 8)
    monkeypatch.setattr(allocator_module, "_MAX_SLICE_UNITS", 8)


def idle_rig(**options: object) -> tuple[Rig, Slices]:
    """A rig that has served a request and has just fallen idle."""
    rig = Rig(audit=False, **options)
    rig.add("first", PROMPT)
    slices = Slices(rig)
    rig.run()
    return rig, slices


def pass_quiet(rig: Rig, max_turns: int = 10_000) -> None:
    """Lets the quiet pass, and the audit run to its end."""
    rig.clock.now += QUIET_S
    slept = rig.inbox.num_sleeps
    for _ in range(max_turns):
        rig.turn()
        if rig.inbox.num_sleeps > slept + 1:  # asleep when the quiet ended, and asleep again when all was done
            return
    raise AssertionError("the audit does not end")


def lose_a_slot(rig: Rig) -> None:
    rig.kv.allocator.alloc_extend(*np.array([[0], [3], [0]], dtype=np.int32))


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_new_tokens", [1, 8])  # without overlap, a request of one token takes one turn
def test_a_request_that_arrives_when_the_engine_falls_idle_meets_no_audit(overlap: bool, max_new_tokens: int) -> None:
    rig, slices = idle_rig(overlap=overlap)
    for index in range(5):
        rig.clock.now += QUIET_S * 0.9
        rig.add(f"r{index}", PROMPT, max_new_tokens=max_new_tokens)
        rig.run()
        rig.turn()
    assert slices.num_begun == 0
    pass_quiet(rig)
    assert slices.num_ended == slices.num_begun == 1


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_new_tokens", [1, 8])
def test_a_request_ends_an_audit_that_has_begun(overlap: bool, max_new_tokens: int) -> None:
    rig, slices = idle_rig(overlap=overlap)
    rig.turn()
    rig.clock.now += QUIET_S
    for _ in range(4):
        rig.turn()
    assert slices.num_slices == 3
    rig.add("next", PROMPT, max_new_tokens=max_new_tokens)
    rig.run()
    assert slices.num_slices == 3, "a slice came before the request, or beside it"
    assert rig.heard["next"].ids == expected_output(PROMPT, 1, max_new_tokens, 97)
    pass_quiet(rig)
    assert (slices.num_begun, slices.num_ended) == (2, 1)
    assert rig.scheduler.state().num_kv_repairs == 0


@pytest.mark.usefixtures("short_slices")
def test_an_audit_does_one_slice_a_turn_without_sleep_and_then_sleeps() -> None:
    rig, slices = idle_rig()
    rig.turn()
    rig.clock.now += QUIET_S
    rig.turn()
    slept = rig.inbox.num_sleeps
    num_turns = 0
    while slices.num_ended == 0:
        before = slices.num_slices
        rig.turn()
        num_turns += 1
        assert slices.num_slices <= before + 1
    assert rig.inbox.num_sleeps == slept and num_turns == slices.num_slices + 1 > 50
    for _ in range(10):
        rig.clock.now += QUIET_S
        rig.turn()
    assert rig.inbox.num_sleeps == slept + 10
    assert slices.num_begun == 1, "one audit for each time the engine falls idle"


@pytest.mark.usefixtures("short_slices")
def test_a_question_about_the_state_does_not_end_the_audit() -> None:
    rig, slices = idle_rig()
    rig.turn()
    rig.clock.now += QUIET_S
    while slices.num_ended == 0:
        rig.inbox.messages.append(StateReq(1))
        rig.turn()
    assert slices.num_begun == 1


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize(
    "messages", [[FlushCacheReq(1)], [PauseReq(1, retract=False), UpdateWeightsReq(2, "/w", "auto", "2")]], ids=len
)
def test_a_flush_ends_the_audit(messages: list[Any]) -> None:
    """Other weights flush the cache, too."""
    rig, slices = idle_rig(load_weights=lambda message: LoadedWeights(b"2", WeightFacts("bfloat16", 7)))
    rig.turn()
    rig.clock.now += QUIET_S
    for _ in range(4):
        rig.turn()
    for message in messages:
        rig.inbox.messages.append(message)
        rig.turn()
    pass_quiet(rig)
    assert (slices.num_begun, slices.num_ended) == (2, 1)
    assert rig.scheduler.state().num_kv_repairs == 0
    assert rig.scheduler.state().num_free_tokens == rig.kv.allocator.size


def test_a_lost_slot_is_found_by_the_sums_repaired_and_counted() -> None:
    rig = Rig(audit=False)
    slices = Slices(rig)
    rig.add("r", PROMPT)
    rig.turn()
    lose_a_slot(rig)
    rig.run()
    assert rig.scheduler.state().num_kv_repairs == 1
    assert slices.num_begun == 0
    rig.add("next", PROMPT)
    rig.run()
    assert rig.heard["next"].ids == expected_output(PROMPT, 1, 8, 97)
    assert rig.scheduler.state().num_kv_repairs == 1


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_mistake_that_the_sums_hide_is_found_after_the_quiet(page_size: int) -> None:
    rig, slices = idle_rig(page_size=page_size)
    lose_a_slot(rig)
    rig.kv.allocator.free(np.array([page_size * 5], dtype=np.int32))  # a page that is not the lost one
    rig.turn()
    assert rig.scheduler.state().num_kv_repairs == 0
    pass_quiet(rig)
    assert rig.scheduler.state().num_kv_repairs == 1
    assert rig.scheduler.state().num_free_tokens == rig.kv.allocator.size
    rig.add("next", PROMPT)
    rig.run()
    assert rig.heard["next"].ids == expected_output(PROMPT, 1, 8, 97)
    pass_quiet(rig)
    assert rig.scheduler.state().num_kv_repairs == 1
    assert (slices.num_begun, slices.num_ended) == (2, 1)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_slice_looks_at_a_bounded_part_of_a_large_pool(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_audit, "_SLICE_WORK", 4096)
    monkeypatch.setattr(allocator_module, "_MAX_SLICE_UNITS", 4096)
    rig = Rig(pool_size=1 << 20, page_size=page_size)
    cache, allocator = rig.kv.cache, rig.kv.allocator
    rng = np.random.default_rng(0)
    none = np.zeros(1, dtype=np.int32)
    lens = [*[200_000] * 2, *[page_size * 3] * 2000]
    for length in lens:
        length -= length % page_size
        slots = allocator.alloc_extend(none, np.array([length], dtype=np.int32), none)
        # A few beginnings that many share: nodes with many children, too.
        tokens = np.concatenate(([length % 7] * page_size, rng.integers(0, 1000, length - page_size)))
        duplicate_len = cache.insert(tokens.astype(np.int32), slots, namespace=str(length % 3)).duplicate_len
        allocator.free(slots[:duplicate_len])
    looked = []
    for slots in cache.audit_slices():
        looked.append(len(slots))
    assert max(looked) <= 2 * 4096
    num_nodes_a_slice = 4096 // radix_audit._NODE_WORK
    assert len(looked) >= (cache.num_nodes + 1) / num_nodes_a_slice
    num_slices = sum(1 for _ in rig.kv.audit_slices([]))
    assert num_slices >= len(looked) + allocator.num_free / page_size // 4096


@pytest.mark.usefixtures("short_slices")
def test_a_retention_in_the_middle_of_an_audit_is_no_error() -> None:
    rig, slices = idle_rig(eviction="value")
    rig.clock.now += QUIET_S
    while not slices.num_slices:
        rig.turn()
    message = RetainReq("first", pack_ids(PROMPT[:20]), RequestOptions(sampling=SamplingParams()), 60.0)
    rig.inbox.messages.append(message)
    for _ in range(100):
        rig.turn()
    assert rig.kv.cache.retained_size == 20
    assert rig.scheduler.state().num_kv_repairs == 0
    pass_quiet(rig)
    assert slices.num_ended == 1


@pytest.mark.parametrize("has_pin", [True, False])
def test_a_lost_host_block_is_repaired_once(tmp_path: Path, has_pin: bool) -> None:
    """Without a repair every audit would fail, and empty the cache. `has_pin`: of no owner."""
    rig, _ = idle_rig(page_size=4, host_blocks=64, storage=tmp_path)
    settle_copies(rig)
    blocks = rig.kv.tiers.blocks
    taken = blocks.take() if has_pin else blocks._free.pop()
    pass_quiet(rig)
    assert rig.scheduler.state().num_kv_repairs == 1
    assert not blocks.is_pinned(taken) and blocks.num_free == blocks.num_blocks
    rig.add("next", PROMPT)
    rig.run()
    settle_copies(rig)
    pass_quiet(rig)
    assert rig.scheduler.state().num_kv_repairs == 1
