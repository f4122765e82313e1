from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_models import TINY, json_of, tiny_flags

from tercet.benchmarks import bench_linears
from tercet.benchmarks.bench_linears import CpuCeilings, Kind, Step
from tercet.benchmarks.ceilings import INT4, TORCH_PRODUCT, Rate
from tercet.benchmarks.results import Result
from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.kinds import TorchLayers, layers_for


def test_every_kind_is_right_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "groups.json"
    path.write_text(json.dumps(TINY | {"intermediate_size": 64}), encoding="utf-8")
    here = list(bench_linears.kinds_here(bench_linears.load_shape(str(path))))
    assert ("int4" in here) == ("fp32" in here)
    flags = ["--model-path", str(path), "--batch-size", "1,3", "--rounds", "2", "--small-ceilings"]
    assert bench_linears.main(flags) == 0
    cases = json_of(capsys)["cases"]
    assert [(one["batch_size"], one["kind"]) for one in cases] == [(rows, kind) for rows in (1, 3) for kind in here]
    for one in cases:
        assert one["seconds"] > 0 and one["limit_s"] > 0 and one["limited_by"]
        bounds = {"int8": 0.02, "int4": 0.2, "bf16": 1e-2, "compact bf16": 1e-2, "oneDNN bf16": 1e-2}
        most = bounds.get(one["kind"].removesuffix(" in fp32").removesuffix(" in bf16"), 1e-5)
        assert most / 1000 < one["relative_error"] < most


def test_a_model_with_experts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_linears.main(["--model-path", "qwen3-30b-a3b"])
    assert "--model-path must be a model without experts" in capsys.readouterr().err


def test_unknown_kinds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_linears.main(["--kinds", "fp32,fp7"])
    assert "fp7" in capsys.readouterr().err


def test_a_prompt_needs_the_head_once() -> None:
    steps = [Step(Kind("k", TorchLayers(), torch.float32), prefill=prefill) for prefill in (False, True)]
    for step in steps:
        heads: list[int] = []
        step.add("w", torch.randn(10, 100))
        step.add("lm_head.weight", torch.randn(7, 100))
        name, width, head = step._layers[-1]
        step._layers[-1] = name, width, lambda x, head=head, heads=heads: heads.append(len(x)) or head(x)
        step.set_inputs({100: torch.randn(50, 100)})
        assert step.seconds() > 0
        assert step.num_ops(50) == 2 * (50 * 1000 + heads[0] * 700)
        assert heads == [1 if step is steps[1] else 50]


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
@pytest.mark.parametrize("prefill", [False, True])
def test_compiled_layers_are_recorded_once(prefill: bool) -> None:
    for layers, calls_later in ((layers_for("cpu", torch.float32), 0), (TorchLayers(), 2)):
        step = Step(Kind("k", layers, torch.float32), prefill=prefill)
        step.add("lm_head.weight", torch.randn(64, 96))
        calls: list[int] = []
        name, width, head = step._layers[0]
        step._layers[0] = name, width, lambda x, head=head, calls=calls: calls.append(len(x)) or head(x)
        step.set_inputs({96: torch.randn(5, 96)})
        recorded = len(calls)
        assert step.seconds() > 0 and step.seconds() > 0
        assert recorded == (0 if calls_later else 1) and len(calls) == recorded + calls_later
        assert set(calls) == {1 if prefill else 5}


def test_the_nearer_ceiling_is_the_limit() -> None:
    step = Step(Kind("k", TorchLayers(), torch.float32))
    step.add("w", torch.randn(10, 100))
    slow, fast = Rate(50.0, TORCH_PRODUCT), Rate(1000.0, "FMA")
    best = CpuCeilings(100.0, {torch.float32: slow}).best(CpuCeilings(50.0, {torch.float32: fast}))
    assert best == CpuCeilings(100.0, {torch.float32: fast})
    assert best.limit(step, 1) == (4000 / 100, "reading")
    assert best.limit(step, 100) == (2 * 100 * 1000 / 1000, "FMA")


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
def test_shares_are_of_the_instruction_for_the_type_that_is_multiplied() -> None:
    float32, int8, int4 = torch.float32, torch.int8, INT4
    layers = layers_for("cpu", float32, quantized=True)
    kinds = [Kind("fp32", TorchLayers(), float32), *(Kind(form, layers, float32, form) for form in ("int8", "int4"))]
    steps = [Step(kind) for kind in kinds]
    for step in steps:
        step.add("w", torch.randn(10, 128))
    result = Result("r", "R", "p", [], torch.device("cpu"))
    rates = {float32: Rate(1e6, "FMA"), int8: Rate(4e6, "VPDPBUSD"), int4: Rate(8e6, "VPMADDUBSW")}
    bench_linears.report(result, steps, {100: [1.0, 1.0, 1.0]}, CpuCeilings(1e12, rates))
    cases = [(case["kind"], case["limit_s"], case["limited_by"]) for case in result.values["cases"]]
    assert cases == [("fp32", 0.256, "FMA"), ("int8", 0.064, "VPDPBUSD"), ("int4", 0.032, "VPMADDUBSW")]
    rows = [row[6:8] for row in result.tables[0].rows]
    assert rows == [["FMA", "25.6 %"], ["VPDPBUSD", "6.4 %"], ["VPMADDUBSW", "3.2 %"]]
    note = "float32 1e-06 TOP/s (FMA), int8 4e-06 TOP/s (VPDPBUSD), int4 8e-06 TOP/s (VPMADDUBSW)"
    assert note in result.tables[0].notes[0]


def test_a_step_multiplies_with_every_matrix_but_the_embedding(tmp_path: Path) -> None:
    config = bench_linears.load_shape(tiny_flags(tmp_path)[1])
    assert "int4" not in bench_linears.kinds_here(config)  # rows of 48
    shapes = bench_linears.weight_shapes(config)
    assert len(shapes) == 4 * 2 + 1 and shapes[-1] == ("lm_head.weight", 131, 32)
    assert ("layers.1.gate_up_proj.weight", 96, 32) in shapes
