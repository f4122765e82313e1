from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_models import tiny_flags
from toy_engine import environment

from tercet.benchmarks.bench_kernels import KernelBench
from tercet.benchmarks.kernel_case import Case, CaseMaker
from tercet.benchmarks.limits import Ceilings
from tercet.benchmarks.results import Result

CPU = torch.device("cpu")


def test_every_kernel_passes_its_check_in_the_interpreter(tmp_path: Path) -> None:
    command = ["-m", "tercet.benchmarks.bench_kernels", "--tiny", "--check-only", "--device", "cpu"]
    ran = subprocess.run(
        [sys.executable, *command, *tiny_flags(tmp_path)[:2]],
        env=environment(tmp_path, TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["failed"] == []
    assert {one["kernel"] for one in found["cases"]} == {
        "decode attention",
        "extend attention",
        "rmsnorm + residual",
        "silu and mul",
        "rotary + store KV",
        "store KV",
        "greedy argmax",
        "sample top-k top-p min-p",
        "sample from all",
    }


def bench(check_only: bool = False) -> tuple[KernelBench, Result]:
    result = Result("kernels", "Kernels", "test", [], CPU)
    return KernelBench(result, Ceilings(1e9, 1e12), CPU, check_only=check_only), result


def case() -> Case:
    def refuses() -> None:
        raise RuntimeError("not on this device")

    x = torch.randn(64)
    return Case(1000, 2_000_000, [lambda: x + 1], {"torch": [lambda: x + 1], "other": [refuses]})


def test_a_right_kernel_is_scored_against_the_nearer_ceiling() -> None:
    runs, result = bench()
    runs.run(CaseMaker("k", "m, 1", case, lambda: 0.001))
    (found,) = result.values["cases"]
    assert found["limit_s"] == max(1000 / 1e9, 2_000_000 / 1e12)
    assert found["seconds"] > 0 and list(found["torch_s"]) == ["torch"]
    assert not runs.failed


@pytest.mark.parametrize("error", [0.02, float("nan")])
def test_a_wrong_kernel_is_not_timed(error: float) -> None:
    runs, result = bench()
    runs.run(CaseMaker("k", "m, 1", case, lambda: error))
    runs.close()
    assert result.values["cases"] == [] and "k, m, 1: wrong" in runs.failed[0]


def test_a_kernel_that_breaks_does_not_keep_the_others_from_running() -> None:
    def breaks() -> Case:
        raise RuntimeError("out of something")

    runs, result = bench()
    runs.run(CaseMaker("broken", "m, 1", breaks, None))
    runs.run(CaseMaker("k", "m, 1", case, None))
    assert runs.failed == ["broken, m, 1: RuntimeError: out of something"]
    assert [one["kernel"] for one in result.values["cases"]] == ["k"]


def test_a_check_is_done_once_for_all_shapes_of_a_model() -> None:
    checked = []
    runs, result = bench(check_only=True)
    for shape in ("a, 1", "a, 2", "b, 1"):
        runs.run(CaseMaker("k", shape, case, lambda shape=shape: checked.append(shape) or 0.0))
    assert checked == ["a, 1", "b, 1"] and len(result.values["cases"]) == 3
