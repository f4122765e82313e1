"""Models with experts on the compiled operations of a CPU: transformers' logits, and the same bits in every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from mxfp4_models import mxfp4_config, save_mxfp4, write_mxfp4_gguf
from runner_driver import RunnerDriver, relative_error, short_logits
from runners import make_runner, make_settings
from same_bits import assert_every_step_has_the_same_bits
from tiny_models import checkpoint, make_model, reference_logits, save
from transformers_parity import assert_greedy_tokens_equal, assert_logits_equal

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers import packing
from tercet.model_executor.layers.experts import WithSharedExpert
from tercet.model_executor.models.parameters import decoder_parameters, is_expert, router_name, shared_gate_name
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.weights import packed_cache, packed_file
from tercet.model_executor.weights.quantization import quantized_forms
from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.experts_config import ClampedGate, ExpertsConfig, SharedExpert
from tercet.srt.model_files.load_config import load_model_config

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

EXPERTS = ExpertsConfig(num_experts=7, num_experts_per_token=3, intermediate_size=64, normalized=True)
CONFIG_WITH_EXPERTS = replace(CONFIG, architecture="Qwen3MoeForCausalLM", experts=EXPERTS)
CLAMPED = replace(EXPERTS, gate=ClampedGate(1.702, 0.5), has_biases=True)
CONFIGS = {
    "qwen3_moe": CONFIG_WITH_EXPERTS,
    "olmoe": replace(
        CONFIG, architecture="OlmoeForCausalLM", experts=replace(EXPERTS, normalized=False), qk_norm="rows"
    ),
    "qwen2_moe": replace(
        CONFIG,
        architecture="Qwen2MoeForCausalLM",
        experts=replace(EXPERTS, shared=SharedExpert(96, has_gate=True)),
        qkv_bias=True,
    ),
    "glm4_moe": replace(
        CONFIG,
        architecture="Glm4MoeForCausalLM",
        experts=replace(
            EXPERTS, has_sigmoids=True, has_corrections=True, scale=2.5, shared=SharedExpert(64, has_gate=False)
        ),
    ),
    "dots1": replace(
        CONFIG,
        architecture="Dots1ForCausalLM",
        experts=replace(
            EXPERTS, num_experts=12, has_sigmoids=True, has_corrections=True, num_groups=4, groups_per_token=2
        ),
    ),
    "ernie4_5_moe": replace(
        CONFIG,
        architecture="Ernie4_5_MoeForCausalLM",
        experts=replace(EXPERTS, has_corrections=True, float32_router=True, shared=SharedExpert(64, has_gate=False)),
    ),
    "gpt_oss": replace(CONFIG, architecture="GptOssForCausalLM", experts=CLAMPED, qkv_bias=True, o_bias=True),
}
MODELS = [
    "qwen3_moe",
    "qwen3_moe_sparse",
    "mixtral",
    "mixtral_window",
    "gpt_oss",
    "gpt_oss_full",
    "olmoe",
    "olmoe_normalized",
    "granitemoe",
    "granitemoeshared",
    "granitemoeshared_biases",
    "granitemoeshared_none",
    "qwen2_moe",
    "qwen2_moe_all",
    "glm4_moe",
    "glm4_moe_sparse",
    "glm4_moe_groups",
    "dots1",
    "dots1_window",
    "ernie4_5_moe",
    "ernie4_5_moe_sparse",
]


def compiled_runner(runner: ModelRunner) -> ModelRunner:
    from tercet.model_executor.layers.cpu_layers import CpuExperts  # needs the operations

    experts = runner.model.layers[-1].experts
    assert runner.model.compiled
    assert isinstance(experts.routed if isinstance(experts, WithSharedExpert) else experts, CpuExperts)
    return runner


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    config = load_model_config(save(model, tmp_path))
    options = {"dtype": "float32", "max_total_tokens": 400, "max_running_requests": 6, "attention_backend": "cpu"}
    driver = RunnerDriver(compiled_runner(make_runner(config, **options)))
    ids = np.random.default_rng(1).integers(0, 131, 50)
    assert_logits_equal(driver, model, ids)
    assert_greedy_tokens_equal(driver, model, ids[:9])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(str(part) for part in variant if part))
def test_every_step_has_the_same_bits(
    variant: tuple[str, str | None, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)

    def driver(**options: object) -> RunnerDriver:
        runner = make_cpu_runner(variant, CONFIGS[name], max_running_requests=6, **options)
        return RunnerDriver(compiled_runner(runner))

    assert_every_step_has_the_same_bits(driver)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_routers_and_gates_are_not_quantized(quantization: str) -> None:
    config = CONFIGS["qwen2_moe"]
    matrices = {parameter.name for parameter in decoder_parameters(config) if len(parameter.shape) == 2}
    plain = matrices - quantized_forms(config, quantization).keys() - {"embed_tokens.weight", "lm_head.weight"}
    layers = range(config.num_layers)
    assert plain == {*map(router_name, layers), *map(shared_gate_name, layers)}


def test_float16_with_quantized_weights_has_composed_experts() -> None:
    """No compiled operation multiplies the router in float16, so its steps are not recorded."""
    runner = make_cpu_runner(("float16", "int8", 1), CONFIG_WITH_EXPERTS, max_running_requests=6)
    assert not runner.model.compiled and runner._recorded is None
    reference = make_cpu_runner(("float32", "int8", 1), CONFIG_WITH_EXPERTS, max_running_requests=6)
    assert relative_error(short_logits(runner), short_logits(reference)) < 0.02


def test_float16_with_quantized_weights_is_refused_with_clamped_gates() -> None:
    """Before weights are read and packed, which may take minutes."""
    with pytest.raises(
        ModelNotSupported, match=r"with float16 does not support the clamped gates .*: use --dtype bfloat16"
    ):
        make_settings(CONFIGS["gpt_oss"], attention_backend="cpu", dtype="float16", quantization="int8")


@pytest.mark.parametrize("file", ["", "m.gguf"])
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [("float32", None, 1e-4), ("bfloat16", None, 0.06), ("float32", "int8", 0.3)],
)
def test_experts_of_4_bits(dtype: str, quantization: str | None, tolerance: float, file: str, tmp_path: Path) -> None:
    """Their matrices keep their numbers: with quantized rows, as integers of 8 bits."""
    if dtype == "bfloat16" and not torch.ops.tercet_cpu.multiplies_bfloat16():
        pytest.skip("this build widens all numbers to float32")
    model = write_mxfp4_gguf(tmp_path / file) if file else save_mxfp4(tmp_path)
    config = load_model_config(tmp_path / file)
    options = {"max_total_tokens": 400, "max_running_requests": 6, "attention_backend": "cpu"}
    runner = compiled_runner(make_runner(config, dtype=dtype, quantization=quantization, **options))
    assert {form for name, form in runner.settings.weight_forms.items() if is_expert(name)} == {quantization or "e2m1"}
    ids = np.random.default_rng(1).integers(0, 131, 50)
    expected = reference_logits(model, ids.tolist())
    found = RunnerDriver(runner).logits_along(1, ids, [15])
    errors = [relative_error(logits, expected[position]) for position, logits in found.items()]
    assert np.median(errors) < tolerance


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen3_moe_sparse", None),
        ("qwen3_moe_sparse", "int4"),
        ("gpt_oss", None),
        ("granitemoe", "int8"),
        ("olmoe", "int4"),
        ("qwen2_moe", None),
        ("qwen2_moe_all", "int8"),
        ("glm4_moe", None),
        ("dots1", "int8"),
        ("ernie4_5_moe", None),
    ],
)
def test_the_cache_has_packed_experts(
    name: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "bytes_on_huge_pages", lambda memory: memory.nbytes)
    folder = tmp_path / "cache"
    config = mxfp4_config(tmp_path / "model") if name == "gpt_oss" else checkpoint(tmp_path / "model", name)
    options = {"max_total_tokens": 256, "max_running_requests": 3, "attention_backend": "cpu", "dtype": "float32"}

    def runner(**others: object) -> ModelRunner:
        return compiled_runner(make_runner(config, quantization=quantization, **options, **others))

    expected = short_logits(runner())
    assert torch.equal(short_logits(runner(weight_cache=str(folder))), expected)
    assert list(folder.glob("*.packed"))
    monkeypatch.setattr(packing, "on_huge_pages", None)  # nothing is packed again
    monkeypatch.setattr(packed_cache, "write_packed", None)
    assert torch.equal(short_logits(runner(weight_cache=str(folder))), expected)
