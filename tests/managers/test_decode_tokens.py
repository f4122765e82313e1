"""What a decode step computes of each request: its newest token or forced ones, and drafts after them."""

from __future__ import annotations

from typing import Any

import pytest
from fake_proposers import EachProposer
from hypothesis import given
from hypothesis import strategies as st
from kv_makers import make_req
from scripted_grammar import answer, new_tokens, scripted

from tercet.managers.decode_tokens import draft_ids, known_ids
from tercet.managers.req import Req
from tercet.model_executor.step import FROM_DEVICE
from tercet.srt.io_struct import StopFinish

TEXT = [None, 1, 2, 3, None, None, 4, 5, None]
PROMPT = [1, 2]
EXPECTED = answer(PROMPT, TEXT)


def drafting(right: list[int], num_drafts: int) -> EachProposer:
    """Proposes the next tokens of "r". It must be asked only where they follow the last known token."""
    return EachProposer(
        lambda req, limit: right[len(req.output_ids) :][: min(num_drafts, limit)] if req.rid == "r" else []
    )


def run(monkeypatch: pytest.MonkeyPatch, num_drafts: int, **options: Any) -> list[tuple[list[int], list[int]]]:
    """The new tokens and the drafts of each row of each step."""
    rig = scripted(monkeypatch, TEXT, overlap=False, proposer=drafting(EXPECTED, num_drafts), **options)
    rig.add("r", PROMPT, max_new_tokens=10, regex="1")
    rig.add("free", [3, 4], max_new_tokens=4, ignore_eos=True)
    rig.run()
    assert rig.heard["r"].ids == EXPECTED and rig.heard["r"].finish == StopFinish(EXPECTED[-1])
    steps = rig.runner.steps
    drafts = [[0] * len(step.rows) if step.num_drafts is None else step.num_drafts.tolist() for step in steps]
    return list(zip(new_tokens(steps), drafts, strict=True))


def test_drafts_follow_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step has a gap, three forced tokens and two gaps as drafts. The third has two more forced tokens, and
    the last gap as a draft. The other request decodes beside them."""
    assert run(monkeypatch, 2) == [([2, 2], [0, 0]), ([6, 1], [2, 0]), ([3, 1], [1, 0]), ([1], [0])]
    assert run(monkeypatch, 0) == [([2, 2], [0, 0]), ([4, 1], [0, 0]), ([1, 1], [0, 0]), ([3, 1], [0, 0])]


def test_where_memory_is_short_drafts_are_left_out_before_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have 4 slots. The step needs 5 more, and 4 for drafts."""
    with_drafts, without = ([8, 1], [4, 0]), ([4, 1], [0, 0])
    steps = run(monkeypatch, 4, conservativeness=0.01)
    assert with_drafts in steps and without not in steps
    steps = run(monkeypatch, 4, conservativeness=0.01, pool_size=12)
    assert without in steps and with_drafts not in steps


def test_a_step_with_forced_tokens_and_drafts_has_the_tokens_of_a_step_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    right = [*EXPECTED[:-1], *[9] * 20]
    monkeypatch.setattr("tercet.managers.planner.MAX_VERIFIED_TOKENS", 6)
    rig = scripted(monkeypatch, TEXT, overlap=False, proposer=drafting(right, 3), max_prefill_tokens=6)
    rig.add("r", PROMPT, max_new_tokens=20, regex="1")
    rig.run()
    assert rig.heard["r"].ids == EXPECTED
    assert new_tokens(rig.runner.steps)[1] == [4], "7 would be too many"


def test_a_step_with_forced_tokens_teaches_nothing_about_the_cost_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(EachProposer, "observe", lambda self, *numbers: seen.append(numbers[:2]))
    run(monkeypatch, 2)
    assert seen == [(1, 1)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 12), st.booleans())
def test_requests_compute_their_newest_token_or_forced_ones_up_to_the_limit(
    num_known: list[int], more: int, constrained: bool
) -> None:
    reqs = [_req(index, num, constrained=constrained) for index, num in enumerate(num_known)]
    known = known_ids(reqs, len(reqs) + more)
    assert sum(map(len, known)) == min(sum(num_known) if constrained else len(reqs), len(reqs) + more)
    for req, num, ids in zip(reqs, num_known, known, strict=True):
        assert list(ids) in ([FROM_DEVICE], req.output_from(req.kv_len)[: len(ids)]) and 1 <= len(ids) <= num
    limits: list[int] = []
    draft_ids(reqs, known, EachProposer(lambda req, limit: limits.append(limit) or []))
    ends = [req.kv_len + len(ids) for req, ids in zip(reqs, known, strict=True)]
    complete = [not constrained or end == req.num_tokens for req, end in zip(reqs, ends, strict=True)]
    assert limits == [req.max_kv_len - end for req, end, last in zip(reqs, ends, complete, strict=True) if last]


def test_penalties_and_hidden_states_have_their_own_steps() -> None:
    """The device counts what it samples, and hidden states of rejected drafts would have to be dropped."""
    penalised, hidden = _req(0, 4, constrained=True, frequency_penalty=0.5), _req(1, 4, constrained=True)
    hidden.hidden = object()  # type: ignore[assignment]
    known = known_ids([penalised, hidden], 100)
    assert [len(ids) for ids in known] == [1, 4]
    asked: list[Req] = []
    draft_ids([penalised, hidden], known, EachProposer(lambda req, limit: asked.append(req) or []))
    assert asked == []


def _req(index: int, num_known: int, *, constrained: bool, **sampling: Any) -> Req:
    """A request that has computed its prompt of 5 tokens, and `num_known` output tokens follow."""
    req = make_req(range(5), index, output=range(30, 30 + num_known), max_new_tokens=30, **sampling)
    req.kv_len = 5
    if constrained:
        req.grammar = object()  # type: ignore[assignment]
    return req
