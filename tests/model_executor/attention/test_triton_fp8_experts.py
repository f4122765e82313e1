"""A mixture of experts with fp8 weights on Triton: the logits of the torch path, which widens the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_models import DEEPSEEK, change_config, save_pair
from runner_driver import RunnerDriver, relative_error
from runners import make_runner, make_settings
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_wide_experts, save
from transformers import PreTrainedModel, Qwen2MoeConfig

from tercet.model_executor.layers import fp8_layers
from tercet.model_executor.layers.fp8_weight import Fp8Weight, quantize_fp8
from tercet.model_executor.layers.linear import Linear
from tercet.model_executor.models.parameters import expert_names, is_expert, shared_expert_names
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.srt.model_files.load_config import load_model_config

EXPERTS = {name for number in range(3) for name in expert_names(0, number)}


@pytest.fixture
def linear_layers_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other layers than experts round activations on Triton only. Here they do not."""

    def widened(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return Linear(Fp8Weight(values, scales).dequantize(), bias)(x)

    monkeypatch.setattr(fp8_layers, "fp8_linear", widened)


def runner_of(path: Path, backend: str = "triton", load_format: str = "auto", **settings) -> ModelRunner:
    return make_runner(
        load_model_config(path, load_format), attention_backend=backend, dtype="float32", max_total_tokens=64,
        max_running_requests=2, max_prefill_tokens=12, **settings,
    )  # fmt: skip


def logits(runner: ModelRunner) -> torch.Tensor:
    """Of a prompt and of a decode step."""
    driver = RunnerDriver(runner)
    driver.extend({1: [5, 6, 7]}, new_rows=[driver.add(1)])
    driver.decode([1], [7])
    return torch.cat(driver.logits)


def experts_model(inter: int = 20, num_layers: int = 1) -> PreTrainedModel:
    return make_wide_experts(hidden_size=160, moe_intermediate_size=inter, num_hidden_layers=num_layers).bfloat16()


def experts_with_forms(runner: ModelRunner) -> set[str]:
    return set(filter(is_expert, runner.settings.weight_forms))


@pytest.mark.usefixtures("linear_layers_widen")
@pytest.mark.parametrize(("kind", "inter", "num_layers"), [("blocks", 144, 1), ("tensors", 20, 2)])
def test_logits_are_those_of_the_torch_path(kind: str, inter: int, num_layers: int, tmp_path: Path) -> None:
    """In blocks, matrices have several of them in both directions, the last ones incomplete. Of the kind "tensors", the
    second layer is not quantized."""
    fp8, _ = save_pair(tmp_path, kind, model=experts_model(inter, num_layers))
    runner = runner_of(fp8)
    assert experts_with_forms(runner) == EXPERTS
    assert runner.settings.multiplied_dtype == torch.float32  # by most of the layers
    assert relative_error(logits(runner), logits(runner_of(fp8, "torch"))) < 1e-4


@pytest.mark.usefixtures("linear_layers_widen")
def test_shared_experts_have_fp8_weights_and_their_gates_do_not(tmp_path: Path) -> None:
    sizes = {"hidden_size": 160, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 48}
    model = make_wide_experts(Qwen2MoeConfig, **sizes, num_hidden_layers=1).bfloat16()
    fp8, _ = save_pair(tmp_path, "tensors", model=model)
    runner = runner_of(fp8)
    assert {name for name in runner.settings.weight_forms if "shared" in name} == {*shared_expert_names(0)}
    assert relative_error(logits(runner), logits(runner_of(fp8, "torch"))) < 1e-4


def test_weights_rounded_at_load_are_those_that_a_checkpoint_stores(tmp_path: Path) -> None:
    model = experts_model()
    fp8, _ = save_pair(tmp_path, "channels", model=model)
    save(model, tmp_path / "16 bits")
    rounded, stored = runner_of(tmp_path / "16 bits", quantization="fp8"), runner_of(fp8)
    assert experts_with_forms(rounded) == experts_with_forms(stored) == EXPERTS
    assert torch.equal(logits(rounded), logits(stored))
    assert rounded.num_bytes.weights == stored.num_bytes.weights


@pytest.mark.usefixtures("linear_layers_widen")
def test_a_layer_with_an_expert_of_another_type_is_widened(tmp_path: Path) -> None:
    fp8, wide = save_pair(tmp_path, "blocks", model=experts_model())
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors = load_file(fp8 / "model.safetensors")
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: load_file(wide / "model.safetensors")[name]}, fp8 / "model.safetensors")
    change_config(fp8, quantization_config=DEEPSEEK | {"modules_to_not_convert": ["lm_head", name[:-7]]})
    for load_format in ("auto", "dummy"):
        assert not experts_with_forms(runner_of(fp8, load_format=load_format))
    runner = runner_of(fp8)
    assert runner.settings.weight_forms and not experts_with_forms(runner)
    assert relative_error(logits(runner), logits(runner_of(fp8, "torch"))) < 1e-4


@pytest.mark.usefixtures("linear_layers_widen")
def test_experts_of_gpt_oss_are_rounded_at_load(tmp_path: Path) -> None:
    """They have biases, and a clamped gate."""
    model = make_model("gpt_oss")
    save(model, tmp_path / "stored")
    round_matrices(model)
    save(model, tmp_path / "rounded")
    runner = runner_of(tmp_path / "stored", quantization="fp8")
    assert experts_with_forms(runner) > EXPERTS
    # A CPU refuses integer weights with these gates and float16.
    options = {"attention_backend": "triton", "quantization": "fp8", "dtype": "float16"}
    assert make_settings(load_model_config(tmp_path / "stored"), **options).weight_forms
    assert relative_error(logits(runner), logits(runner_of(tmp_path / "rounded", "torch"))) < 1e-4


def round_matrices(model: PreTrainedModel) -> None:
    """Round the matrices of a model of GPT-OSS to fp8. Those of experts are one tensor [experts, inputs, outputs]."""
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = quantize_fp8(parameter.data, "fp8").dequantize()
        elif parameter.dim() == 3:
            parameter.data = torch.stack([quantize_fp8(x.t(), "fp8").dequantize().t() for x in parameter.data])
