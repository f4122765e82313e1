"""What the planner puts into steps: on the whole scheduler with the fake runner, counted in steps and turns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers.prefill_adder import MAX_SKIPPED
from tercet.managers.req import Req
from tercet.managers.schedule_policy import MAX_PASSED_OVER, MAX_SORTED, POLICIES
from tercet.managers.token_gap import DECODES_PER_EXTEND
from tercet.managers.waiting_queue import WaitingQueue
from tercet.model_executor.forward_batch import ForwardMode
from tercet.srt.io_struct import AbortFinish, LengthFinish

NUM_LOADS = int(os.environ.get("TERCET_SCHEDULES", "50"))
"""Random loads that a property is tried on; set TERCET_SCHEDULES=10000 for the long run."""


def play_random_load(seed: int) -> None:
    """A random load on a pool that is too small for it, to its end; every request gets its own tokens."""
    rng = np.random.default_rng(seed)
    pool_size = int(rng.choice([64, 128, 256, 512, 1024]))
    rig = Rig(
        pool_size=pool_size,
        page_size=int(rng.choice([1, 16])),
        max_running=int(rng.choice([4, 64, 64])),
        context_len=1024,
        max_prefill_tokens=int(rng.choice([16, 24, 32, 48, 64])),
        chunked_prefill_size=int(rng.choice([16, 32, 64])),
        radix=bool(rng.random() < 0.8),
        policy=str(rng.choice(["fcfs", "lpm", *POLICIES])),
        overlap=bool(rng.random() < 0.5),
        mixed=bool(rng.random() < 0.7),
        conservativeness=float(rng.choice([0.01, 0.01, 0.05, 1.0])),
        watermark=0.02 * (seed % 3),
        max_drafts=int(rng.choice([0, 0, 3])),
        audit=False,
    )
    families = [rng.integers(0, 5, pool_size).tolist() for _ in range(3)]
    requests = []
    for index in range(int(rng.integers(4, 40))):
        # Writers fill the pool with decodes while long prompts are in chunks.
        is_writer = rng.random() < 0.8
        prompt_len = int(rng.integers(1, 20 if is_writer else pool_size * 3 // 4))
        prompt = families[index % 3][:prompt_len] + rng.integers(0, 9, rng.integers(0, 8)).tolist()
        max_new_tokens = min(int(rng.integers(1, 150 if is_writer else 4)), pool_size - len(prompt))
        abort_at = int(rng.integers(60)) if rng.random() < 0.1 else None
        requests.append((f"r{index}", prompt, max_new_tokens, int(rng.integers(20)), abort_at))
    turn = 0
    num_arrived = 0
    while num_arrived < len(requests) or rig.is_busy:
        for rid, prompt, max_new_tokens, arrives_at, abort_at in requests:
            if arrives_at == turn:
                rig.add(rid, prompt, max_new_tokens=max_new_tokens)
                num_arrived += 1
            if abort_at == turn:
                rig.abort(rid)
        rig.turn()
        turn += 1
        assert turn < 5_000, "no progress"
    for rid, prompt, max_new_tokens, _, abort_at in requests:
        heard, expected = rig.heard[rid], expected_output(prompt, 1, max_new_tokens, 97)
        if isinstance(heard.finish, AbortFinish):
            assert abort_at is not None, heard.finish
            expected = expected[: len(heard.ids)]
        assert heard.ids == expected
    rig.kv.audit([])
    assert rig.scheduler.state().num_kv_repairs == 0


def test_every_planned_step_has_room() -> None:
    for seed in range(NUM_LOADS):
        try:
            play_random_load(seed)
        except AssertionError as error:
            raise AssertionError(f"load {seed}: {error}") from error


# Running requests beside prompts


@pytest.mark.parametrize("new_tokens", [1, 50])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_waits_for_one_extend_step_at_most(new_tokens: int, overlap: bool) -> None:
    """However little an extend step computes: a prompt that is cached but for a token arrives before each step."""
    rig = Rig(
        pool_size=16384,
        max_running=64,
        context_len=4096,
        max_prefill_tokens=64,
        chunked_prefill_size=64,
        overlap=overlap,
    )
    shared = [5] * 50
    rig.add("seed", shared, max_new_tokens=1)
    rig.run()
    rig.add("stream", [1, 2, 3], max_new_tokens=300)
    rig.turn()
    first = len(rig.runner.steps)
    for index in range(200):
        prompt = [*shared, index] if new_tokens == 1 else [index] * new_tokens
        rig.add(f"p{index}", prompt, max_new_tokens=1)
        rig.turn()
    modes = "".join("d" if step.mode is ForwardMode.DECODE else "e" for step in rig.runner.steps[first:])
    assert "ee" not in modes
    assert modes.count("d") >= modes.count("e") * (DECODES_PER_EXTEND - 1)
    assert modes.count("e") >= len(modes) // (DECODES_PER_EXTEND + 1), "prompts must not wait longer than that either"


def test_a_burst_of_prompts_is_computed_before_the_first_decode_of_its_own() -> None:
    """Requests that have just got their first token wait for nothing yet."""
    rig = Rig(pool_size=8192, max_running=64, max_prefill_tokens=128, chunked_prefill_size=128, overlap=False)
    for index in range(4):
        rig.add(f"r{index}", [index] * 64, max_new_tokens=4)
    rig.run()
    assert [step.mode.name[0] for step in rig.runner.steps] == ["E", "E", "D", "D", "D"]


def test_decodes_that_join_wait_for_no_step_of_their_own() -> None:
    rig = Rig(pool_size=1024, mixed=True, overlap=False)
    rig.add("stream", [1] * 5, max_new_tokens=50)
    rig.turn()
    rig.add("long", [2] * 200, max_new_tokens=1)
    for _ in range(4):
        rig.turn()
    assert [step.mode for step in rig.runner.steps] == [ForwardMode.EXTEND] * 5
    assert len(rig.heard["stream"].ids) == 5 and rig.heard["long"].finish is not None


# Prompts in chunks


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_prompt_gets_no_further_chunk(overlap: bool) -> None:
    rig = Rig(pool_size=8192, context_len=4096, overlap=overlap)
    rig.add("long", [1] * 2000)
    for _ in range(5):
        rig.turn()
    num_steps = len(rig.runner.steps)
    rig.abort("long")
    rig.add("short", [2] * 5, max_new_tokens=1)
    rig.run(max_turns=3)
    assert isinstance(rig.heard["long"].finish, AbortFinish)
    assert rig.extend_sizes[num_steps:] == [5]


def test_while_an_aborted_prompt_is_in_flight_no_other_prompt_is_cut() -> None:
    rig = Rig(pool_size=8192, context_len=4096)
    rig.add("aborted", [1] * 2000)
    rig.turn()
    rig.abort("aborted")
    rig.add("next", [2] * 200, max_new_tokens=1)
    rig.run(max_turns=8)
    assert isinstance(rig.heard["aborted"].finish, AbortFinish)
    assert rig.heard["next"].ids == expected_output([2] * 200, 1, 1, 97)


def test_a_prompt_that_waits_for_its_first_chunk_holds_up_nobody() -> None:
    """Short prompts begin like a long one, which cannot start while another is in chunks."""
    rig = Rig(pool_size=8192, max_running=16, context_len=4096, max_prefill_tokens=128)
    shared = [7] * 20 + [8] * 20
    rig.add("in chunks", [1] * 2000, max_new_tokens=1)
    rig.turn()
    rig.add("long", shared + [2] * 1000, max_new_tokens=1)
    for index in range(6):
        rig.add(f"short{index}", [*shared, index], max_new_tokens=1)
    for _ in range(8):
        rig.turn()
    assert all(rig.heard[f"short{index}"].finish is not None for index in range(6))
    assert rig.heard["in chunks"].finish is None


# Memory


@pytest.mark.parametrize("watermark", [0.0, 0.02])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_two_requests_retract_one_another(watermark: float, overlap: bool) -> None:
    """Together they never fit. The one with more output stays to its end, and the other one starts again rarely."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        rig = Rig(pool_size=128, conservativeness=0.01, watermark=watermark, overlap=overlap, audit=False)
        wishes = {}
        for rid in "ab":
            prompt = rng.integers(0, 97, rng.integers(1, 10)).tolist()
            wishes[rid] = prompt, int(rng.integers(65, 80))
            rig.add(rid, prompt, max_new_tokens=wishes[rid][1])
        rig.run(max_turns=500)
        for rid, (prompt, max_new_tokens) in wishes.items():
            assert rig.heard[rid].ids == expected_output(prompt, 1, max_new_tokens, 97)
        retractions = sorted(heard.last.counts.num_retractions for heard in rig.heard.values())
        assert retractions[0] == 0 and 1 <= retractions[1] <= 2, f"load {seed}: {retractions}"


