"""The time of a step: what a step is described by, the linear cost and its inverse, and the fit to measured steps."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_rig import FAST, SLOW

from tercet.managers.step_cost import PRIOR, StepCost, StepCostModel, StepShape
from tercet.model_executor.step import ForwardMode, StepInputs

EMPTY = StepShape(is_extend=False)


def random_step(rng: Random) -> StepShape:
    if rng.random() < 0.3:
        shape = EMPTY
        for _ in range(rng.randint(1, 3)):
            start = rng.choice([0, 0, 500, 5000, 20000])
            shape = shape.plus(StepShape.of_prompt(start, start + rng.randint(1, 700)))
        return shape
    num_rows = rng.randint(1, 16)
    return StepShape.of_decode(num_rows, num_rows * rng.randint(10, 4000))


def fitted(cost: StepCost, num_steps: int = 200, noise: float = 0.0, seed: int = 0) -> StepCostModel:
    rng = Random(seed)
    model = StepCostModel()
    for _ in range(num_steps):
        shape = random_step(rng)
        model.observe(shape, cost.seconds(shape) * rng.lognormvariate(0, noise))
    return model


def worst_error(model: StepCostModel, cost: StepCost) -> float:
    rng = Random(1)
    shapes = [random_step(rng) for _ in range(200)]
    return max(abs(model.cost.seconds(shape) / cost.seconds(shape) - 1) for shape in shapes)


# Shapes


def make_step(extends: list[tuple[int, int]], decodes: list[tuple[int, int]]) -> StepInputs:
    """`extends`: [start, end) of prompts. `decodes`: cached tokens and drafts of each decoding row."""
    parts = extends + [(cached, cached + 1 + drafts) for cached, drafts in decodes]
    starts, ends = (np.array(column, np.int32) for column in zip(*parts, strict=True))
    return StepInputs(
        mode=ForwardMode.EXTEND,
        rows=np.arange(1, len(parts) + 1, dtype=np.int32),
        seq_lens=ends,
        out_cache_loc=np.ones((ends - starts).sum(), np.int32),
        extend_lens=ends - starts,
    )


@settings(deadline=None)
@given(
    extends=st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 50)), max_size=3),
    decodes=st.lists(st.tuples(st.integers(1, 200_000), st.integers(0, 3)), max_size=3),
)
def test_a_shape_counts_each_token_with_its_context(
    extends: list[tuple[int, int]], decodes: list[tuple[int, int]]
) -> None:
    if not extends and not decodes:
        return
    parts = [(start, start + length) for start, length in extends]
    shape = StepShape.of(make_step(parts, decodes), len(decodes))
    prompts = [position + 1 for start, end in parts for position in range(start, end)]
    drafts = [cached + 2 + index for cached, count in decodes for index in range(count)]
    assert shape.is_extend and shape.num_rows == len(extends) + len(decodes)
    assert (shape.num_prompt_tokens, shape.prompt_context) == (len(prompts + drafts), sum(prompts + drafts))
    assert shape.decode_context == sum(cached + 1 for cached, _ in decodes)
    summed = StepShape(True, len(decodes), len(drafts), sum(drafts), shape.decode_context, len(decodes))
    for start, end in parts:
        summed = summed.plus(StepShape.of_prompt(start, end))
    assert summed == shape


def test_the_shape_of_a_decode_step() -> None:
    lens = np.array([5, 7], np.int32)
    inputs = StepInputs(ForwardMode.DECODE, rows=lens, seq_lens=lens, out_cache_loc=lens)
    assert StepShape.of(inputs, 2) == StepShape.of_decode(2, 12) == StepShape(False, num_rows=2, decode_context=12)


SHAPES = st.builds(StepShape, st.booleans(), *[st.integers(0, 1000)] * 5)


@given(one=SHAPES, other=SHAPES)
def test_shapes_add_up(one: StepShape, other: StepShape) -> None:
    whole = one.plus(other)
    assert whole.is_extend == (one.is_extend or other.is_extend)
    assert whole[1:] == tuple(np.add(one[1:], other[1:]))


@given(shape=SHAPES, cost=st.builds(StepCost, *[st.floats(0, 1)] * 7))
def test_a_step_costs_what_each_part_of_its_work_costs(shape: StepShape, cost: StepCost) -> None:
    assert cost.seconds(shape) == pytest.approx(np.dot(cost, (1, *shape)))


# The inverse


@pytest.mark.parametrize("cost", [SLOW, FAST, PRIOR])
@settings(deadline=None)
@given(budget_s=st.floats(0, 5), start=st.integers(0, 100_000), num_decodes=st.integers(0, 64))
def test_the_tokens_within_a_budget_are_as_many_as_fit(
    cost: StepCost, budget_s: float, start: int, num_decodes: int
) -> None:
    beside = StepShape.of_decode(num_decodes, 500 * num_decodes)
    count = int(cost.prompt_tokens_within(budget_s, beside, start))

    def seconds(count: int) -> float:
        return cost.seconds(beside.plus(StepShape.of_prompt(start, start + count)))

    assert count >= 0
    assert count == 0 or seconds(count) <= budget_s * (1 + 1e-9)
    assert seconds(count + 1) > budget_s * (1 - 1e-9)


def test_tokens_that_cost_nothing_all_fit() -> None:
    assert StepCost(1, 0, 0, 0, 0, 0).prompt_tokens_within(2, EMPTY, 0) == float("inf")
    assert StepCost(1, 0, 0, 0, 0, 0).prompt_tokens_within(0.5, EMPTY, 0) == 0


# The fit


@pytest.mark.parametrize("cost", [SLOW, FAST, SLOW._replace(extend_s=0.1)])
def test_a_linear_cost_is_found(cost: StepCost) -> None:
    assert worst_error(fitted(cost, 60), cost) < 0.01


@pytest.mark.parametrize("cost", [SLOW, FAST])
@pytest.mark.parametrize("seed", range(3))
def test_noise_does_little_and_its_size_is_known(cost: StepCost, seed: int) -> None:
    model = fitted(cost, noise=0.05, seed=seed)
    assert worst_error(model, cost) < 0.15
    assert 0.025 < model.spread(is_extend=True) < 0.1
    assert 0.025 < model.spread(is_extend=False) < 0.1


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(1e-6, 1e3)), max_size=60))
@settings(deadline=None, max_examples=50)
def test_no_times_make_a_cost_negative(steps: list[tuple[int, float]]) -> None:
    model = StepCostModel()
    for seed, seconds in steps:
        model.observe(random_step(Random(seed)), seconds)
        assert all(np.isfinite(value) and value >= 0 for value in model.cost)


def test_steps_of_any_times_can_be_observed() -> None:
    """Beside other programs, times jump by factors of 1000, and the fit may predict 0 for a step."""
    for seed in range(300):
        rng, model = Random(seed), StepCostModel()
        for _ in range(120):
            num_rows, start = rng.randint(0, 6), rng.randint(0, 300)
            shape = StepShape.of_decode(num_rows + 1, (num_rows + 1) * rng.randint(1, 300))
            if rng.random() < 0.5:
                joined = StepShape(True, num_rows, decode_context=num_rows * rng.randint(1, 300), num_joined=num_rows)
                shape = StepShape.of_prompt(start, start + rng.randint(1, 40)).plus(joined)
            model.observe(shape, 10 ** rng.uniform(-4.5, -1.5))
            assert all(np.isfinite(value) and value >= 0 for value in model.cost)


def test_the_cost_of_prompts_survives_any_number_of_decode_steps() -> None:
    model = fitted(FAST, noise=0.02)
    before = FAST.seconds(StepShape.of_prompt(0, 500)), model.cost.seconds(StepShape.of_prompt(0, 500))
    rng = Random(2)
    for _ in range(3000):
        shape = StepShape.of_decode(8, 8 * rng.randint(10, 4000))
        model.observe(shape, FAST.seconds(shape) * rng.lognormvariate(0, 0.02))
    after = model.cost.seconds(StepShape.of_prompt(0, 500))
    assert before[1] == pytest.approx(before[0], rel=0.05)
    assert after == pytest.approx(before[0], rel=0.05)


@pytest.mark.parametrize(("ratio", "most"), [(100, 0.4), (0.01, 0.14)])
def test_an_outlier_does_little(ratio: float, most: float) -> None:
    """`most`: how much it says about the errors of predictions."""
    model = fitted(SLOW)
    shape = StepShape.of_prompt(0, 300)
    model.observe(shape, ratio * SLOW.seconds(shape))
    assert 0.8 * SLOW.seconds(shape) < model.cost.seconds(shape) < 1.2 * SLOW.seconds(shape)
    assert model.spread(is_extend=True) < most + 0.01


def test_a_step_without_time_teaches_nothing() -> None:
    """A coarse clock may say so."""
    model = StepCostModel()
    for _ in range(2 * model.NUM_UNSURE):
        model.observe(StepShape.of_prompt(0, 100), 0.0)
    assert model.cost == PRIOR


def test_decode_steps_are_learned_without_prompts() -> None:
    model, shape = fitted(SLOW), StepShape.of_decode(8, 8 * 500)
    for _ in range(100):
        model.observe(shape, 2 * SLOW.seconds(shape))
    assert model.cost.seconds(shape) == pytest.approx(2 * SLOW.seconds(shape), rel=0.05)


@pytest.mark.parametrize("ratio", [0.01, 0.4, 4.0, 100.0])
@pytest.mark.parametrize("is_extend", [False, True])
def test_a_machine_that_changes_its_speed_is_learned_in_a_few_steps(is_extend: bool, ratio: float) -> None:
    model = fitted(SLOW)
    rng = Random(3)
    # Decode steps are added when the model is solved. The last solution before the change is as late as possible.
    num_steps = model.NUM_FAR if is_extend else model._DECODES_PER_SOLUTION + model.NUM_FAR - 1
    for _ in range(num_steps):
        shape = StepShape.of_prompt(0, rng.randint(100, 500)) if is_extend else StepShape.of_decode(8, 4000)
        model.observe(shape, ratio * SLOW.seconds(shape))
    assert model.cost.seconds(shape) == pytest.approx(ratio * SLOW.seconds(shape), rel=0.1)


@pytest.mark.parametrize("ratios", [(100.0, 100.0, 100.0, 1.0), (100.0, 100.0, 100.0, 0.01)])
def test_steps_far_from_the_predictions_on_both_sides_are_outliers(ratios: tuple[float, ...]) -> None:
    model, shape = fitted(SLOW), StepShape.of_prompt(0, 300)
    for ratio in ratios * 2:
        model.observe(shape, ratio * SLOW.seconds(shape))
        assert model.cost.seconds(shape) < 2 * SLOW.seconds(shape)


def after_short_prompts(ratio: float) -> StepCostModel:
    """The time of its steps was that of their tokens alone. Then a short one took longer by `ratio`."""
    model = StepCostModel()
    for place in range(12):
        num_tokens, seconds = ((10, 0.004), (100, 0.1), (400, 0.4))[place % 3]
        model.observe(StepShape.of_prompt(0, num_tokens), seconds)
    assert model.cost.seconds(UNKNOWN) == 0
    short = StepShape.of_prompt(0, 5)
    model.observe(short, ratio * model.cost.seconds(short))
    assert model.cost.seconds(UNKNOWN) > 0
    return model


UNKNOWN = StepShape(True, 1, decode_context=50, num_joined=1)
"""An extend step without prompts: a request with hidden states decodes."""


@pytest.mark.parametrize("ratio", [2.1, 3.0, 10.0])
def test_a_step_unlike_those_before_the_far_ones_tells_no_change_of_speed(ratio: float) -> None:
    model = after_short_prompts(ratio)
    for shape, seconds in ((UNKNOWN, 0.02), (StepShape.of_prompt(0, 400), 0.4)):
        for _ in range(8):
            model.observe(shape, seconds)
        assert model.cost.seconds(shape) == pytest.approx(seconds, rel=0.1)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([UNKNOWN, *(StepShape.of_prompt(0, count) for count in (1, 10, 400))]),
            st.sampled_from([1e-5, 0.004, 0.1, 0.4, 10.0]),
        ),
        max_size=16,
    )
)
@settings(deadline=None)
def test_any_steps_after_far_ones_are_learned(steps: list[tuple[StepShape, float]]) -> None:
    model = after_short_prompts(3.0)
    for shape, seconds in steps:
        model.observe(shape, seconds)
        assert all(0 <= value < np.inf for value in model.cost)


def test_decode_steps_say_nothing_about_prompts() -> None:
    """Before the first prompt, one of its tokens costs what it did."""
    model = StepCostModel()
    for _ in range(3 * model.NUM_UNSURE):
        model.observe(StepShape.of_decode(4, 2000), 0.01)
    assert model.cost != PRIOR and model.cost.prompt_token_s == pytest.approx(PRIOR.prompt_token_s)


def test_a_change_of_speed_also_holds_for_what_no_step_has_shown() -> None:
    model, shape = StepCostModel(), StepShape.of_decode(4, 2000)
    for ratio in (1, 4):
        for _ in range(3 * model.NUM_UNSURE):
            model.observe(shape, ratio * 0.01)
        assert model.cost.prompt_token_s == pytest.approx(ratio * PRIOR.prompt_token_s)


def test_not_each_decode_step_is_worth_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    model, num_solved = fitted(SLOW), []
    monkeypatch.setattr(model, "_solve", lambda: num_solved.append(1))
    for num_steps, shape, expected in ((10 * 8, StepShape.of_decode(8, 4000), 10), (3, StepShape.of_prompt(0, 9), 3)):
        num_solved.clear()
        for _ in range(num_steps):
            model.observe(shape, SLOW.seconds(shape))
        assert len(num_solved) == expected


def test_the_first_step_of_each_kind_teaches_nothing() -> None:
    model = StepCostModel()
    for shape in (StepShape.of_prompt(0, 100), StepShape.of_decode(1, 100)):
        model.observe(shape, 60.0)
        assert model.cost == PRIOR


def test_a_chunk_size_that_follows_the_model_reaches_its_budget() -> None:
    """Every chunk has the size that the model allows, so the model sees no others. It must not stay too careful."""
    for cost in (SLOW, FAST):
        model = StepCostModel()
        for _ in range(25):
            count = max(min(int(model.cost.prompt_tokens_within(0.25, EMPTY, 0)), 16384), 1)
            shape = StepShape.of_prompt(0, count)
            model.observe(shape, cost.seconds(shape))
        assert cost.seconds(shape) == pytest.approx(0.25, rel=0.03)


def test_the_cost_of_decoding_beside_prompts_is_found() -> None:
    """From steps with and without such rows."""
    cost = SLOW._replace(joined_row_s=0.001)
    model, rng = StepCostModel(), Random(4)
    for place in range(200):
        prompt = StepShape.of_prompt(0, rng.randint(50, 500))
        num_rows = rng.randint(1, 16)
        beside = StepShape(True, num_rows, decode_context=num_rows * rng.randint(10, 4000), num_joined=num_rows)
        for shape in (prompt.plus(beside) if place % 4 else prompt, beside._replace(is_extend=False, num_joined=0)):
            model.observe(shape, cost.seconds(shape))
    assert model.cost.joined_row_s == pytest.approx(0.001, rel=0.1)
