"""The check of the simulator: a real server records its schedule, and a replay decides as it did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_models import json_of
from tiny_models import make_model, save

from tercet.benchmarks import bench_simulation
from tercet.benchmarks.offline_workloads import Span
from tercet.benchmarks.simulator.synthetic import TrafficSettings, prefix_tree


@pytest.mark.e2e
def test_a_server_is_measured_recorded_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_path = save(make_model("llama_31_tied"), tmp_path / "model")

    def small(vocab_size: int, seed: int) -> object:
        settings = TrafficSettings(
            num_requests=12,
            request_rate=float("inf"),
            input_len=Span(5, 20),
            output_len=Span(3, 9),
            vocab_size=vocab_size,
            seed=seed,
        )
        return prefix_tree(settings, levels=1, branching=2, level_len=24, skew=0.0)

    monkeypatch.setenv("TERCET_API_KEY", "secret")  # the server reads it, too
    monkeypatch.setitem(bench_simulation.WORKLOADS, "small", small)  # type: ignore[arg-type]
    assert bench_simulation.main(["--model-path", str(model_path), "--workloads", "small"]) == 0
    found = json_of(capsys)["small"]
    assert found["equal_steps"] == found["steps"] > 12
    assert found["output_throughput"] > 0 < found["simulated_output_throughput"]
    assert found["median_ttft_ms"] > 0 < found["simulated_median_ttft_ms"]


def test_unknown_workloads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_simulation.main(["--workloads", "W1,W9"])
    assert "'W9' is none of W1, W2, tree" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_path = save(make_model("llama_31_tied"), tmp_path / "model")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no memory left'\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert bench_simulation.main(["--model-path", str(model_path), "--workloads", "W1"]) == 1
    assert "W1: the server ended (exit code 3)\nno memory left\n" in capsys.readouterr().err