def test_the_expected_outputs_follow_decode_steps_and_retractions() -> None:
    rig = Rig(pool_size=128, overlap=False, conservativeness=0.1)
    start = rig.planner.ratio.value
    for rid in "ab":
        rig.add(rid, [ord(rid) % 90] * 4, max_new_tokens=90)
        rig.turn()
    assert rig.planner.ratio.value == start
    for count in range(1, 4):
        rig.turn()
        assert rig.planner.ratio.value == pytest.approx(start - count * rig.planner.ratio._decay)
    for _ in range(90):
        if rig.planner.num_retractions:
            break
        rig.turn()
    (kept,) = rig.scheduler.queues.running
    assert rig.planner.ratio.value == pytest.approx((len(kept.output_ids) - 1 + 20) / 90, abs=0.01)


def test_an_admission_leaves_the_watermark_free() -> None:
    """A prompt of 80 and its 8 tokens need 89 of 100 tokens. The one that runs has 4, and is expected to need 0."""
    started = {}
    for watermark in (0.0, 0.07, 0.08):
        rig = Rig(pool_size=100, watermark=watermark, overlap=False, max_prefill_tokens=100, chunked_prefill_size=100)
        rig.add("runs", [1, 2, 3], max_new_tokens=2)
        rig.turn()
        rig.planner.ratio.value = 0.0
        rig.add("waits", [5] * 80, max_new_tokens=8)
        rig.turn()
        started[watermark] = rig.scheduler.queues.find("waits").row > 0
        rig.run()
    assert started == {0.0: True, 0.07: True, 0.08: False}


