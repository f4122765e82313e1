"""Random schedules with many features at once: pauses, tiers, time limits, priorities, tenants, KV events."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest
from hash_grammar import HashGrammars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_event_reader import KVEventReader
from patience import PATIENCE_S
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers import kv_tiers
from tercet.managers.fair_policy import OUTPUT_TOKEN_COST, FairPolicy
from tercet.managers.queue_limits import DrainRate
from tercet.managers.schedule_policy import POLICIES
from tercet.managers.tenant_shares import TenantShares
from tercet.mem_cache.block_events import BlockEvents
from tercet.srt.errors import PromptTooLong, QueueFull, WaitingTimeout
from tercet.srt.io_struct import AbortFinish, FlushCacheReq, LengthFinish
from tercet.srt.kv_events import EventBatch
from tercet.srt.pause_messages import ContinueReq, PauseReq

SCHEDULES = int(os.environ.get("TERCET_SCHEDULES", "40"))
POISON = 96
"""A token whose KV is NaN."""

rigs = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4, 16]),
        "pool_size": st.sampled_from([64, 96, 160, 512]),
        "max_running": st.integers(1, 8),
        "max_prefill_tokens": st.sampled_from([16, 24, 64, 256]),
        "chunked_prefill_size": st.sampled_from([16, 20, 64]),
        "policy": st.sampled_from(["dlpm", "dlpm", *sorted(POLICIES)]),
        "tenant_weights": st.sampled_from([None, {"a": 3.0, "b": 0.5}]),
        "mixed": st.booleans(),
        "overlap": st.booleans(),
        "eviction": st.sampled_from(["value", "lru", "lfu", "mru"]),
        "max_drafts": st.sampled_from([0, 0, 3]),
        "watermark": st.sampled_from([0.0, 0.1]),
        "preemption_threshold": st.sampled_from([None, 0, 1]),
        "max_itl_s": st.sampled_from([None, 0.01]),
        "max_queued": st.sampled_from([4, 10_000]),
        "max_queue_time_s": st.sampled_from([None, 0.2, 5.0]),
        "waiting_timeout": st.sampled_from([None, 0.5]),
        "running_timeout": st.sampled_from([None, 0.5]),
        "explain_s": st.sampled_from([None, 0.0]),
        "block_pages": st.integers(1, 3),
    }
)
"""With host memory there is a prefix cache. Without both, see `test_scheduler.py`."""

tiers = st.sampled_from([(0, False), (2, False), (5, True), (40, False), (40, True)])
"""Blocks of host memory, and whether there are files."""

requests = st.fixed_dictionaries(
    {
        "turn": st.integers(0, 40),
        "family": st.integers(0, 2),
        "length": st.integers(1, 60),
        "tail": st.lists(st.integers(0, 5), max_size=20),
        "max_new_tokens": st.integers(0, 40),
        "priority": st.integers(0, 3),
        "tenant": st.sampled_from("abc"),
        "salt": st.sampled_from(["", "", "x"]),
    }
)

events = st.tuples(
    st.integers(0, 60),
    st.sampled_from(["pause", "retract", "continue", "continue", "flush", "abort", "abort all", "late"]),
    st.integers(0, 15),
)


def prompt_of(request: dict) -> list[int]:
    shared = [(request["family"] + 1) * index % 7 for index in range(60)]
    return [*shared[: request["length"]], *request["tail"]]


class Listener:
    """A reader of the cache's KV events."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._blocks = rig.kv.cache.listener = BlockEvents(rig.kv.page_size)
        self._reader = KVEventReader()

    def check(self) -> None:
        """The reader knows as many tokens as the tree has."""
        found = self._blocks.take()
        if found:
            self._reader.apply(msgspec.msgpack.encode(EventBatch(0.0, found)))
        num_listed = len(self._reader.prefixes) * self._rig.kv.page_size
        kv = self._rig.kv
        assert num_listed <= kv.cache.evictable_size + kv.cache.protected_size
        if not self._rig.scheduler.queues.holders():  # no discarded node is locked
            assert num_listed == kv.cache.evictable_size


def act(rig: Rig, event: str, number: int) -> None:
    if event == "abort":
        rig.abort(f"r{number}")
    elif event == "abort all":
        rig.abort(None)
    elif event == "late":
        rig.clock.now += 0.7
    else:
        message = {
            "pause": PauseReq(number, False),
            "retract": PauseReq(number, True),
            "continue": ContinueReq(number),
            "flush": FlushCacheReq(number),
        }[event]
        rig.inbox.messages.append(message)


