"""Full memory: requests that wait for it while rows are free are looked up again only when something has changed, and
nobody is retracted while a request that ends may free it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.planner import Planner
from tercet.managers.schedule_policy import POLICIES
from tercet.mem_cache.radix_cache import RadixCache
from tercet.srt.io_struct import AbortFinish


class Lookups:
    """Counts the look-ups of prefixes in the radix cache."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: type, names: Sequence[str] = ("match", "match_len", "match_path")
    ) -> None:
        """Counts the calls of these methods."""
        self.count = 0
        for name in names:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*given: object) -> object:
            self.count += 1
            return call(*given)

        return counted

    def during(self, rig: Rig, num_turns: int) -> int:
        before = self.count
        for _ in range(num_turns):
            rig.turn()
        return self.count - before


def full_rig(num_waiting: int, **settings: object) -> Rig:
    """A request runs that is expected to need most of the pool. The others wait, and many rows are free."""
    rig = Rig(pool_size=300, max_running=64, overlap=False, **settings)
    rig.add("runs", [1] * 9, max_new_tokens=200, ignore_eos=True)
    rig.turn()
    for number in range(num_waiting):
        rig.add(f"w{number}", [2 + number] * 60, max_new_tokens=60, ignore_eos=True)
    for _ in range(3):
        rig.turn()
    assert len(rig.scheduler.queues.waiting) == num_waiting and rig.kv.req_to_token_pool.num_free > 32
    return rig


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decode_step_looks_up_no_waiting_request_again(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, lookups = full_rig(20, policy=policy), Lookups(monkeypatch, KVCacheManager)
    assert lookups.during(rig, 10) == 0
    rig.add("new", [90] * 60, max_new_tokens=60, ignore_eos=True)
    assert lookups.during(rig, 1) > 0  # it might be the best one
    assert lookups.during(rig, 10) == 0
    rig.abort("new")
    assert lookups.during(rig, 2) > 0
    assert lookups.during(rig, 10) == 0
    rig.run()
    assert rig.heard["w0"].ids == expected_output([2] * 60, 1, 60, 97)


def test_the_tree_is_asked_only_for_requests_whose_prefix_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, lookups = full_rig(20), Lookups(monkeypatch, RadixCache, ["look_up"])
    rig.add("new", [90] * 60, max_new_tokens=60, ignore_eos=True)
    assert lookups.during(rig, 2) == 1
    rig.abort("new")
    assert lookups.during(rig, 3) == 0


def test_a_new_request_with_a_cached_prefix_goes_before_those_without_memory() -> None:
    rig = full_rig(5)
    rig.add("fits", [1] * 9, max_new_tokens=2)
    rig.turn()
    assert rig.scheduler.queues.find("fits").row and len(rig.scheduler.queues.waiting) == 5


def test_a_request_whose_grammar_is_ready_is_a_change() -> None:
    """Nobody comes or leaves, but the first of the queue can be admitted now."""
    rig = Rig(pool_size=300, max_running=64, overlap=False, policy="fcfs")
    rig.add("runs", [1] * 9, max_new_tokens=200, ignore_eos=True)
    rig.turn()
    rig.add("small", [5] * 9, max_new_tokens=2)
    rig.scheduler._handle(rig.inbox.messages.pop())
    small = rig.scheduler.queues.find("small")
    small.awaits_grammar = True
    rig.add("large", [6] * 60, max_new_tokens=60, ignore_eos=True)
    for _ in range(5):
        rig.turn()
    assert len(rig.scheduler.queues.waiting) == 2
    small.awaits_grammar = False
    rig.turn()
    assert [req.rid for req in rig.scheduler.queues.waiting] == ["large"]


def schedule(seed: int, policy: str) -> list[tuple[list[int], list[int] | None]]:
    """The rows of each step, and its prompt tokens. Nothing is retracted, and no two prompts begin alike."""
    rng = np.random.default_rng(seed)
    rig = Rig(
        pool_size=int(rng.choice([192, 320])),
        page_size=int(rng.choice([1, 16])),
        max_running=32,
        audit=False,
        mixed=bool(rng.random() < 0.5),
        overlap=bool(rng.random() < 0.5),
        policy=policy,
        preemption_threshold=100,
    )
    expected = {}
    for number in range(30):
        prompt = [number, *rng.integers(0, 97, rng.integers(1, 80)).tolist()]
        expected[f"r{number}"] = prompt, int(rng.integers(1, 60))
        priority = int(rng.integers(0, 2))
        rig.add(f"r{number}", prompt, max_new_tokens=expected[f"r{number}"][1], ignore_eos=True, priority=priority)
        if rng.random() < 0.1:
            rig.abort(f"r{rng.integers(0, number + 1)}")
        for _ in range(rng.integers(0, 6)):
            rig.turn()
    rig.run()
    assert rig.planner.num_retractions == 0
    for rid, (prompt, num_tokens) in expected.items():
        if not isinstance(rig.heard[rid].finish, AbortFinish):
            assert rig.heard[rid].ids == expected_output(prompt, 1, num_tokens, 97)
    return [
        (step.rows.tolist(), None if step.extend_lens is None else step.extend_lens.tolist())
        for step in rig.runner.steps
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_schedule_is_that_of_a_planner_that_looks_in_each_step(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_in_vain = 0
    is_in_vain = Planner._is_in_vain

    def counted(planner: Planner, *given: object) -> bool:
        nonlocal num_in_vain
        found = is_in_vain(planner, *given)
        num_in_vain += found
        return found

    for seed in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(Planner, "_is_in_vain", counted)
            found = schedule(seed, policy)
        with monkeypatch.context() as patch:
            patch.setattr(Planner, "_is_in_vain", lambda *given: False)
            assert schedule(seed, policy) == found
    assert num_in_vain > 50, "it tests nothing"


def test_nobody_is_retracted_while_a_request_that_ends_may_free_its_memory() -> None:
    """The last token of "short" is in flight when "long" needs a slot."""
    rig = Rig(pool_size=64, conservativeness=0.01)
    rig.add("long", [2] * 25, max_new_tokens=30)
    for _ in range(2):
        rig.turn()
    rig.add("short", [1] * 28, max_new_tokens=6)
    is_full = False
    while rig.is_busy:
        rig.turn()
        is_full |= len(rig.scheduler.queues.running) == 2 and not rig.kv.num_available
    assert is_full and rig.planner.num_retractions == 0
