"""GGUF files of GPT-OSS: transformers' logits, and the experts that llama.cpp has, whole and in part."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import Kind
from mxfp4_models import write_mxfp4_gguf
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from tiny_models import reference_logits

from tercet.model_executor.models.parameters import is_expert
from tercet.model_executor.weights.gguf_checkpoint import GGUFCheckpoint
from tercet.model_executor.weights.loader import load_parameters, stored_forms
from tercet.srt.model_files.gguf_file import GGUFFile
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.experts.up_proj"


def written(folder: Path, **options: object) -> ModelConfig:
    """The config of a new file."""
    write_mxfp4_gguf(folder / "m.gguf", **options)
    return load_model_config(folder / "m.gguf")


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_logits_equal_those_of_the_model_it_was_made_from(backend: str, tmp_path: Path) -> None:
    model = write_mxfp4_gguf(tmp_path / "m.gguf")
    options = {"dtype": "float32", "max_running_requests": 2, "max_total_tokens": 100, "attention_backend": backend}
    driver = RunnerDriver(make_runner(load_model_config(tmp_path / "m.gguf"), **options))
    ids = np.random.default_rng(1).integers(0, 131, 70)
    expected = reference_logits(model, ids.tolist())
    for position, logits in driver.logits_along(1, ids, [30, 10]).items():
        assert relative_error(logits, expected[position]) < 1e-4


def test_each_expert_has_its_part_of_a_tensor(tmp_path: Path) -> None:
    model = write_mxfp4_gguf(tmp_path / "m.gguf")
    parameters = load_parameters(load_model_config(tmp_path / "m.gguf"), torch.float32, CPU)
    for index, layer in enumerate(model.model.layers):
        experts, router = layer.mlp.experts, layer.mlp.router
        assert torch.equal(parameters[f"layers.{index}.router.weight"], router.weight)
        assert torch.equal(parameters[f"layers.{index}.router.bias"], router.bias)
        assert torch.equal(parameters[f"layers.{index}.sinks"], layer.self_attn.sinks)
        for number in range(5):
            prefix = f"layers.{index}.experts.{number}."
            gate_up, gate_up_bias = experts.gate_up_proj[number].t(), experts.gate_up_proj_bias[number]
            for name, rows in (("weight", gate_up), ("bias", gate_up_bias)):
                expected = torch.cat((rows[::2], rows[1::2]))  # the rows of gate and up take turns
                assert torch.equal(parameters[f"{prefix}gate_up_proj.{name}"], expected)
            assert torch.equal(parameters[f"{prefix}down_proj.weight"], experts.down_proj[number].t())
            assert torch.equal(parameters[f"{prefix}down_proj.bias"], experts.down_proj_bias[number])


def test_regions_are_parts_of_the_whole(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(written(tmp_path, kind=Kind.Q8_0))
    assert checkpoint.shape(f"{UP}.weight") == (5 * 96, 64) and checkpoint.shape(f"{UP}.bias") == (5 * 96,)
    assert checkpoint.dtype(f"{UP}.weight") is None and checkpoint.dtype(f"{UP}.bias") == torch.float32
    whole, region = checkpoint.tensor(f"{UP}.weight"), (slice(90, 200), slice(5, 40))
    assert torch.equal(checkpoint.tensor(f"{UP}.weight", region), whole[region])
    assert torch.equal(checkpoint.tensor(f"{UP}.bias", (slice(7, 9),)), checkpoint.tensor(f"{UP}.bias")[7:9])
    region = slice(90, 200), slice(32, 64)
    for form in ("e2m1", "int8", "mixed"):
        part = checkpoint.quantized(f"{UP}.weight", form, region)
        assert part is not None and torch.equal(part.dequantize(), whole[region])
    assert checkpoint.quantized(f"{UP}.weight", "int4", region) is None
    assert not checkpoint.has_form(f"{UP}.bias", "e2m1")


def test_experts_keep_4_bits_and_others_their_type(tmp_path: Path) -> None:
    """As the files of llama.cpp: Q8_0 beside the experts."""
    config = written(tmp_path, kind=Kind.Q8_0)
    forms = stored_forms(config, torch.bfloat16)
    experts = {name for name in forms if is_expert(name)}
    assert len(experts) == 3 * 5 * 2 and {forms[name] for name in experts} == {"e2m1"}
    assert {forms[name] for name in forms.keys() - experts} == {"int8"}
    kept, widened = (load_parameters(config, torch.float32, CPU, forms=used) for used in (forms, {}))
    for name in forms:
        assert torch.equal(kept[name].dequantize(), widened[name])
    integers = load_parameters(config, torch.float32, CPU, forms=dict.fromkeys(experts, "int8"))
    for name in experts:
        assert torch.equal(integers[name].dequantize(), widened[name])
    file = GGUFFile(config.model_path)
    (up,) = (tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_up_exps.weight")
    raw = file.tensor_bytes(up, math.prod(up.shape) // 32 * 17).reshape(math.prod(up.shape[:2]), -1)
    exact = gguf.dequantize(raw, Kind.MXFP4).reshape(up.shape)
    for number in range(5):
        found = widened[f"layers.1.experts.{number}.gate_up_proj.weight"][96:]
        assert np.array_equal(found.numpy(), exact[number])


def test_gate_and_up_of_different_types(tmp_path: Path) -> None:
    config = written(tmp_path, kind=Kind.Q8_0, kinds={f"{UP}.weight": Kind.MXFP4})
    name = "layers.1.experts.2.gate_up_proj.weight"
    forms = stored_forms(config, torch.float32)
    assert forms[name] == "int8" and forms["layers.1.experts.2.down_proj.weight"] == "int8"
    kept, widened = (load_parameters(config, torch.float32, CPU, forms=used) for used in (forms, {}))
    assert torch.equal(kept[name].dequantize(), widened[name])


def test_a_small_scale_is_rounded(tmp_path: Path) -> None:
    """Only the numbers of that group change, and by less than float16 can tell from zero."""
    config = written(tmp_path)
    file = GGUFFile(config.model_path)
    (up,) = (tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_up_exps.weight")
    with open(config.model_path, "r+b") as stored:
        stored.seek(up.offset + 17)
        stored.write(bytes([100]))
    name = "layers.1.experts.0.gate_up_proj.weight"
    forms = stored_forms(config, torch.bfloat16)
    assert forms[name] == "e2m1"
    kept, widened = (load_parameters(config, torch.float32, CPU, forms=used)[name] for used in (forms, {}))
    error = (kept.dequantize() - widened).abs()
    assert 0 < error[96, 32:].max() <= 2**-25
    error[96, 32:] = 0
    assert not error.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ("model.layers.1.self_attn.sinks",)}, r"missing: model\.layers\.1\.self_attn\.sinks$"),
        ({"drop": ("model.layers.1.mlp.router.bias",)}, r"missing: model\.layers\.1\.mlp\.gate\.bias"),
        (
            {"drop": ("model.layers.1.mlp.experts.down_proj_bias",)},
            r"missing: model\.layers\.1\.mlp\.experts\.down_proj\.bias",
        ),
        ({"beside": {"blk.0.attn_sinks.bias": np.ones(4, np.float32)}}, r"unexpected: .*sinks\.bias"),
        (
            {"beside": {"blk.0.ffn_norm.weight": np.ones(64, np.float32)}},
            r"'blk\.0\.post_attention_norm\.weight' and 'blk\.0\.ffn_norm\.weight' are both model\.layers\.0\.post_att",
        ),
        (
            {
                "drop": ("model.layers.1.mlp.experts.down_proj_bias",),
                "beside": {"blk.1.ffn_down_exps.bias": np.ones((4, 64), np.float32)},
            },
            r"down_proj\.bias' has shape \(256,\), the config implies \(320,\)",
        ),
    ],
)
def test_tensors_that_are_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    config = written(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        dict(load_parameters(config, torch.float32, CPU))
