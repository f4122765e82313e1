"""Tables of cases that are too many for a usual run. It takes some of them, and TERCET_ALL_CASES=1 takes all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

ALL_CASES = os.environ.get("TERCET_ALL_CASES") == "1"

_A = TypeVar("_A")
_B = TypeVar("_B")


def crossed(cases: Sequence[_A], kinds: Sequence[_B], *, each: int) -> list[tuple[_A, _B]]:
    """Every case with `each` of the kinds, which take turns. With TERCET_ALL_CASES=1, every case with every kind."""
    num = len(kinds) if ALL_CASES else each
    return [(case, kinds[(index + step) % len(kinds)]) for index, case in enumerate(cases) for step in range(num)]
