"""Cases of which a usual run takes some."""

from __future__ import annotations

import pytest
import some_cases
from some_cases import crossed


@pytest.mark.parametrize("each", [1, 2])
def test_every_entry_is_taken_and_only_all_cases_take_every_pair(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, kinds = "abcde", [0, 1, 2]
    monkeypatch.setattr(some_cases, "ALL_CASES", False)
    few = crossed(cases, kinds, each=each)
    assert len(few) == len(set(few)) == each * 5
    assert {case for case, _ in few} == set(cases) and {kind for _, kind in few} == set(kinds)
    monkeypatch.setattr(some_cases, "ALL_CASES", True)
    assert set(few) < set(crossed(cases, kinds, each=each)) == {(case, kind) for case in cases for kind in kinds}
