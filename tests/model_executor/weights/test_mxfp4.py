"""Experts of 4 bits: the numbers that transformers reads, whole and in part, and in quantized forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mxfp4_models import QUANTIZATION, draw_blocks, mxfp4_config, save_mxfp4
from safetensors.torch import load_file, save_file
from tiny_models import make_model, save
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tercet.model_executor.layers.quantized_weight import E2M1_VALUES, quantize
from tercet.model_executor.weights import mxfp4
from tercet.model_executor.weights.loader import (
    checkpoint_dtype,
    load_parameters,
    stored_forms,
    stored_matrix_dtype,
)
from tercet.model_executor.weights.stacked_checkpoint import StackedCheckpoint
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.quantization_config import Mxfp4Config

CPU = torch.device("cpu")
CONFIG = Mxfp4Config()
EXPERT = "model.layers.1.mlp.experts.3"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), first=st.integers(0, 230), count=st.integers(1, 20))
def test_numbers_are_those_of_transformers(seed: int, first: int, count: int) -> None:
    """Also as bfloat16, in which all of them are exact."""
    blocks, scales = draw_blocks((3, 8, 96), seed, range(first, first + count))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    for expert in range(3):
        found = mxfp4.widen(blocks[expert], scales[expert])
        assert torch.equal(found, expected[expert])
        if first > 2:  # below that bfloat16 has fewer digits
            assert torch.equal(found.bfloat16().float(), found)
        if mxfp4.has_forms(blocks[expert], scales[expert]):
            for form in mxfp4.FORMS:
                assert torch.equal(mxfp4.quantized_form(blocks[expert], scales[expert], form).dequantize(), found)
        else:
            assert first < 104 or first + count > 144


def test_the_lower_bits_are_the_first_number() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0xA7  # -1 after 6
    scales = torch.tensor([[128]], dtype=torch.uint8)
    assert mxfp4.widen(blocks, scales)[0, :3].tolist() == [12, -2, 0]
    assert mxfp4.widen(blocks, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize(("scale", "fits"), [(103, False), (104, True), (143, True), (144, False)])
def test_powers_of_two_that_float16_has(scale: int, fits: bool) -> None:
    blocks, scales = draw_blocks((1, 4, 64), 0)
    scales[0, 2, 1] = scale
    assert mxfp4.has_forms(blocks[0], scales[0]) == fits
    for form in mxfp4.FORMS:
        weight = mxfp4.quantized_form(blocks[0], scales[0], form)
        assert torch.equal(weight.dequantize(), mxfp4.widen(blocks[0], scales[0])) == fits
    blocks[0, 2, 1] = 0x80  # zeros of both signs
    assert mxfp4.has_forms(blocks[0], scales[0])
    for form in mxfp4.FORMS:
        assert not mxfp4.quantized_form(blocks[0], scales[0], form).dequantize()[2, 32:].any()


@pytest.mark.parametrize("kind", ["mxfp4", "plain"])
def test_each_expert_has_its_part_of_a_tensor(kind: str, tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path)
    if kind == "plain":
        save(model, tmp_path)
    checkpoint = StackedCheckpoint(str(tmp_path), CONFIG if kind == "mxfp4" else None)
    experts = model.model.layers[1].mlp.experts
    gate_up, gate_up_bias = experts.gate_up_proj[3].t(), experts.gate_up_proj_bias[3]
    expected = {
        "gate_proj.weight": gate_up[::2], "up_proj.weight": gate_up[1::2], "down_proj.weight": experts.down_proj[3].t(),
        "gate_proj.bias": gate_up_bias[::2], "up_proj.bias": gate_up_bias[1::2],
        "down_proj.bias": experts.down_proj_bias[3],
    }  # fmt: skip
    for name, tensor in expected.items():
        of_expert = f"{EXPERT}.{name}"
        assert checkpoint.shape(of_expert) == tensor.shape
        is_packed = kind == "mxfp4" and name.endswith(".weight")
        assert checkpoint.dtype(of_expert) == (None if is_packed else torch.float32)
        assert torch.equal(checkpoint.tensor(of_expert), tensor)
        region = tuple(slice(3, 40) for _ in tensor.shape)
        assert torch.equal(checkpoint.tensor(of_expert, region), tensor[region])
        assert not checkpoint.has_form(of_expert, "int4")
        for form in mxfp4.FORMS:
            region = slice(3, 40), slice(32, 64)
            assert checkpoint.has_form(of_expert, form) == is_packed
            weight = checkpoint.quantized(of_expert, form, region) if is_packed else None
            assert weight is None or torch.equal(weight.dequantize(), tensor[region])
            assert is_packed or checkpoint.quantized(of_expert, form) is None
    router = "model.layers.1.mlp.router.weight"
    assert torch.equal(checkpoint.tensor(router), model.model.layers[1].mlp.router.weight)
    assert checkpoint.dtype(router) == torch.float32 and not checkpoint.has_form(router, "int8")


def test_a_part_of_a_quantized_matrix_has_whole_groups(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    checkpoint = StackedCheckpoint(str(tmp_path), CONFIG)
    for columns in (slice(16, 48), slice(0, 40)):
        with pytest.raises(AssertionError):
            checkpoint.quantized(f"{EXPERT}.down_proj.weight", "e2m1", (slice(0, 8), columns))


def test_the_folder_of_the_published_model(tmp_path: Path) -> None:
    """It has several files, a folder with the same tensors by other names, and no type of its numbers."""
    save_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if tensor.is_floating_point()}
    names = sorted(tensors)
    files = {f"model-0000{part}-of-00002.safetensors": names[part::3] for part in range(3)}
    for file, of_file in files.items():
        save_file({name: tensors[name] for name in of_file}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, of_file in files.items() for name in of_file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "original").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "original" / "model.safetensors")
    config_json = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config_json.items() if "dtype" not in k}))
    config = load_model_config(tmp_path)
    assert config.dtype is None and checkpoint_dtype(config) == "bfloat16"
    assert len(stored_forms(config, torch.bfloat16)) == 3 * 5 * 2
    parameters = load_parameters(config, torch.bfloat16, CPU)
    weight = parameters["layers.1.experts.3.down_proj.weight"]
    name = "model.layers.1.mlp.experts.down_proj"
    blocks, scales = tensors[f"{name}_blocks"][3], tensors[f"{name}_scales"][3]
    assert torch.equal(weight, mxfp4.widen(blocks, scales).bfloat16())
    assert torch.equal(parameters["layers.0.sinks"], tensors["model.layers.0.self_attn.sinks"].float())
    assert len(dict(parameters)) == len(parameters)


def test_forms_of_a_checkpoint(tmp_path: Path) -> None:
    """Parameters in the stored form have the numbers of the widened ones. Random weights have the same forms."""
    config = mxfp4_config(tmp_path)
    assert config.quantization is not None and stored_matrix_dtype(config) is None
    forms = stored_forms(config, torch.bfloat16)
    assert set(forms.values()) == {"e2m1"} and len(forms) == 3 * 5 * 2
    kept, widened = (load_parameters(config, torch.float32, CPU, forms=x) for x in (forms, {}))
    for name in forms:
        assert torch.equal(kept[name].dequantize(), widened[name])
    assert stored_forms(load_model_config(tmp_path, "dummy"), torch.bfloat16) == forms


def test_random_weights_become_the_nearest_numbers() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight[3, :32] = 0
    rounded = quantize(weight, "e2m1")
    scales = rounded.scales.float().repeat_interleave(32, 1)
    nearest = (weight[..., None] - scales[..., None] * E2M1_VALUES).abs().amin(-1)
    assert torch.equal((rounded.dequantize() - weight).abs(), nearest)
    assert (nearest <= 2 * scales).all()  # the largest numbers are 4 steps apart
    assert (rounded.scales.frexp().mantissa == 0.5).all()


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{DOWN}_scales": None}, "down_proj_blocks' needs .*_scales', which is missing"),
        ({f"{DOWN}_blocks": None}, "down_proj_scales' has scales, but .*_blocks' is missing"),
        ({f"{DOWN}_blocks": torch.zeros(5, 64, 3, 15, dtype=torch.uint8)}, r"its scales imply \(5, 64, 3, 16\)"),
        ({f"{DOWN}_blocks": torch.zeros(5, 64, 3, 16)}, "must have bytes and 4 dimensions.*torch.float32"),
        ({f"{DOWN}_bias": torch.zeros(5)}, "must have floating-point numbers and 2 dimensions"),
        ({DOWN: torch.zeros(5, 96, 64)}, "down_proj' is in the checkpoint twice"),
        ({f"{DOWN}_bias": None}, r"tensors missing: model\.layers\.1\.mlp\.experts\.0\.down_proj\.bias"),
        ({f"{DOWN}_bias": torch.zeros(4, 64)}, r"missing: model\.layers\.1\.mlp\.experts\.4\.down_proj\.bias"),
        ({f"{DOWN}_bias": torch.zeros(5, 63)}, r"0\.down_proj\.bias' has shape \(63,\), the config implies \(64,\)"),
        ({"model.layers.1.mlp.other": torch.zeros(2, dtype=torch.uint8)}, "unexpected: model.layers.1.mlp.other"),
    ],
)
def test_tensors_that_are_refused(changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    config = mxfp4_config(tmp_path)
    change(tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        dict(load_parameters(config, torch.float32, CPU))


def test_a_config_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, quantization_config=None)
    with pytest.raises(ValueError, match=r"is uint8, but config.json has no quantization_config for it"):
        load_parameters(load_model_config(tmp_path), torch.float32, CPU)
    for excluded in ("model.layers.*.mlp", "model.layers.1.mlp.experts"):
        save_mxfp4(tmp_path, quantization_config=QUANTIZATION | {"modules_to_not_convert": [excluded]})
        with pytest.raises(ValueError, match="has numbers of 4 bits, but quantization_config excludes it"):
            load_parameters(load_model_config(tmp_path), torch.float32, CPU)


def test_other_methods_and_other_architectures_are_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"method 'fp8'.* is not supported for this architecture; supported: mxfp4"):
        load_model_config(tmp_path)
    save_mxfp4(tmp_path, quantization_config=QUANTIZATION | {"bits": 8})
    with pytest.raises(ValueError, match=r"'bits': 8.* is not supported"):
        load_model_config(tmp_path)
    model = make_model("mixtral")
    model.config.quantization_config = QUANTIZATION
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"method 'mxfp4'.* is not supported; supported: fp8"):
        load_model_config(tmp_path)
