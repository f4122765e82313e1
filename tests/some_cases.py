"""Tables of cases that are too many for a usual run. It takes some of them, and TERCET_ALL_CASES=1 takes all."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

ALL_CASES = os.environ.get("TERCET_ALL_CASES") == "1"

_A = TypeVar("_A")
_B = TypeVar("_B")


def crossed(cases: Sequence[_A], kinds: Sequence[_B], *, each: int) -> list[tuple[_A, _B]]:
    """Every case with `each` of the kinds, which take turns. With TERCET_ALL_CASES=1, every case with every kind."""
    num = len(kinds) if ALL_CASES else each
    return [(case, kinds[(index + step) % len(kinds)]) for index, case in enumerate(cases) for step in range(num)]


def covering(cases: Sequence[_A], aspects: Callable[[_A], Iterable[Hashable]]) -> list[_A]:
    """Few of the cases, which together have every aspect of all cases. With TERCET_ALL_CASES=1, every case."""
    if ALL_CASES:
        return list(cases)
    of_case = [set(aspects(case)) for case in cases]
    missing: set[Hashable] = set().union(*of_case)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(of_case[index] & missing))
        chosen.add(best)
        missing -= of_case[best]
    return [cases[index] for index in sorted(chosen)]
