"""Features of the scheduler that meet in one request. test_random_steps.py has all of them at random."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from grammar_cases import EOS, TOKENS, VOCABULARY
from hash_grammar import HashGrammars
from patience import PATIENCE_S
from scheduler_rig import Rig

from tercet.managers import kv_tiers
from tercet.managers.fair_policy import OUTPUT_TOKEN_COST
from tercet.managers.grammar_backends import make_compiler
from tercet.managers.grammar_loader import GrammarLoader
from tercet.managers.planner import MAX_HELD_BACK
from tercet.managers.queue_limits import DrainRate
from tercet.managers.tenant_shares import TenantShares
from tercet.srt.io_struct import LengthFinish, StopFinish

URGENT = list(range(41))
"""The prompt of a request that cannot start yet."""


def rig_that_waits(
    waits_for: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> tuple[Rig, threading.Event]:
    """Files of URGENT are never read, and grammars are compiled after the event."""
    monkeypatch.setattr(kv_tiers, "CLOSE_TIMEOUT_S", PATIENCE_S)
    first = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    first.add("a", URGENT)
    first.run()
    first.scheduler.run(lambda: True)  # writes its files
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path, threads=True, **settings)
    may_go_on = threading.Event()
    if waits_for == "files":
        monkeypatch.setattr(rig.kv.tiers._storage, "read", lambda job: None)  # a disk that never answers
    else:
        compile_now = HashGrammars.compile
        monkeypatch.setattr(HashGrammars, "compile", lambda *args: may_go_on.wait(PATIENCE_S) and compile_now(*args))
    return rig, may_go_on


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("waits_for", ["grammar", "files"])
def test_nobody_is_preempted_for_a_request_that_cannot_start(
    waits_for: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"overlap": overlap, "max_running": 1, "preemption_threshold": 0, "explain_s": 0.0}
    rig, may_go_on = rig_that_waits(waits_for, tmp_path, monkeypatch, **settings)
    rig.add("low", [1] * 9, max_new_tokens=60)
    rig.turn()
    rig.add("high", URGENT, priority=9, max_new_tokens=4, regex="1" if waits_for == "grammar" else None)
    for _ in range(20):
        rig.turn()
    assert rig.planner.num_retractions == 0 and len(rig.heard["low"].ids) > 10
    may_go_on.set()
    rig.clock.now += kv_tiers.READ_TIMEOUT_S
    rig.run()
    assert rig.heard["high"].finish == LengthFinish(4) and rig.heard["high"].last.counts.num_retractions == 0


@pytest.mark.parametrize("waits_for", ["grammar", "files"])
def test_a_prompt_in_chunks_is_not_held_back_for_an_urgent_request_that_cannot_start(
    waits_for: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short prompts fill the steps. They would hold it back as long as the urgent one waits."""
    settings = {"pool_size": 4096, "context_len": 1024, "max_running": 32, "preemption_threshold": 9, "policy": "fcfs"}
    rig, may_go_on = rig_that_waits(waits_for, tmp_path, monkeypatch, audit=False, **settings)
    rig.add("long", list(range(90, 0, -1)) * 8, max_new_tokens=1)
    rig.turn()
    rig.add("urgent", URGENT, priority=5, max_new_tokens=4, regex="1" if waits_for == "grammar" else None)
    for turn in range(720 // 32 * (MAX_HELD_BACK + 1)):
        for number in range(4):
            rig.add(f"short {turn} {number}", [turn, number] * 10, max_new_tokens=1)
        rig.turn()
    assert rig.heard["long"].finish == LengthFinish(1) and rig.heard["urgent"].finish is None
    may_go_on.set()
    rig.clock.now += kv_tiers.READ_TIMEOUT_S
    rig.run()


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


@pytest.mark.parametrize("overlap", [False, True])
def test_a_json_grammar_gives_the_same_output_after_a_retraction(overlap: bool) -> None:
    """With the matcher of a library. The random steps have a fake one."""
    pytest.importorskip("llguidance")
    text = {"type": "string", "pattern": "^[a-z]{20,24}$"}
    schema = json.dumps({"type": "object", "properties": {"a": text}, "required": ["a"]})

    def run(pool_size: int) -> Rig:
        rig = Rig(
            pool_size=pool_size, overlap=overlap, vocab_size=len(TOKENS), eos_ids=frozenset({EOS}),
            conservativeness=0.01,
        )  # fmt: skip
        rig.scheduler._grammars = GrammarLoader(
            lambda: VOCABULARY, lambda vocabulary: make_compiler("llguidance", vocabulary), in_thread=False
        )
        for index in range(8):
            rig.add(f"r{index}", [1, 2, 3, index], max_new_tokens=40, sampling_seed=index, json_schema=schema)
        rig.run()
        return rig

    roomy, short = run(512), run(96)
    assert short.planner.num_retractions > 0 == roomy.planner.num_retractions
    for rid, heard in roomy.heard.items():
        assert short.heard[rid].ids == heard.ids and short.heard[rid].finish == heard.finish == StopFinish(EOS)
        assert 20 <= len(json.loads(b"".join(TOKENS[token] for token in heard.ids[:-1]))["a"]) <= 24
