"""Several prompts in chunks: short ones end early, long ones starve nobody and are not starved. In simulated time."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
from scheduler_rig import Rig
from timed_rig import FAST, SLOW, TimedRig

from fakes import expected_output
from tercet.managers.planner import MAX_HELD_BACK, _Shortage
from tercet.managers.prefill_adder import Extend
from tercet.managers.step_cost import StepCost
from tercet.mem_cache.base_prefix_cache import MatchResult
from tercet.srt.arrays import Int32Array
from tercet.srt.io_struct import AbortFinish

LONG, SHORT = 30_000, 100


def serve(cost: StepCost, policy: str, num_long: int, num_short: int) -> TimedRig:
    """All of them wait when the engine starts, the long ones first."""
    rig = TimedRig(
        cost,
        pool_size=400_000,
        page_size=16,
        max_running=64,
        context_len=32_768,
        max_prefill_tokens=2048,
        chunked_prefill_size=1024,
        policy=policy,
        overlap=cost is FAST,
        radix=False,
    )
    for index in range(num_long):
        rig.add(f"long{index}", [index] * LONG, max_new_tokens=1)
    for index in range(num_short):
        rig.add(f"short{index}", [20 + index] * SHORT, max_new_tokens=1)
    rig.run()
    return rig


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize(("num_long", "cost"), [(1, SLOW), (1, FAST), (10, SLOW)])
def test_short_prompts_pass_long_ones_which_are_hardly_later(num_long: int, cost: StepCost, policy: str) -> None:
    both = serve(cost, policy, num_long, 20)
    only_short, only_long = serve(cost, policy, 0, 20), serve(cost, policy, num_long, 0)
    shorts = [f"short{index}" for index in range(20)]
    assert median(map(both.ttft_s, shorts)) <= 1.5 * median(map(only_short.ttft_s, shorts))
    for index in range(num_long):
        assert both.ttft_s(f"long{index}") <= 1.1 * only_long.ttft_s(f"long{index}")


def in_chunks(rig: Rig) -> list[str]:
    return [req.rid for req in rig.scheduler.queues.unfinished]


def make_rig(**settings) -> Rig:
    return Rig(**{"pool_size": 16384, "max_running": 16, "context_len": 8192, "overlap": False, **settings})


def test_the_prompt_with_the_fewest_tokens_left_ends_first() -> None:
    """A much shorter prompt starts beside a longer one, and one that is not much shorter waits."""
    rig = make_rig()
    rig.add("a", [1] * 4000, max_new_tokens=1)
    rig.turn()
    rig.add("b", [2] * 3000, max_new_tokens=1)
    rig.add("c", [3] * 1500, max_new_tokens=1)
    rig.turn()
    assert in_chunks(rig) == ["a", "c"]
    rig.add("d", [4] * 500, max_new_tokens=1)
    rig.turn()
    assert in_chunks(rig) == ["a", "c", "d"]
    rig.run()
    assert list(rig.heard) == ["d", "c", "a", "b"]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_oldest_prompt_gets_a_chunk_in_one_of_four_steps(overlap: bool) -> None:
    """Whatever comes: short prompts in every turn, and much shorter prompts in chunks."""
    rig = make_rig(overlap=overlap, radix=False, pool_size=65536, max_running=64)
    rig.add("oldest", [1] * 2000, max_new_tokens=1)
    rig.turn()
    oldest = rig.scheduler.queues.find("oldest")
    held_back, most = 0, 0
    for turn in range(2000 // 32 * (MAX_HELD_BACK + 1)):
        rig.add(f"{turn}", [2 + turn % 90] * (7 if turn % 10 else 300), max_new_tokens=1)
        before, num_steps = oldest.kv_len, len(rig.runner.steps)
        rig.turn()
        assert len(rig.runner.steps) == num_steps + 1
        held_back = 0 if oldest.kv_len >= before + 32 else held_back + 1
        most = max(most, held_back)
        if rig.heard["oldest"].finish is not None:
            break
    assert rig.heard["oldest"].finish is not None
    assert most == MAX_HELD_BACK


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_in_chunks_do_not_wait_for_each_others_memory(page_size: int, overlap: bool) -> None:
    """The pool has room for some of them at a time. Nothing decodes that could end and give memory back."""
    most = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        rig = Rig(
            pool_size=1024,
            page_size=page_size,
            context_len=1024,
            max_prefill_tokens=32,
            chunked_prefill_size=32,
            radix=bool(seed % 2),
            overlap=overlap,
        )
        prompts = {}
        for index, share in enumerate(np.geomspace(1, 0.05, 12)):
            prompts[f"r{index}"] = rng.integers(0, 97, int(share * rng.integers(400, 1000))).tolist()
            rig.add(f"r{index}", prompts[f"r{index}"], max_new_tokens=1)
            for _ in range(int(rng.integers(1, 4))):
                rig.turn()
                most = max(most, len(in_chunks(rig)))
        rig.run(max_turns=2000)
        assert rig.planner.num_retractions == 0
        for rid, prompt in prompts.items():
            assert rig.heard[rid].ids == expected_output(prompt, 1, 1, 97)
    assert most >= 3


@pytest.mark.parametrize(
    ("held_back", "own", "expected"),
    [(0, 49, 1), (0, 50, 0), (2, 0, 3), (MAX_HELD_BACK, 0, MAX_HELD_BACK + 1), (MAX_HELD_BACK, 1, 0)],
)
def test_a_prompt_is_held_back_by_less_than_half_a_step(held_back: int, own: int, expected: int) -> None:
    """If it was due, any chunk will do: memory or a short step may have made it small."""
    rig = make_rig()
    for rid, length in (("oldest", 1000), ("other", 300)):
        rig.add(rid, [ord(rid[1])] * length)
        rig.turn()
    oldest, other = rig.scheduler.queues.unfinished
    rig.planner._num_held_back = held_back
    extends = [Extend(other, 64, 164 - own)] + ([Extend(oldest, 64, 64 + own)] if own else [])
    rig.planner._count_held_back(extends)
    assert rig.planner._num_held_back == expected


def test_prompts_progress_beside_more_decodes_than_a_step_has_tokens() -> None:
    rig = make_rig(max_prefill_tokens=4, chunked_prefill_size=4, mixed=True)
    for index in range(6):
        rig.add(f"r{index}", [index] * 4, max_new_tokens=200)
    for _ in range(60):
        rig.turn()
    assert len(rig.scheduler.queues.running) == 6
    rig.add("prompt", [9] * 8, max_new_tokens=1)
    for _ in range(8):
        rig.turn()
    assert rig.heard["prompt"].finish is not None


def test_a_request_without_memory_stops_no_prompt_in_chunks() -> None:
    rig = make_rig()
    rig.add("stream", [9] * 10, max_new_tokens=100)
    rig.turn()
    rig.add("in chunks", [1] * 1000)
    rig.turn()
    rig.add("large", [2] * 2000)
    rig.turn()
    queues = rig.scheduler.queues
    (in_chunks,) = queues.unfinished
    before = in_chunks.kv_len
    rig.planner._shortage = _Shortage(10**9, queues.waiting.num_changes)
    rig.planner._num_decodes_due = 0
    rig.turn()
    assert in_chunks.kv_len == before + 64


def test_prompts_in_chunks_give_way_to_the_last_decode() -> None:
    """The newest goes first. Each of them starts again, and gets its tokens."""
    rig = make_rig(pool_size=1500, conservativeness=0.01, radix=False)
    rig.add("stream", [9] * 10, max_new_tokens=1350)
    rig.turn()
    rig.planner.ratio.value = 0.0
    prompts = {"a": [1] * 900, "b": [2] * 400}
    for rid, prompt in prompts.items():
        rig.add(rid, prompt, max_new_tokens=1)
        for _ in range(3):
            rig.turn()
    assert in_chunks(rig) == ["a", "b"]
    rig.planner._num_decodes_due = 1000  # the stream grows while the prompts wait
    rig.run()
    assert rig.heard["stream"].last.counts.num_retractions == 0
    assert rig.heard["a"].last.counts.num_retractions == rig.heard["b"].last.counts.num_retractions == 1
    for rid, prompt in prompts.items():
        assert rig.heard[rid].ids == expected_output(prompt, 1, 1, 97)


def test_one_of_several_prompts_in_chunks_is_aborted() -> None:
    rig = make_rig(overlap=True)
    for rid, length in (("a", 3000), ("b", 1000), ("c", 300)):
        rig.add(rid, [ord(rid) % 97] * length, max_new_tokens=2)
        rig.turn()
    assert in_chunks(rig) == ["a", "b", "c"]
    rig.abort("b")
    rig.run()
    assert isinstance(rig.heard["b"].finish, AbortFinish)
    for rid, length in (("a", 3000), ("c", 300)):
        assert rig.heard[rid].ids == expected_output([ord(rid) % 97] * length, 1, 2, 97)


def test_an_urgent_long_prompt_starts_beside_a_less_urgent_one() -> None:
    rig = make_rig(preemption_threshold=100)
    rig.add("low", [1] * 2000, max_new_tokens=1)
    rig.turn()
    rig.add("equal", [2] * 2000, max_new_tokens=1)
    rig.add("high", [3] * 2000, priority=1, max_new_tokens=1)
    rig.run()
    assert list(rig.heard) == ["high", "low", "equal"]


@pytest.mark.parametrize("num_left", [1, 36, 63])
def test_a_short_rest_ends_beside_an_urgent_long_prompt(num_left: int) -> None:
    """Less urgent prompts that arrive later would end in the same steps, so the short rest ends before them."""
    rig = make_rig(preemption_threshold=100, radix=False)
    rig.add("middle", [1] * (64 + num_left), priority=1, max_new_tokens=1)
    rig.turn()
    rig.add("high", [2] * 2000, priority=2, max_new_tokens=1)
    rig.turn()
    assert in_chunks(rig) == ["middle", "high"]
    rig.add("low", [3] * 64, max_new_tokens=1)
    rig.turn()
    assert list(rig.heard) == ["middle"]


def test_a_less_urgent_prompt_takes_no_chunk_from_an_urgent_one() -> None:
    """Much shorter ones, of which one arrives in each turn. An equally urgent one would start."""
    rig = make_rig(preemption_threshold=100, radix=False)
    rig.add("high", [1] * 640, priority=1, max_new_tokens=1)
    for index in range(10):
        rig.add(f"low{index}", [2 + index] * 65, max_new_tokens=1)
        rig.turn()
    assert list(rig.heard) == ["high"]


def test_short_prompts_do_not_hold_back_a_prompt_though_an_equally_urgent_one_waits() -> None:
    rig = make_rig(page_size=16)
    rig.add("long", [90] * 300, max_new_tokens=1)
    rig.turn()
    rig.add("waits", [91] * 200, max_new_tokens=1)
    for turn in range(50):
        rig.add(f"short{turn}", [turn] * 9, max_new_tokens=1)
        rig.turn()
    assert rig.heard["long"].finish is not None


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("priority", [0, 1])
def test_short_prompts_do_not_hold_back_the_prefix_of_an_urgent_one(page_size: int, priority: int) -> None:
    """The urgent prompt waits for one in chunks that begins like it, and may be less urgent."""
    rig = make_rig(preemption_threshold=100, page_size=page_size)
    rig.add("long", [index % 97 for index in range(640)], max_new_tokens=1)
    rig.turn()
    rig.add("urgent", [index % 97 for index in range(400)], priority=priority, max_new_tokens=1)
    for turn in range(60):
        rig.add(f"short{turn}", [turn] * (1 if page_size == 1 else 9), max_new_tokens=1)
        rig.turn()
    assert rig.heard["urgent"].finish is not None


def test_a_prompt_in_chunks_is_preempted() -> None:
    """The urgent request needs its memory."""
    rig = make_rig(pool_size=1000, preemption_threshold=0)
    rig.add("low", [1] * 900, max_new_tokens=1)
    for _ in range(4):
        rig.turn()
    rig.add("high", [2] * 800, priority=1, max_new_tokens=1)
    rig.run()
    assert list(rig.heard) == ["high", "low"]
    assert rig.heard["low"].last.counts.num_retractions == 1


def test_a_short_prompt_waits_for_the_chunk_that_it_shares() -> None:
    rig = make_rig()
    shared = list(range(97)) * 5
    rig.add("long", shared + [5] * 2000, max_new_tokens=1)
    rig.turn()
    rig.add("short", shared[:100], max_new_tokens=1)
    rig.run()
    assert rig.heard["short"].last.counts.cached_tokens == 99


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dlpm"])
def test_requests_that_wait_for_a_shared_chunk_are_not_matched(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be 128 of them, each with thousands of nodes to match, in each step."""
    rig = make_rig(policy=policy)
    matched: list[int] = []
    match = rig.kv.cache.match

    def counted(tokens: Int32Array, namespace: str = "") -> MatchResult:
        matched.append(len(tokens))
        return match(tokens, namespace)

    for index in range(6):
        rig.add(f"r{index}", list(range(97)) * 5, max_new_tokens=1)
    rig.turn()
    with monkeypatch.context() as patch:
        patch.setattr(rig.kv.cache, "match", counted)
        for _ in range(3):
            rig.turn()
    assert matched == [] and len(rig.scheduler.queues.waiting) == 5
    rig.run()
    assert [heard.last.counts.cached_tokens for heard in rig.heard.values()] == [0, *[484] * 5]
