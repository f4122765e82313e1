"""Cases of which a usual run takes some."""

from __future__ import annotations

import pytest
import some_cases
from hypothesis import given
from hypothesis import strategies as st
from some_cases import covering, crossed


@pytest.mark.parametrize("each", [1, 2])
def test_every_entry_is_taken_and_only_all_cases_take_every_pair(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, kinds = "abcde", [0, 1, 2]
    monkeypatch.setattr(some_cases, "ALL_CASES", False)
    few = crossed(cases, kinds, each=each)
    assert len(few) == len(set(few)) == each * 5
    assert {case for case, _ in few} == set(cases) and {kind for _, kind in few} == set(kinds)
    monkeypatch.setattr(some_cases, "ALL_CASES", True)
    assert set(few) < set(crossed(cases, kinds, each=each)) == {(case, kind) for case in cases for kind in kinds}


@given(st.lists(st.sets(st.integers(0, 9), min_size=1)))
def test_the_chosen_cases_have_every_aspect(aspects: list[set[int]]) -> None:
    cases = range(len(aspects))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(some_cases, "ALL_CASES", False)
        few = covering(cases, aspects.__getitem__)
        assert few == sorted(set(few))
        assert set().union(*(aspects[case] for case in few)) == set().union(*aspects)
        assert len(few) <= len(set().union(*aspects)), "each case adds an aspect"
        patch.setattr(some_cases, "ALL_CASES", True)
        assert covering(cases, aspects.__getitem__) == list(cases)
