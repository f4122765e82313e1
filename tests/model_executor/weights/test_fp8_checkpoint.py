"""Checkpoints with fp8 weights: read exactly, widened where no kernel takes them, and refused by name."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from fp8_models import COMPRESSED, CONFIGS, DEEPSEEK, change_config, rounded, save_pair
from hypothesis import given
from hypothesis import strategies as st
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from safetensors.torch import load_file, save_file
from tiny_configs import BASE
from tiny_models import make_model, make_wide_experts
from transformers import LlamaConfig

from tercet.model_executor import cpu_extension
from tercet.model_executor.kernels.fp8_layout import FP8_BLOCK, FP8_MAX
from tercet.model_executor.layers.fp8_weight import Fp8Weight, quantize_fp8
from tercet.model_executor.models.parameter import Shard
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.weights.loader import checkpoint_dtype, load_parameters, stored_fp8_forms
from tercet.model_executor.weights.quantization import parameter_bytes
from tercet.srt.model_files.load_config import load_model_config

CPU = torch.device("cpu")
GATE_UP = "layers.0.gate_up_proj.weight"


def logits(path: Path, backend: str, dtype: str) -> torch.Tensor:
    config = load_model_config(path)
    return played(make_runner(config, attention_backend=backend, dtype=dtype, max_total_tokens=64))


def played(runner: ModelRunner) -> torch.Tensor:
    """The logits of a prompt and of a decode step."""
    driver = RunnerDriver(runner)
    driver.extend({1: list(range(5, 25))}, new_rows=[driver.add(1)])
    driver.decode([1], [7])
    return torch.cat(driver.logits)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_computes_with_the_numbers_that_its_weights_stand_for(kind: str, backend: str, tmp_path: Path) -> None:
    if backend == "cpu" and cpu_extension.load() is None:
        pytest.skip("no build of csrc/cpu for this processor")
    fp8, wide = save_pair(tmp_path, kind)
    assert torch.equal(logits(fp8, backend, "float32"), logits(wide, backend, "float32"))
    # In bfloat16 both round the same numbers.
    assert relative_error(logits(fp8, backend, "bfloat16"), logits(wide, backend, "bfloat16")) == 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_experts_of_fp8_and_a_router_that_is_not(kind: str, tmp_path: Path) -> None:
    model = make_wide_experts(moe_intermediate_size=288).bfloat16()
    fp8, wide = save_pair(tmp_path, kind, model=model)
    forms = stored_fp8_forms(load_model_config(fp8))
    of_layer = {f"layers.0.experts.{number}.{name}_proj.weight" for number in range(3) for name in ("gate_up", "down")}
    assert set(forms) >= of_layer and not [name for name in forms if "router" in name]
    assert torch.equal(logits(fp8, "torch", "float32"), logits(wide, "torch", "float32"))


def test_weights_of_another_format_are_loaded_into_a_running_model(tmp_path: Path) -> None:
    first, second = save_pair(tmp_path / "1", "blocks")[0], save_pair(tmp_path / "2", "channels", seed=1)[0]
    runner = make_runner(load_model_config(first), attention_backend="torch", dtype="float32", max_total_tokens=64)
    runner.weights.update(load_model_config(second))
    assert torch.equal(played(runner), logits(second, "torch", "float32"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_keep_the_stored_bytes(kind: str, tmp_path: Path) -> None:
    fp8, wide = save_pair(tmp_path, kind)
    config = load_model_config(fp8)
    forms = stored_fp8_forms(config)
    in_first = {f"layers.0.{name}_proj.weight" for name in ("qkv", "o", "gate_up", "down")}
    in_second = {name.replace("layers.0", "layers.1") for name in in_first}
    assert set(forms) == (in_first if kind == "tensors" else in_first | in_second)
    assert checkpoint_dtype(config) == "bfloat16"
    loaded = load_parameters(config, torch.bfloat16, CPU, forms=forms)
    exact = load_parameters(load_model_config(wide), torch.float32, CPU)
    stored = load_file(fp8 / "model.safetensors")
    for name, tensor in loaded.items():
        if name in forms:
            assert isinstance(tensor, Fp8Weight) and torch.equal(tensor.dequantize(), exact[name])
        else:
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor.float(), exact[name].bfloat16().float())
    parts = [stored[f"model.layers.0.mlp.{part}_proj.weight"].view(torch.uint8) for part in ("gate", "up")]
    assert torch.equal(loaded[GATE_UP].values.view(torch.uint8), torch.cat(parts))
    sizes = parameter_bytes(config, 2, matrix_bytes=2, forms=forms)
    assert all(sizes[name] == loaded[name].values.numel() + 4 * loaded[name].scales.numel() for name in forms)


def test_ranks_hold_parts_of_the_same_numbers(tmp_path: Path) -> None:
    config = load_model_config(save_pair(tmp_path, "channels")[0])
    forms = stored_fp8_forms(config)
    whole, *ranks = (
        load_parameters(config, torch.bfloat16, CPU, forms=forms, shard=Shard(rank, size))
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    down = "layers.0.down_proj.weight"
    assert torch.equal(torch.cat([rank[down].dequantize() for rank in ranks], 1), whole[down].dequantize())
    gates = torch.cat([rank[GATE_UP].dequantize()[:144] for rank in ranks])
    assert torch.equal(gates, whole[GATE_UP].dequantize()[:288])
    blocks = load_model_config(save_pair(tmp_path / "b", "blocks")[0])
    parts = load_parameters(blocks, torch.bfloat16, CPU, forms=stored_fp8_forms(blocks), shard=Shard(1, 2))
    with pytest.raises(ValueError, match=r"columns of .*down_proj.weight' begin at 144, which is no multiple of 128"):
        parts[down]


@pytest.mark.parametrize("form", ["fp8", "fp8_block"])
@given(seed=st.integers(0, 99), exponent=st.integers(-30, 30), k=st.integers(1, 300))
def test_rounding_is_half_a_step(form: str, seed: int, exponent: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(150, k, generator=generator) * 2.0**exponent
    weight[3] = 0
    made = quantize_fp8(weight, form)
    assert made.scales.shape == (1 if form == "fp8" else -(-k // FP8_BLOCK), 150)
    unit = Fp8Weight(torch.ones_like(made.values), made.scales).dequantize()
    # 4 bits of a normal number, a fixed step below 2**-6, and float32's own rounding
    allowed = torch.maximum(weight.abs() * 2**-4, unit * 2**-10) * (1 + 1e-5)
    assert ((made.dequantize() - weight).abs() <= allowed).all()
    assert made.values.float().abs().max() == FP8_MAX and not made.values[3].float().any()


@pytest.mark.parametrize("kind", CONFIGS)
def test_projections_that_are_rows_of_one_tensor(kind: str, tmp_path: Path) -> None:
    """As Phi-3 has them. Rows of queries and keys are reordered, too."""
    fp8, wide = save_pair(tmp_path, kind, model=make_model("phi3_partial").bfloat16())
    exact = load_parameters(load_model_config(wide), torch.float32, CPU)
    config = load_model_config(fp8)
    loaded = load_parameters(config, torch.float32, CPU, forms=stored_fp8_forms(config))
    assert all(
        torch.equal(x.dequantize() if isinstance(x, Fp8Weight) else x, exact[name]) for name, x in loaded.items()
    )
    widened = load_parameters(config, torch.float32, CPU)
    assert all(torch.equal(widened[name], exact[name]) for name in exact)


@pytest.mark.parametrize("form", ["fp8", "fp8_block"])
def test_moved_rows_keep_their_values(form: str) -> None:
    weight = quantize_fp8(torch.randn(256, 200), form)
    order = torch.randperm(256)
    assert torch.equal(weight.with_rows(lambda rows: rows[order]).dequantize(), weight.dequantize()[order])


def test_scales_of_blocks_are_those_of_squares() -> None:
    weight = torch.randn(260, 200)
    made = quantize_fp8(weight, "fp8_block")
    assert (made.scales[:, :128] == made.scales[:, :1]).all() and (made.scales[:, 127] != made.scales[:, 128]).all()
    assert made.scales[1, 128] == weight[128:256, 128:].abs().max() / FP8_MAX
    again, scales = rounded(weight, "blocks")
    assert scales.shape == (3, 2) and torch.equal(again.scales, made.scales)


def group(**changes: object) -> dict[str, object]:
    """compressed-tensors with changed settings of the weights or activations."""
    config = copy.deepcopy(COMPRESSED)
    for name, value in changes.items():
        part, _, key = name.partition("__")
        target = config["config_groups"]["group_0"]
        if key:
            target[part][key] = value
        else:
            target[part] = value
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes'.*supported: fp8"),
        (DEEPSEEK | {"activation_scheme": "static"}, "activation_scheme must be 'dynamic', got 'static'"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt must be 'e4m3', got 'e5m2'"),
        (DEEPSEEK | {"weight_block_size": [64, 128]}, r"weight_block_size must be \[128, 128\] or null"),
        (DEEPSEEK | {"scale_fmt": "float"}, "scale_fmt must be 'ue8m0', got 'float'"),
        (DEEPSEEK | {"scale_bits": 8}, "scale_bits"),
        (DEEPSEEK | {"modules_to_not_convert": ["re:("]}, "regular expressions"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format must be 'float-quantized' or 'pack-quantized' or"),
        (COMPRESSED | {"config_groups": {"a": {}, "b": {}}}, "one group"),
        (group(weights__num_bits=4), "num_bits must be 8, got 4"),
        (group(weights__type="int"), "type must be 'float', got 'int'"),
        (group(weights__type=None), "type must be 'float', got 'int'"),
        (group(weights__strategy="group"), "strategy must be channel, tensor, block"),
        (group(weights__actorder="group"), "actorder"),
        (group(input_activations__dynamic=False), "dynamic must be True, got False"),
        (group(input_activations__dynamic=None), "dynamic must be True, got False"),
        (group(input_activations=None), "must have weights and input_activations"),
        (group(output_activations={"num_bits": 8}), "output_activations"),
        (group(targets=["Linear", "Embedding"]), "targets must be"),
    ],
)
def test_a_config_that_would_be_ignored_is_refused_by_name(config: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LlamaConfig(**BASE, architectures=["LlamaForCausalLM"]).to_json_string())
    assert load_model_config(tmp_path).quantization is None
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=message):
        load_model_config(tmp_path)


def test_tensors_that_contradict_the_config_are_refused_by_name(tmp_path: Path) -> None:
    fp8, _ = save_pair(tmp_path, "blocks")
    up, original = "model.layers.1.mlp.up_proj.weight", load_file(fp8 / "model.safetensors")

    def refused(message: str, changes: dict[str, torch.Tensor | None], **config: object) -> None:
        tensors = {name: t for name, t in (original | changes).items() if t is not None}
        save_file(tensors, fp8 / "model.safetensors")
        change_config(fp8, quantization_config=DEEPSEEK | config)
        with pytest.raises(ValueError, match=message):
            make_runner(load_model_config(fp8), attention_backend="torch", max_total_tokens=64)

    refused("up_proj.weight' is float8_e4m3fn and must have one tensor of scales", {up + "_scale_inv": None})
    refused(r"has shape \(3, 1\), expected \(3, 2\)", {up + "_scale_inv": torch.ones(3, 1)})
    refused(r"has shape \(2, 3\), expected \(160, 1\) or ", {}, weight_block_size=None)
    refused("up_proj.weight' is float8_e4m3fn, but .* excludes it", {}, modules_to_not_convert=["mlp.up_proj"])
    refused("up_proj.weight' has dtype F8_E5M2", {up: original[up].float().to(torch.float8_e5m2)})
    refused("unexpected: .*up_proj.input_scale", {up.replace("weight", "input_scale"): torch.ones(())})
    norm = "model.norm.weight"
    refused("norm.weight' is float8_e4m3fn, but is not the weight", {norm: original[norm].to(torch.float8_e4m3fn)})
    save_file({n: t for n, t in original.items() if "scale" not in n}, fp8 / "model.safetensors")
    change_config(fp8, quantization_config=None)
    with pytest.raises(ValueError, match=r"float8_e4m3fn, but config.json has no quantization_config"):
        make_runner(load_model_config(fp8), attention_backend="torch", max_total_tokens=64)
