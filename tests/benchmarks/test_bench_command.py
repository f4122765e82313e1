"""`tercet bench`: which benchmarks there are, and that their flags reach them."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tercet import launch_server
from tercet.benchmarks import bench_serving


def test_arguments_go_to_the_benchmark_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(bench_serving, "main", lambda argv: seen.append(argv) or 7)
    for argv in ([], ["--help"], ["--model", "x", "--num-prompts", "3", "--version"]):
        assert launch_server.main(["bench", "serving", *argv]) == 7
        assert seen.pop() == argv


def test_help_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["bench", "--help"], ["bench", "nonsense"]):
        with pytest.raises(SystemExit):
            launch_server.main(argv)
        out, err = capsys.readouterr()
        assert all(name in out + err for name in launch_server._BENCHMARKS)
    with pytest.raises(SystemExit):
        launch_server.main(["bench"])
    assert capsys.readouterr().err.endswith("the following arguments are required: BENCHMARK\n")
    with pytest.raises(SystemExit) as caught:
        launch_server.main(["bench", "serving", "--help"])
    assert caught.value.code == 0
    assert "--request-rate" in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", ["offline", "one-batch", "prefix", "scheduler", "scheduler-cpu", "grammars"])
def test_the_help_of_a_benchmark_shows_no_flag_that_it_refuses(
    capsys: pytest.CaptureFixture[str], benchmark: str
) -> None:
    for argv in (["--help"], ["--port", "80"]):
        with pytest.raises(SystemExit):
            launch_server.main(["bench", benchmark, *argv])
    out, err = capsys.readouterr()
    assert "--page-size" in out and "--port" not in out
    assert "port is a setting of the HTTP server, which this benchmark does not start" in err


@pytest.mark.parametrize("module", [module for module, _ in launch_server._BENCHMARKS.values()])
def test_every_benchmark_has_a_main(module: str) -> None:
    main = importlib.import_module(f"tercet.benchmarks.{module}").main
    assert list(inspect.signature(main).parameters) == ["argv"]
