"""The time that one extend step has for prompts."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kv_makers import make_req
from timed_rig import FAST, SLOW

from tercet.managers.step_cost import StepCost, StepShape
from tercet.managers.token_gap import TimeBudget

PARTS = st.lists(st.integers(1, 60), min_size=1, max_size=3)


@pytest.mark.parametrize("cost", [SLOW, FAST])
@given(prompts=st.lists(PARTS, min_size=1, max_size=4), num_decodes=st.integers(0, 8), budget_s=st.floats(0.01, 2))
@settings(deadline=None)
def test_a_budget_is_the_time_of_the_step_and_of_the_rows_that_it_adds_to_the_next(
    cost: StepCost, prompts: list[list[int]], num_decodes: int, budget_s: float
) -> None:
    """However many parts a prompt joins in."""
    beside = StepShape(True, num_decodes, decode_context=100 * num_decodes, num_joined=num_decodes)
    budget = TimeBudget(cost, budget_s, beside, joins=True)
    shape, later_s = beside, 0.0
    for number, parts in enumerate(prompts):
        req = make_req([0] * sum(parts), number)
        end = 0
        for length in parts:
            budget.take(req, end, end + length)
            end += length
        shape = shape.plus(StepShape.of_prompt(0, end))
        later_s += cost.row_s + cost.decode_context_s * req.num_tokens
    count = budget.room(req, end)

    def seconds(num_more: int) -> float:
        of_more = StepShape.of_prompt(end, end + num_more)._replace(num_rows=0)
        return later_s + cost.seconds(shape.plus(of_more))

    assert count == 0 or seconds(count) <= budget_s * (1 + 1e-9)
    assert seconds(count + 1) > budget_s * (1 - 1e-9)


@given(num_tokens=st.integers(1, 500), budget_s=st.floats(0.05, 2))
@settings(deadline=None)
def test_another_prompt_brings_a_row_to_the_step_and_to_the_next(num_tokens: int, budget_s: float) -> None:
    budget = TimeBudget(SLOW, budget_s, StepShape(is_extend=True), joins=False)
    first, second = (make_req([0] * num_tokens, number) for number in range(2))
    budget.take(first, 0, 1)
    more, others = budget.room(first, 1), budget.room(second, 1)
    assume(others > 0)
    later_s = SLOW.row_s + SLOW.decode_context_s * num_tokens
    assert more - others == pytest.approx((SLOW.row_s + later_s) / SLOW.prompt_token_s, abs=2)
