"""`tercet bench grammars`, on an engine that answers at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from bench_models import json_of

from tercet.benchmarks import bench_grammars
from tercet.benchmarks.bench_grammars import KNOWN, NEW, NONE
from tercet.benchmarks.grammar_workload import Case

LENGTH_OF_A_RIGHT_OUTPUT = 3


class FakeEngine:
    """Answers "yes" to a grammar, with a number of tokens that depends on the prompt. Keeps all requests."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings["server_args"]
        self.log: list[dict[str, Any] | str] = []
        self.num_running = self.most_running = 0
        self.answer = "yes"

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def flush_cache(self, *, timeout_s: float) -> None:
        self.log.append("flush")

    async def async_generate(self, prompt: str, sampling_params: dict[str, Any]) -> dict[str, Any]:
        self.log.append(sampling_params)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        is_constrained = "regex" in sampling_params
        length = LENGTH_OF_A_RIGHT_OUTPUT if is_constrained else sampling_params["max_new_tokens"]
        reason = "stop" if is_constrained and self.answer != "cut" else "length"
        meta = {"finish_reason": {"type": reason}, "completion_tokens": length}
        return {"text": self.answer, "meta_info": meta}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    made: list[FakeEngine] = []
    fake = FakeEngine(server_args=None)

    def make(**settings: Any) -> FakeEngine:
        made.append(fake)
        fake.settings = settings["server_args"]
        return fake

    clock = itertools.count()
    monkeypatch.setattr(bench_grammars, "Engine", make)
    monkeypatch.setattr(bench_grammars, "engine_args", lambda parser, args: SimpleNamespace(**vars(args), device="cpu"))
    monkeypatch.setattr(
        bench_grammars, "random_case", lambda seed: Case("?", {"regex": "yes"}, lambda text: text == "yes")
    )
    monkeypatch.setattr(bench_grammars, "_cpu_s", lambda: {"scheduler": float(next(clock)), "child": 1.0})
    yield fake
    assert len(made) == 1


FLAGS = ["--model-path", "toy", "--num-streams", "2", "--group-size", "2"]


def test_both_sides_get_the_same_requests_in_turns(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_grammars.main([*FLAGS, "--num-prompts", "3", "--seed", "7"]) == 0
    found = json_of(capsys)
    assert (found["num_checked"], found["num_wrong"]) == (6, 0)
    assert {side: cost["num_tokens"] for side, cost in found["costs"].items()} == {NEW: 9, KNOWN: 9, NONE: 18}
    assert {side: cost["scheduler_s"] for side, cost in found["costs"].items()} == {NEW: 2, KNOWN: 2, NONE: 4}
    assert engine.most_running == 2
    # The warm-up, and then each group: with grammars, twice without, with grammars. Each run begins with a flush.
    runs = [list(run) for is_flush, run in itertools.groupby(engine.log, lambda one: one == "flush") if not is_flush]
    assert [len(run) for run in runs] == [2, 2, 2, 2, 2, 1, 1, 1, 1]
    assert ["regex" in run[0] for run in runs] == [True, *[True, False, False, True] * 2]
    constrained, free = runs[1][0], runs[2][0]
    assert constrained == {"max_new_tokens": 700, "temperature": 0.8, "sampling_seed": 7, "regex": "yes"}
    assert free == {
        "max_new_tokens": LENGTH_OF_A_RIGHT_OUTPUT,
        "temperature": 0.8,
        "sampling_seed": 7,
        "ignore_eos": True,
    }


def test_requests_may_only_be_checked(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_grammars.main([*FLAGS, "--num-prompts", "5", "--num-compared", "0"]) == 0
    found = json_of(capsys)
    assert found["num_checked"] == 5 and found["costs"][NONE]["num_tokens"] == 0
    seeds = [one["sampling_seed"] for one in engine.log if isinstance(one, dict)]
    assert seeds[2:] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("answer", ["no", "cut"])
def test_a_wrong_output_is_an_error(engine: FakeEngine, capsys: pytest.CaptureFixture[str], answer: str) -> None:
    engine.answer = answer
    assert bench_grammars.main([*FLAGS, "--num-prompts", "2", "--num-compared", "0"]) == 1
    out = capsys.readouterr().out
    assert f"wrong: {{'regex': 'yes'}}: '{answer}'" in out and "0.0 %" in out


def test_the_sides_must_have_equal_lengths(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench_grammars, "_free", lambda body, length: {**body, "sampling_params": {"max_new_tokens": 1}}
    )
    with pytest.raises(SystemExit):
        bench_grammars.main([*FLAGS, "--num-prompts", "1"])
    assert "the lengths of the first run" in capsys.readouterr().err


def test_a_group_fits_into_the_cache_of_grammars(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_grammars.main(["--model-path", "toy", "--group-size", "65"])
    assert "--group-size must be between 1 and 64" in capsys.readouterr().err
