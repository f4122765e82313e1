"""The bound on the time between two tokens, in simulated time: the steps cost what a linear cost says."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_makers import make_req
from timed_rig import FAST, SLOW, TimedRig

from tercet.managers.step_cost import StepCost, StepShape
from tercet.managers.token_gap import (
    AUTO_GAP_S,
    AUTO_GAP_STEPS,
    DECODES_PER_EXTEND,
    MIN_MARGIN,
    MIN_TOKENS,
    TRIAL_PERIOD,
    TokenGapBound,
)
from tercet.model_executor.step import FROM_DEVICE, ForwardMode

NUM_STREAMS = 8
PROMPT_LEN = 2000


def make_rig(cost: StepCost, **settings) -> TimedRig:
    """Streams that decode to the end of the test."""
    is_slow = cost.step_s == SLOW.step_s
    rig = TimedRig(
        cost,
        **{
            "pool_size": 65536,
            "max_running": 64,
            "context_len": 8192,
            "max_prefill_tokens": 2048 if is_slow else 16384,
            "chunked_prefill_size": 1024 if is_slow else 8192,
            "overlap": not is_slow,
            "conservativeness": 0.01,
            **settings,
        },
    )
    for index in range(NUM_STREAMS):
        rig.add(f"stream{index}", [index] * 50, max_new_tokens=4000)
    while len(rig.times_s) < NUM_STREAMS:
        rig.turn()
    return rig


def gaps_s(rig: TimedRig, first: int) -> list[float]:
    """The gaps of all streams from their token `first` on. All of them have as many tokens."""
    return [gap for index in range(NUM_STREAMS) for gap in rig.gaps_s(f"stream{index}")[first:]]


def input_ids_of(rig: TimedRig, first: int) -> list[np.ndarray]:
    """The tokens of each extend step from step `first` on."""
    return [step.input_ids for step in rig.runner.steps[first:] if step.mode is ForwardMode.EXTEND]


def serve_steadily(rig: TimedRig, interval_s: float, num_prompts: int) -> float:
    """Prompts arrive every `interval_s`. Returns the tokens per second of prompts and outputs, until all have ended."""
    rng = Random(0)
    start_s = rig.clock.now
    num_before = sum(map(len, rig.times_s.values()))
    num_added, name = 0, f"{start_s}"
    while num_added < num_prompts or len(rig.scheduler.queues) > NUM_STREAMS:
        while num_added < num_prompts and rig.clock.now >= start_s + num_added * interval_s:
            rig.add(f"{name}.{num_added}", [rng.randrange(97) for _ in range(PROMPT_LEN)], max_new_tokens=8)
            num_added += 1
        rig.turn()
    num_tokens = num_prompts * PROMPT_LEN + sum(map(len, rig.times_s.values())) - num_before
    return num_tokens / (rig.clock.now - start_s)


@pytest.mark.parametrize("joined", ["by flag", "if cheap", "if dear"])
@pytest.mark.parametrize(
    ("cost", "max_itl_s", "interval_s", "num_prompts"),
    [
        (SLOW, 0.5, 3.0, 10),
        (FAST, 0.06, 0.15, 20),
        # More than the machine can do: every step is a part of a prompt or waits for one.
        (SLOW, 1.0, 0.0, 10),
        (FAST, 0.25, 0.0, 60),
    ],
)
def test_steady_prompts_beside_streams_keep_the_bound_and_the_throughput(
    cost: StepCost, max_itl_s: float, interval_s: float, num_prompts: int, joined: str
) -> None:
    if joined == "if dear":  # a step of their own costs the streams half as much as joining
        cost = cost._replace(joined_row_s=2 * cost.step_s / NUM_STREAMS)
    mixed = joined == "by flag"
    throughput, p99_s = {}, {}
    for bound in (None, max_itl_s):
        rig = make_rig(cost, max_itl_s=bound, mixed=mixed)
        serve_steadily(rig, interval_s, num_prompts // 2)  # the model learns
        first = len(rig.times_s["stream0"])
        num_steps = len(rig.runner.steps)
        throughput[bound] = serve_steadily(rig, interval_s, num_prompts)
        share = np.mean([(ids == FROM_DEVICE).any() for ids in input_ids_of(rig, num_steps)])
        assert share > 0.7 if mixed or (bound and joined == "if cheap") else share < 0.3
        p99_s[bound] = np.quantile(gaps_s(rig, first), 0.99)
    assert p99_s[max_itl_s] <= max_itl_s < p99_s[None]
    assert throughput[max_itl_s] >= 0.95 * throughput[None]


def test_without_running_requests_nothing_is_bounded() -> None:
    limits = {"max_prefill_tokens": 2048, "chunked_prefill_size": 2048}
    rig = TimedRig(SLOW, pool_size=8192, context_len=8192, max_itl_s=0.01, **limits)
    rig.add("long", [1] * 5000, max_new_tokens=1)
    rig.run()
    assert rig.extend_sizes == [2048, 2048, 904]


@pytest.mark.parametrize(("page_size", "least"), [(1, MIN_TOKENS), (64, 64)])
def test_prompts_go_on_under_a_bound_that_no_step_can_keep(page_size: int, least: int) -> None:
    rig = make_rig(SLOW, max_itl_s=0.001, page_size=page_size)
    first = len(rig.runner.steps)
    rig.add("prompt", [90] * 256, max_new_tokens=1)
    while "prompt" not in rig.times_s:
        rig.turn()
    sizes = [len(ids) - int((ids == FROM_DEVICE).sum()) for ids in input_ids_of(rig, first)]
    assert sizes == [least] * (256 // least)


def test_a_slower_machine_gets_smaller_chunks() -> None:
    """The model is fitted while the engine serves: the bound holds again after some steps."""
    rig = make_rig(SLOW, max_itl_s=0.4)
    serve_steadily(rig, 0, 4)
    rig.device._cost = StepCost(*[2 * value for value in SLOW])
    serve_steadily(rig, 0, 8)
    first = len(rig.times_s["stream0"])
    serve_steadily(rig, 0, 8)
    assert np.quantile(gaps_s(rig, first), 0.99) <= 0.4


def test_long_prompts_get_smaller_chunks_as_their_context_grows() -> None:
    cost = SLOW._replace(prompt_context_s=1e-6)
    rig = make_rig(cost, max_itl_s=0.5)
    first = len(rig.runner.steps)
    rig.add("long", [index % 97 for index in range(6000)], max_new_tokens=1)
    while "long" not in rig.times_s:
        rig.turn()
    sizes = [step.num_tokens for step in rig.runner.steps[first:] if step.mode is ForwardMode.EXTEND]
    assert sizes[0] > 3 * sizes[-2]
    assert max(rig.gaps_s("stream0")[10:]) <= 0.5


def test_the_way_to_decode_follows_the_machine() -> None:
    """Joining becomes cheap on a machine on which it was dear. The model notices, because it goes on trying."""
    shares = []
    rig = make_rig(SLOW._replace(joined_row_s=2 * SLOW.step_s / NUM_STREAMS), max_itl_s=0.2, radix=False)
    for cost in (None, SLOW):
        if cost is not None:
            rig.device._cost = cost
        serve_steadily(rig, 0, 3)
        first = len(rig.runner.steps)
        serve_steadily(rig, 0, 3)
        shares.append(np.mean([(ids == FROM_DEVICE).any() for ids in input_ids_of(rig, first)]))
    assert shares[0] < 0.2 and shares[1] > 0.8


@settings(deadline=None)
@given(
    kv_lens=st.lists(st.integers(1, 50) | st.integers(1, 50_000), max_size=5),
    gap_s=st.floats(0.05, 2),
    always_join=st.booleans(),
    joined_row_s=st.sampled_from([0.0, 0.003, 0.1]),
    decode_context_s=st.sampled_from([SLOW.decode_context_s, 0.002]),
)
def test_a_running_request_waits_no_longer_than_the_bound(
    kv_lens: list[int], gap_s: float, always_join: bool, joined_row_s: float, decode_context_s: float
) -> None:
    """For one step that has both, or for an extend step and a decode step. No more tokens would have room."""
    cost = SLOW._replace(joined_row_s=joined_row_s, decode_context_s=decode_context_s)
    decodes, req = [make_req([0]) for _ in kv_lens], make_req([0] * 500)
    for one, kv_len in zip(decodes, kv_lens, strict=True):
        one.kv_len = kv_len
    gap = TokenGapBound(gap_s)
    gap.model._cost = cost
    budget = gap.budget(decodes, always_join=always_join)
    num_rows, context = len(decodes), sum(kv_lens) + len(decodes)

    def seconds(count: int) -> float:
        prompt = StepShape.of_prompt(0, count)
        both = prompt.plus(StepShape(True, num_rows, decode_context=context, num_joined=num_rows))
        after_s = cost.row_s + cost.decode_context_s * req.num_tokens  # of the new row in the decode step
        if budget.joins:
            return cost.seconds(both) + after_s
        return cost.seconds(prompt) + cost.seconds(StepShape.of_decode(num_rows, context)) + after_s

    count, planned_s = budget.room(req, 0), gap_s / MIN_MARGIN
    assert budget.joins or not always_join
    assert count == 0 or seconds(count) <= planned_s * (1 + 1e-9)
    assert seconds(count + 1) > planned_s * (1 - 1e-9)


@given(num_tokens=st.integers(0, 10_000), most=st.integers(1, 5000))
def test_decode_steps_follow_as_the_prompts_grow(num_tokens: int, most: int) -> None:
    due = TokenGapBound("auto").decodes_due(num_tokens, most)
    assert 1 <= due <= DECODES_PER_EXTEND
    assert due * most >= min(DECODES_PER_EXTEND * num_tokens, DECODES_PER_EXTEND * most)
    assert due == 1 or (due - 1) * most < DECODES_PER_EXTEND * num_tokens


def test_the_automatic_bound_is_some_decode_steps_on_a_slow_machine() -> None:
    gap = TokenGapBound("auto")
    assert gap._planned_gap_s(AUTO_GAP_S / AUTO_GAP_STEPS / 2) == AUTO_GAP_S
    assert gap._planned_gap_s(1.0) == AUTO_GAP_STEPS


@pytest.mark.parametrize("is_dear", [False, True])
@pytest.mark.parametrize("share", [0.99, 1.01])
def test_the_slower_way_to_decode_is_tried_if_the_bound_has_room_for_the_shortest_step(
    share: float, is_dear: bool
) -> None:
    cost = SLOW._replace(joined_row_s=2 * SLOW.step_s if is_dear else 0.0)
    decodes = [make_req([0] * 10)]
    decode_s = cost.seconds(StepShape.of_decode(1, decodes[0].kv_len + 1))
    gap = TokenGapBound(MIN_MARGIN * (decode_s + share * cost.seconds(StepShape.of_prompt(0, MIN_TOKENS))))
    gap.model._cost = cost
    tried = [gap.budget(decodes, always_join=False).joins == is_dear for _ in range(3 * TRIAL_PERIOD)]
    assert tried == ([False] * (TRIAL_PERIOD - 1) + [share > 1]) * 3
    assert gap.budget(decodes, always_join=True).joins


@pytest.mark.parametrize("cost", [FAST, SLOW, StepCost(*[10 * value for value in SLOW])])
def test_the_automatic_bound_follows_the_decode_steps_of_a_slow_machine(cost: StepCost) -> None:
    limits = {} if cost is FAST else {"max_prefill_tokens": 2048, "chunked_prefill_size": 1024, "overlap": False}
    throughput, p99_s = {}, {}
    for bound in (None, "auto"):
        rig = make_rig(cost, max_itl_s=bound, **limits)
        serve_steadily(rig, 0, 10)
        first = len(rig.times_s["stream0"])
        throughput[bound] = serve_steadily(rig, 0, 20)
        p99_s[bound] = np.quantile(gaps_s(rig, first), 0.99)
    longest_decode_s = cost.seconds(StepShape.of_decode(NUM_STREAMS + 20, 20 * PROMPT_LEN))
    bound_s = max(AUTO_GAP_S, AUTO_GAP_STEPS * longest_decode_s)
    assert p99_s["auto"] <= 1.05 * bound_s < p99_s[None], "it has no margin for errors of predictions"
    assert throughput["auto"] >= 0.95 * throughput[None]


def test_noise_shortens_the_steps_of_a_given_bound_and_not_those_of_the_automatic_one() -> None:
    """A margin for a noisy machine would cost throughput, and the automatic bound promises nothing."""
    num_tokens = {}
    for bound in ("auto", AUTO_GAP_S):
        gap, rng = TokenGapBound(bound), Random(0)
        for _ in range(200):
            shape = StepShape.of_prompt(0, rng.randint(50, 300))
            gap.model.observe(shape, SLOW.seconds(shape) * rng.lognormvariate(0, 0.3))
        time = gap.budget([], always_join=False)
        num_tokens[bound] = time.room(make_req([]), 0)
    assert num_tokens["auto"] == pytest.approx(
        SLOW.prompt_tokens_within(AUTO_GAP_S, StepShape(is_extend=True), 0), rel=0.2
    )
    assert num_tokens["auto"] > 1.3 * num_tokens[AUTO_GAP_S]


def test_the_automatic_bound_begins_with_short_steps_and_grows_with_what_is_measured() -> None:
    """On a fast machine. Nothing has been measured when the first prompt arrives beside a running request."""
    limits = {"pool_size": 65536, "context_len": 32768, "max_prefill_tokens": 16384, "chunked_prefill_size": 8192}
    rig = TimedRig(FAST, max_itl_s="auto", **limits)
    rig.add("stream", [1] * 10, max_new_tokens=4000)
    while "stream" not in rig.times_s:
        rig.turn()
    first = len(rig.runner.steps)
    rig.add("long", [index % 97 for index in range(30_000)], max_new_tokens=1)
    while "long" not in rig.times_s:
        rig.turn()
    sizes = [step.num_tokens for step in rig.runner.steps[first:] if step.mode is ForwardMode.EXTEND]
    assert sizes[0] < 260, "a token is taken to cost 1 ms"
    assert min(sizes[2:-1]) > 4096, "two measured steps are enough"
    assert max(rig.gaps_s("stream")) <= 1.1 * AUTO_GAP_S
