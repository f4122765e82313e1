"""`tercet bench`: which benchmarks there are, and that their flags reach them."""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path

import pytest

from tercet import commands
from tercet.benchmarks import bench_serving


def test_arguments_go_to_the_benchmark_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(bench_serving, "main", lambda argv: seen.append(argv) or 7)
    for argv in ([], ["--help"], ["--model", "x", "--num-prompts", "3", "--version"]):
        assert commands.main(["bench", "serving", *argv]) == 7
        assert seen.pop() == argv


def test_help_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["bench", "--help"], ["bench", "nonsense"]):
        with pytest.raises(SystemExit):
            commands.main(argv)
        out, err = capsys.readouterr()
        assert all(name in out + err for name in commands._BENCHMARKS)
    with pytest.raises(SystemExit):
        commands.main(["bench"])
    assert capsys.readouterr().err.endswith("the following arguments are required: BENCHMARK\n")
    with pytest.raises(SystemExit) as caught:
        commands.main(["bench", "serving", "--help"])
    assert caught.value.code == 0
    assert "--request-rate" in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", ["offline", "one-batch", "prefix", "scheduler", "scheduler-cpu", "grammars"])
def test_the_help_of_a_benchmark_shows_no_flag_that_it_refuses(
    capsys: pytest.CaptureFixture[str], benchmark: str
) -> None:
    for argv in (["--help"], ["--port", "80"]):
        with pytest.raises(SystemExit):
            commands.main(["bench", benchmark, *argv])
    out, err = capsys.readouterr()
    assert "--page-size" in out and "--port" not in out
    assert "port is a setting of the HTTP server, which this benchmark does not start" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["offline", "--input-len", "5-3"], "--input-len: must be N or A-B with 1 <= A <= B, got '5-3'"),
        (["scheduler", "--turns", "x"], "--turns: must be N or A-B with 1 <= A <= B, got 'x'"),
        (["one-batch", "--batch-size", "a"], "--batch-size: must be N or A,B,... with numbers of at least 1, got 'a'"),
        (["linears", "--batch-size", "1,0"], "with numbers of at least 1, got '1,0'"),
        (["linears", "--batch-size", ""], "--batch-size must name a number"),
        (["speculation", "--batch-size", ""], "--batch-size must name a number"),
        (["one-batch", "--batch-size", "", "--prefill-len", ""], "nothing to measure: --prefill-len must name"),
        (["one-batch", "--context-len", "", "--prefill-len", ""], "nothing to measure: --prefill-len must name"),
        (["scheduler", "--policies", ""], "--policies: '' is none of"),
        (["scheduler", "--eviction-policies", ""], "--eviction-policies: '' is none of"),
        (["scheduler", "--planners", ""], "--planners: '' is none of"),
        (["scheduler", "--input-len", "99999999"], "--input-len must give prompts below the context"),
        (
            ["scheduler", "--traffic", "agents", "--tool-len", "1-8192"],
            "--tool-len must give prompts below the context",
        ),
        (["scheduler", "--traffic", "prefix-tree", "--tree-level-len", "4096"], "of 8192 tokens, got 8192 tokens"),
        (["kernels", "--only", "decode,x"], "--only: 'x' is none of decode, extend, small, linear"),
        (["kernels", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (
            ["grammars", "--num-prompts", "5", "--num-compared", "6"],
            "--num-compared must be at most --num-prompts 5, got 6",
        ),
        (["grammars", "--num-prompts", "0"], "--num-prompts: must be at least 1, got 0"),
        (["prefix", "--rounds", "0"], "--rounds: must be at least 1, got 0"),
        (["quantization", "--window", "0"], "--window: must be at least 1, got 0"),
        (["startup", "--rounds", "0"], "--rounds: must be at least 1, got 0"),
        (["startup", "--ready-timeout-s", "nan"], "--ready-timeout-s: must be above 0 and finite, got nan"),
        (["compare", "--models", "x", "--timeout-s", "-1"], "--timeout-s: must be above 0 and finite, got -1"),
        (["compare", "--models", "x", "--max-other-load", "nan"], "must be finite and not negative, got nan"),
        (["startup", "--port", "80"], "--port has no effect: the server listens on 127.0.0.1 and a free port"),
        (["startup", "nowhere", "--host=::1"], "--host=::1 has no effect"),
        (["serving", "--num-prompts", "few"], "--num-prompts: must be a whole number, got 'few'"),
        (["serving", "--request-rate", "fast"], "--request-rate: must be a number, got 'fast'"),
        (["serving", "--goodput", "ttft:soon"], "--goodput: must be a number, got 'soon'"),
        (["serving", "--port", "0"], "--port: must be at least 1, got 0"),
        (["serving", "--dataset-path", "nowhere.json"], "--dataset-path: nowhere.json does not exist"),
        (["scheduler", "--results", __file__], f"--results: {__file__!r} is no folder"),
        (["compare", "--models", "x", "--logs", __file__], f"--logs: {__file__!r} is no folder"),
        (["scheduler", "--results", f"{__file__}/new"], f"--results: {__file__!r} is no folder"),
        (["scheduler", "--results", "x" * 300], "--results: [Errno 36] File name too long"),
        (["scheduler", "--save-cost", "x" * 300], "--save-cost: [Errno 36] File name too long"),
        (["scheduler", "--plot", "x" * 300], "--plot: [Errno 36] File name too long"),
        (["serving", "--output-file", "x" * 300], "--output-file: [Errno 36] File name too long"),
        (["serving", "--dataset-path", "x" * 300], f"--dataset-path: {'x' * 300} does not exist"),
        (["offline", "--model-path", "x" * 300], "--model-path must be a path or one of"),
        (["scheduler", "--replay", "nowhere"], "error: cannot read nowhere: No such file or directory"),
        (["scheduler", "--cost", "x" * 300], "[Errno 36] File name too long"),
        (["scheduler", "--cost", "/proc/self/mem"], "--cost /proc/self/mem: [Errno 5] Input/output error"),
        (["scheduler", "--max-concurrency", "9" * 20], f"--max-concurrency must be at most 1000000, got {'9' * 20}"),
    ],
)
def test_a_wrong_value_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        commands.main(["bench", *argv])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serving", "--output-file", "result"], "--output-file must name a file that can be written, got 'result'"),
        (["scheduler", "--save-cost", "cost"], "--save-cost must name a file that can be written, got 'cost'"),
        (["startup", "--results", "."], "--results: '.' cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SystemExit):
        commands.main(["bench", *argv])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", ["grammars", "kernels", "linears", "offline", "one-batch", "prefix"])
def test_a_folder_without_a_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], benchmark: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tiny = ["--tiny"] if benchmark == "kernels" else []
    with pytest.raises(SystemExit) as caught:
        commands.main(["bench", benchmark, *tiny, "--model-path", str(tmp_path)])
    assert caught.value.code == 2
    assert f"error: '{tmp_path}/config.json' is missing" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "module"), [(name, one) for name, (one, _) in commands._BENCHMARKS.items()])
def test_every_benchmark_has_a_main_and_calls_itself_as_the_user_does(
    name: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"tercet.benchmarks.{module}").main
    assert list(inspect.signature(main).parameters) == ["argv"]
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: tercet bench {name} ") and "python -m" not in said
