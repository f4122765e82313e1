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


def test_a_side_that_fails_costs_the_first_one_nothing() -> None:
    log: list[str] = []
    told: list[tuple[str, str]] = []
    sides: dict[str, Side] = {"ours": Fake("ours", log), "peer": Fake("peer", log, short=1)}
    rounds = run_alternating(sides, REQUESTS, 3, lambda name, error: told.append((name, str(error))))
    assert list(rounds) == ["ours"] and len(rounds["ours"]) == 3
    assert log == ["ours", "peer", "ours", "ours"], "it runs no more"
    ((name, message),) = told
    assert name == "peer" and "2 answers" in message
    with pytest.raises(ValueError, match="ours: 2 answers"):
        run_alternating({"ours": Fake("ours", [], short=1)}, REQUESTS, 1, lambda name, error: None)


def test_warm_ups_have_the_same_prompts_and_short_answers() -> None:
    assert warmups(REQUESTS) == [Request([1, 2], 2, 3), Request([4], 1, 8)]
