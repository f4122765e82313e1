"""A mixture of experts on a real GPU: its kernels against float64, and a tiny model against plain torch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from expert_groups import exact_corrections, exact_rows
from expert_layers import GATE, draw_layer, draw_rows, fp8_pair
from fused_cases import same_bits
from gpu_runners import LLAMA, make_runner
from runner_driver import RunnerDriver, relative_error

from tercet.model_executor.kernels.expert_choice import choose_experts, choose_experts_ref
from tercet.model_executor.layers.fp8_weight import Fp8Weight
from tercet.model_executor.weights import loader
from tercet.model_executor.weights.loader import stored_fp8_forms
from tercet.srt.model_files.experts_config import ExpertsConfig
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.quantization_config import Fp8Config

pytestmark = pytest.mark.gpu

EXPERTS = ExpertsConfig(num_experts=16, num_experts_per_token=4, intermediate_size=128, normalized=True)
CONFIG = dataclasses.replace(LLAMA, architecture="Qwen3MoeForCausalLM", qk_norm="heads", experts=EXPERTS)
FP8 = dataclasses.replace(CONFIG, quantization=Fp8Config(by_block=True, excluded=("re:.*self_attn",)))
"""Only its experts are fp8: linear layers with fp8 weights round activations, too."""


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("clamped", [False, True])
def test_a_layer_is_the_twin_and_no_row_depends_on_the_batch(dtype: torch.dtype, allowed: float, clamped: bool) -> None:
    kind = {"biased": True, "gate": GATE} if clamped else {}
    layer = draw_layer(1, 16, 4, 512, 192, dtype, device="cuda", **kind)
    x = draw_rows(2, 700, 512, dtype, "cuda")  # the higher tile begins at 512 tokens
    whole = layer.run(x)
    for rows in (slice(0, 1), slice(5, 35), slice(100, 300)):
        assert same_bits(layer.run(x[rows]), whole[rows])
    assert layer.error(x[:60]) <= allowed


@pytest.mark.parametrize("sigmoids", [False, True])
@pytest.mark.parametrize("rows", [5, 700])
def test_a_choice_of_groups_is_the_twins(rows: int, sigmoids: bool) -> None:
    """With the shape of DeepSeek V3."""
    logits, router = exact_rows(1, rows, 256).cuda(), torch.eye(256, device="cuda")
    options = {"normalized": True, "tile_rows": 32, "num_groups": 8, "groups_per_token": 4}
    if sigmoids:
        options |= {"sigmoids": True, "corrections": exact_corrections(2, 256).cuda(), "scale": 2.5}
    found, expected = (choose(logits, router, 8, **options) for choose in (choose_experts, choose_experts_ref))
    assert torch.equal(found.experts, expected.experts) and torch.equal(found.order, expected.order)
    assert torch.allclose(found.weights, expected.weights, rtol=1e-5)


@pytest.mark.parametrize("form", ["fp8", "fp8_block"])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
def test_fp8_weights_compute_as_the_weights_that_they_stand_for(dtype: torch.dtype, allowed: float, form: str) -> None:
    fp8, wide = fp8_pair(draw_layer(1, 16, 4, 512, 192, dtype, device="cuda", biased=True, gate=GATE), form)
    x = draw_rows(2, 700, 512, dtype, "cuda")
    whole, expected = fp8.run(x), wide.expected(x[:60])
    for rows in (slice(0, 1), slice(5, 35), slice(100, 300)):
        assert same_bits(fp8.run(x[rows]), whole[rows])
    assert (whole[:60].double() - expected).abs().max() <= allowed * expected.abs().max()


@pytest.mark.parametrize("config", [CONFIG, FP8], ids=["float32", "fp8"])
@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_logits_are_those_of_plain_torch(
    disable_cuda_graph: bool, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = loader._dummy

    def drawn_on_a_cpu(config, dtypes, device, seed, forms, *rest):
        if config.quantization is not None:
            forms = stored_fp8_forms(config)
        made = draw(config, dtypes, torch.device("cpu"), seed, forms, *rest)
        if device.type == "cpu":  # its layers have no fp8
            return {name: x.dequantize() if isinstance(x, Fp8Weight) else x for name, x in made.items()}
        return {name: tensor.to(device) for name, tensor in made.items()}

    monkeypatch.setattr(loader, "_dummy", drawn_on_a_cpu)
    monkeypatch.setattr(loader, "_DUMMY_STD", 0.1)
    ids = np.random.default_rng(3).integers(0, 4099, 150)
    options = {"dtype": "float32", "max_running_requests": 4}
    on_gpu = RunnerDriver(make_runner(config, disable_cuda_graph=disable_cuda_graph, **options))
    on_cpu = RunnerDriver(make_runner(config, device="cpu", **options))
    found, expected = (driver.logits_along(1, ids, [100, 1, 40]) for driver in (on_gpu, on_cpu))
    assert found.keys() == expected.keys()
    for position, logits in expected.items():
        assert relative_error(found[position].cpu(), logits) < 1e-3, position
