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
from tercet.managers.queue_limits import DrainRate
from tercet.managers.tenant_shares import TenantShares
from tercet.srt.io_struct import LengthFinish, StopFinish


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
