from __future__ import annotations

from collections.abc import Sequence

import pytest

from tercet.benchmarks.rounds import Round, Side, median_seconds, run_alternating, warmups
from tercet.benchmarks.workloads import Request

REQUESTS = [Request([1, 2], 2, 3), Request([4], 1, 20)]


class Fake:
    def __init__(self, name: str, log: list[str], short: int = 0) -> None:
        self._name, self._log, self._short = name, log, short

    def run(self, requests: Sequence[Request]) -> Round:
        self._log.append(self._name)
        return Round(len(self._log), [[0] * (one.output_len - self._short) for one in requests])


def test_sides_take_turns_in_alternating_order() -> None:
    log: list[str] = []
    sides: dict[str, Side] = {"a": Fake("a", log), "b": Fake("b", log)}
    rounds = run_alternating(sides, REQUESTS, 3)
    assert log == ["a", "b", "b", "a", "a", "b"]
    assert [one.seconds for one in rounds["a"]] == [1, 4, 5]
    assert median_seconds(rounds["a"]) == 4 and median_seconds(rounds["b"]) == 3


def test_short_answers_are_no_result() -> None:
    with pytest.raises(ValueError, match=r"cheat: 2 answers .* one has 2 tokens instead of 3"):
        run_alternating({"cheat": Fake("cheat", [], short=1)}, REQUESTS, 1)


def test_warm_ups_have_the_same_prompts_and_short_answers() -> None:
    assert warmups(REQUESTS) == [Request([1, 2], 2, 3), Request([4], 1, 8)]