@pytest.mark.parametrize("watermark", [0.02, 0.5, 0.99])
def test_every_request_that_fits_into_the_pool_runs_under_any_watermark(watermark: float) -> None:
    rig = Rig(pool_size=128, watermark=watermark)
    for index in range(6):
        rig.add(f"r{index}", [index] * 60, max_new_tokens=68)
    rig.run()
    assert all(len(heard.ids) == 68 for heard in rig.heard.values())


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_of_the_size_of_the_pool_runs(page_size: int) -> None:
    rig = Rig(pool_size=64, page_size=page_size)
    rig.add("r", [1] * (64 - (page_size > 1)), max_new_tokens=int(page_size > 1))
    rig.run()
    assert isinstance(rig.heard["r"].finish, LengthFinish)


# The waiting queue


class Looks:
    """Counts the requests of the waiting queue that are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        walk = WaitingQueue.__iter__

        def counted(queue: WaitingQueue) -> Iterator[Req]:
            for req in walk(queue):
                self.count += 1
                yield req

        monkeypatch.setattr(WaitingQueue, "__iter__", counted)


def looks_of_one_plan(num_waiting: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> int:
    rig = Rig(pool_size=8192, context_len=4096, max_queued=10_000, policy=policy, overlap=False)
    rig.add("in chunks", [1] * 3000)
    rig.turn()
    for index in range(num_waiting):
        rig.add(f"r{index}", [2 + index % 90, index // 90] * 1000)  # too long to start beside the other one
    rig.turn()
    with monkeypatch.context() as patch:
        looks = Looks(patch)
        rig.turn()
    assert len(rig.scheduler.queues.waiting) == num_waiting
    return looks.count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_looks_at_few_of_many_waiting_requests(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (looks_of_one_plan(num_waiting, policy, monkeypatch) for num_waiting in (300, 1000))
    assert few == many <= 2 * MAX_SKIPPED


def test_counting_who_was_passed_over_looks_at_few_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests behind the first long ones are admitted beside the chunk, those far behind are not looked at."""
    rig = Rig(pool_size=8192, max_running=64, context_len=4096, overlap=False)
    rig.add("in chunks", [1] * 3000)
    rig.turn()
    for index in range(1000):
        length = 3 if index % 10 == 9 else 700
        rig.add(f"r{index}", [2 + index % 90, index // 90, 1] * length, max_new_tokens=1)
    queue = rig.scheduler.queues.waiting
    with monkeypatch.context() as patch:
        looks = Looks(patch)
        rig.turn()
    assert 1000 - len(queue) >= 3
    assert 0 < looks.count <= 3 * MAX_SKIPPED
    assert next(iter(queue)).passed_over == 1


def test_first_come_first_served_needs_no_ages() -> None:
    """A short request goes beside the chunk of a prompt and before a long one, under every policy."""
    ages = {}
    for policy in ("fcfs", "lpm"):
        rig = Rig(pool_size=8192, context_len=4096, policy=policy, overlap=False)
        rig.add("in chunks", [1] * 3000)
        rig.turn()
        rig.add("long", [2] * 2000)
        rig.add("short", [3] * 5)
        rig.turn()
        assert rig.scheduler.queues.find("short").row
        ages[policy] = rig.scheduler.queues.find("long").passed_over
    assert ages == {"fcfs": 0, "lpm": 1}


def test_the_scheduler_runs_the_planner_that_it_is_given() -> None:
    rig = Rig()
    assert rig.scheduler.queues is rig.planner.queues and rig.scheduler.kv is rig.planner.kv
    plans, plan = [], rig.planner.plan
    rig.planner.plan = lambda: plans.append(plan()) or plans[-1]  # type: ignore[method-assign]
    rig.add("r", [1, 2, 3], max_new_tokens=2)
    rig.run()
    assert [batch.inputs for batch in plans if batch is not None] == rig.runner.steps


def test_ageing_bounds_how_often_a_cold_prompt_is_passed_over() -> None:
    rig = Rig(pool_size=2048, max_running=1)
    warm = [5] * 60
    rig.add("seed", warm, max_new_tokens=1)
    rig.run()
    rig.add("cold", [9] * 60, max_new_tokens=1)
    for index in range(100):
        rig.add(f"warm{index}", [*warm, index % 90], max_new_tokens=1)
        rig.turn()
    order = list(rig.heard)
    assert order.index("cold") - order.index("warm0") == MAX_PASSED_OVER


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_running", [1, 3])
def test_no_policy_passes_a_request_over_for_ever(policy: str, max_running: int) -> None:
    """More arrives than runs. A later arrival is admitted before a request in MAX_PASSED_OVER passes at most."""
    rng, overlap = Random(max_running), max_running == 3
    rig = Rig(pool_size=8192, max_running=max_running, policy=policy, overlap=overlap, audit=False)
    heads = [[head] * rng.randrange(1, 16) for head in range(3)]
    prompts = {}
    for turn in range(120):
        for index in range(max_running if turn < 100 else 0):
            rid = f"{turn}.{index}"
            prompts[rid] = (
                rng.choice(heads) + [rng.randrange(97) for _ in range(rng.randrange(1, 15))],
                rng.randrange(1, 6),
            )
            rig.add(rid, prompts[rid][0], max_new_tokens=prompts[rid][1])
        rig.turn()
        rig.clock.now += 0.1
        assert all(req.passed_over <= MAX_PASSED_OVER for req in rig.scheduler.queues.live())
    rig.run()
    for rid, (prompt, max_new_tokens) in prompts.items():
        assert rig.heard[rid].ids == expected_output(prompt, 1, max_new_tokens, 97)


@pytest.mark.parametrize("num_short", [4, 2 * MAX_SORTED])
def test_a_long_prompt_starts_when_another_one_has_ended(num_short: int) -> None:
    """However many warm, short prompts are behind it, more of them every turn."""
    rig = Rig(pool_size=16384, max_running=64, context_len=4096, overlap=False)
    warm = [5] * 60
    rig.add("seed", warm, max_new_tokens=1)
    rig.run()
    rig.add("in chunks", [1] * 800, max_new_tokens=1)
    rig.turn()
    rig.add("long", [9] * 3000, max_new_tokens=1)
    for index in range(num_short):
        rig.add(f"short{index}", [*warm, index % 90], max_new_tokens=1)
    num_added = 0
    while rig.heard["in chunks"].finish is None:
        for _ in range(4):
            rig.add(f"more{num_added}", [*warm, num_added % 90, num_added // 90], max_new_tokens=1)
            num_added += 1
        rig.turn()
    rig.turn()
    assert [req.rid for req in rig.scheduler.queues.unfinished] == ["long"]