def check_ends(rig: Rig, work: list[dict], happened: set[str]) -> None:
    for index, request in enumerate(work):
        prompt = prompt_of(request)
        heard = rig.heard[f"r{index}"]
        length = request["max_new_tokens"]
        if len(prompt) + length > min(256, rig.kv.allocator.size):
            assert isinstance(heard.finish, AbortFinish) and heard.finish.err_type == PromptTooLong.__name__
            continue
        expected = expected_output(prompt, 1, length, 97)
        assert heard.ids == expected[: len(heard.ids)]
        if not isinstance(heard.finish, AbortFinish):
            assert heard.finish == LengthFinish(length) and len(heard.ids) == length
            counts = heard.last.counts
            assert counts.host_tokens + counts.storage_tokens <= counts.cached_tokens
        elif heard.finish.err_type == "InvalidLogits":
            assert POISON in expected
        elif heard.finish.err_type is not None:
            assert heard.finish.err_type in (QueueFull.__name__, WaitingTimeout.__name__)
        else:
            assert happened & {f"abort {index}", "abort all"} or "run" in heard.finish.message


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=SCHEDULES)
@given(
    options=rigs,
    tiers=tiers,
    poison=st.booleans(),
    work=st.lists(requests, min_size=1, max_size=16),
    script=st.lists(events, max_size=12),
)
def test_no_feature_disturbs_another(
    tmp_path_factory: pytest.TempPathFactory,
    options: dict,
    tiers: tuple[int, bool],
    poison: bool,
    work: list[dict],
    script: list[tuple[int, str, int]],
) -> None:
    """`Rig.turn` audits the pool and the tiers."""
    host_blocks, has_files = tiers
    folder = tmp_path_factory.mktemp("kv") if has_files else None
    rig = Rig(**options, host_blocks=host_blocks, storage=folder)
    rig.runner.poison = POISON if poison else None
    listener = Listener(rig)
    happened: set[str] = set()
    for turn in range(5_000):
        for index, request in enumerate(work):
            if request["turn"] == turn:
                names = ("max_new_tokens", "priority", "tenant", "salt")
                rig.add(f"r{index}", prompt_of(request), ignore_eos=True, **{name: request[name] for name in names})
        for at, event, number in script:
            if at == turn:
                happened |= {event, f"{event} {number}"}
                act(rig, event, number)
        if turn > 60:
            rig.inbox.messages.append(ContinueReq(turn))
        rig.clock.now += 0.01
        rig.turn()
        listener.check()
        if turn > 60 and not rig.is_busy and not rig.kv.has_copies:
            break
    else:
        raise AssertionError("hung")
    check_ends(rig, work, happened)
    rig.kv.audit([])
    state = rig.scheduler.state()
    assert state.num_kv_repairs == 0 and state.num_running == state.num_waiting == 0
    policy = rig.planner._policy
    if isinstance(policy, FairPolicy):
        assert not (policy._live or policy._num_by_urgency or policy._num_charged)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("waits_for", ["grammar", "files"])
def test_nobody_is_preempted_for_a_request_that_cannot_start(
    waits_for: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "CLOSE_TIMEOUT_S", PATIENCE_S)
    prompt = list(range(41))
    first = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    first.add("a", prompt)
    first.run()
    first.scheduler.run(lambda: True)  # writes its files
    rig = Rig(
        page_size=4, host_blocks=64, storage=tmp_path, overlap=overlap, max_running=1, preemption_threshold=0,
        threads=True, explain_s=0.0,
    )  # fmt: skip
    may_go_on = threading.Event()
    if waits_for == "files":
        monkeypatch.setattr(rig.kv.tiers._storage, "read", lambda job: None)  # a disk that never answers
    else:
        compile_now = HashGrammars.compile
        monkeypatch.setattr(HashGrammars, "compile", lambda *args: may_go_on.wait(PATIENCE_S) and compile_now(*args))
    rig.add("low", [1] * 9, max_new_tokens=60)
    rig.turn()
    rig.add("high", prompt, priority=9, max_new_tokens=4, regex="1" if waits_for == "grammar" else None)
    for _ in range(20):
        rig.turn()
    assert rig.planner.num_retractions == 0 and len(rig.heard["low"].ids) > 10
    may_go_on.set()
    rig.clock.now += kv_tiers.READ_TIMEOUT_S
    rig.run()
    assert rig.heard["high"].finish == LengthFinish(4) and rig.heard["high"].last.counts.num_retractions == 0


def test_tokens_that_host_memory_has_are_charged_to_nobody_and_leave_the_queue_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    charged: list[int] = []
    drained: list[int] = []
    monkeypatch.setattr(TenantShares, "_raise", lambda self, tenant, position, num: charged.append(num))
    monkeypatch.setattr(DrainRate, "add", lambda self, num, others_wait: drained.append(num))
    rig = Rig(policy="dlpm", pool_size=96, page_size=4, host_blocks=64, max_queue_time_s=1e9, explain_s=0.0)
    for index in range(10):
        rig.add(f"r{index}", [*range(index % 5, index % 5 + 40)], max_new_tokens=0, tenant="ab"[index % 2])
        rig.run()
    assert sum(heard.last.counts.host_tokens for heard in rig.heard.values()) > 100
    assert sum(charged) == sum(rig.extend_sizes) < 400
    assert sum(drained) == 400, "all of them were in the queue: the pool had nothing"


def test_a_tenant_pays_for_outputs_before_a_retraction_once(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr(TenantShares, "_raise", lambda self, tenant, position, num: charged.append(num))
    rig = Rig(policy="dlpm", pool_size=96)
    for index in range(6):
        rig.add(f"r{index}", [index] * 10, max_new_tokens=40, tenant="a")
    rig.run()
    assert rig.planner.num_retractions > 0
    assert sum(charged) == sum(rig.extend_sizes) + OUTPUT_TOKEN_COST * 6 * 40
