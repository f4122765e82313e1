from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_models import json_of, tiny_flags

from tercet.benchmarks import bench_one_batch, timing
from tercet.benchmarks.limits import Ceilings
from tercet.benchmarks.results import Result
from tercet.model_executor import cpu_extension

SMALL = ["--small-ceilings", "--num-steps", "2", "--rounds", "2"]


def test_every_size_is_measured_against_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "1,3", "--context-len", "8,20", "--prefill-len", "5,40"]
    assert bench_one_batch.main([*tiny_flags(tmp_path), *SMALL, *sizes, "--results", str(tmp_path / "out")]) == 0
    found = json_of(capsys)
    assert [one["tokens"] for one in found["prefill"]] == [5, 40]
    decodes = [(one["batch_size"], one["context_len"], one["driver"]) for one in found["decode"]]
    assert decodes == [(b, c, d) for b in (1, 3) for c in (8, 20) for d in ("runner", "scheduler")]
    assert all(one["step_s"] > 0 and one["limit_s"] > 0 for one in found["decode"])
    assert found["failed"] == [] and found["idle"] == []
    assert found["attention_backend"] in ("cpu", "torch") and found["dtype"] == "float32"
    assert len(list((tmp_path / "out").iterdir())) == 2


@pytest.mark.skipif(cpu_extension.load() is None, reason="nothing is recorded without csrc/cpu")
def test_recorded_steps_and_others_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "1,3", "--context-len", "20", "--prefill-len", "5", "--compare-cuda-graph"]
    assert bench_one_batch.main([*tiny_flags(tmp_path), *SMALL, *sizes]) == 0
    by_runner = [one for one in json_of(capsys)["decode"] if one["driver"] == "runner"]
    assert [(one["batch_size"], one["cuda_graph"]) for one in by_runner] == [
        (1, "on"),
        (3, "on"),
        (1, "off"),
        (3, "off"),
    ]
    assert all(one["same_tokens"] for one in by_runner)


@pytest.mark.parametrize(("given", "expected"), [(4, 2), (1, 1)])
def test_the_threads_are_those_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int, expected: int
) -> None:
    """Of two cores with two hardware threads each, torch would take four."""
    seen = []

    def measure(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise ValueError("this is enough")

    monkeypatch.setattr(timing, "usable_cores", lambda: 2)
    monkeypatch.setattr(bench_one_batch, "measure_ceilings", measure)
    before = torch.get_num_threads()
    torch.set_num_threads(given)
    try:
        with pytest.raises(SystemExit):
            bench_one_batch.main(tiny_flags(tmp_path))
    finally:
        torch.set_num_threads(before)
    assert seen == [expected]


def test_what_does_not_fit_is_told_and_costs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "1", "--context-len", "10,4000", "--prefill-len", ""]
    assert bench_one_batch.main([*tiny_flags(tmp_path), *SMALL, *sizes]) == 1
    found = json_of(capsys)
    assert [one["context_len"] for one in found["decode"]] == [10, 10]
    assert len(found["failed"]) == 2 and all("1 x 4000" in line for line in found["failed"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "1"], "port is a setting of the HTTP server"),
        (["--batch-size", "0"], "numbers of at least 1"),
        (["--page-size", "0"], "--page-size must be at least 1"),
        (["--model-path", "gpt-5"], "one of gemma-3-1b"),
    ],
)
def test_wrong_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as left:
        bench_one_batch.main([*tiny_flags(tmp_path), *flags])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_would_be_ignored_or_replaced_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_one_batch.main([*tiny_flags(tmp_path), *SMALL, "--trace", str(tmp_path / "trace.json")])
    assert "--trace needs a GPU" in capsys.readouterr().err
    gpu = torch.device("cuda")
    for file, compares, message in (
        (tmp_path / "trace.json", True, "both runs would write the same file"),
        (tmp_path / "none" / "trace.json", False, "a folder that exists"),
    ):
        with pytest.raises(ValueError, match=message):
            bench_one_batch._check_trace(argparse.Namespace(trace=file, compare_cuda_graph=compares), gpu)


def test_without_a_decode_step_no_idle_time_is_measured() -> None:
    args = bench_one_batch._parser().parse_args(["--batch-size", "", "--prefill-len", ""])
    result = Result("one-batch", "One batch", "program", [], None)
    result.ceilings = Ceilings(1e9, 1e9)
    bench = bench_one_batch._Bench(args, result, cost=None)  # type: ignore[arg-type]  # of steps; there are none
    settings = SimpleNamespace(attention_backend="triton", page_size=64)
    engine = SimpleNamespace(runner=SimpleNamespace(settings=settings), device=torch.device("cuda"))
    bench.run(engine, "on")  # type: ignore[arg-type]
    assert result.values["failed"] == []
