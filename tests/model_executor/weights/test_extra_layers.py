"""Checkpoints of GLM-4.5: layers that predict further tokens are not read, and corrections keep float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import make_model, save

from tercet.model_executor.models.parameters import corrections_name, router_name
from tercet.model_executor.weights.loader import load_parameters
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

CPU = torch.device("cpu")
OF_LAYER = ("self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight", "eh_proj.weight")


def loaded(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Mapping[str, Any]:
    return load_parameters(config, dtype, CPU)


def with_layer(folder: Path, layer: int) -> ModelConfig:
    """A checkpoint of three layers, with tensors of one more."""
    save(make_model("glm4_moe"), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path) | {f"model.layers.{layer}.{name}": torch.ones(5, 5) for name in OF_LAYER}
    save_file(tensors, path)
    return load_model_config(folder)


def test_layers_of_a_checkpoint_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    expected = loaded(load_model_config(save(make_model("glm4_moe"), tmp_path / "plain")))
    found = loaded(with_layer(tmp_path / "more", 3))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_such_layers_of_ernie_have_names_of_their_own(tmp_path: Path) -> None:
    config = load_model_config(save(make_model("ernie4_5_moe"), tmp_path))
    expected, path = dict(loaded(config)), tmp_path / "model.safetensors"
    names = "mtp_block.0.self_attn.q_proj.weight", "mtp_emb_norm.0.weight", "mtp_linear_proj.0.weight"
    save_file(load_file(path) | {f"model.{name}": torch.ones(5, 5) for name in names}, path)
    found = loaded(config)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("layer", [4, 30])
def test_other_layers_are_refused(layer: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"unexpected: model\.layers\.{layer}\.eh_proj\.weight"):
        loaded(with_layer(tmp_path, layer))


@pytest.mark.parametrize("count", [0, 1])
def test_extra_layers_of_a_gguf_file(count: int, tmp_path: Path) -> None:
    names = ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_q.weight", "ffn_up_exps.weight")
    beside = {f"blk.3.{name}": np.ones((5, 5), np.float32) for name in names}
    path = write_gguf(
        tmp_path / "m.gguf", make_model("glm4_moe"), "glm4moe", beside=beside, keys={"nextn_predict_layers": count}
    )
    config = load_model_config(path)
    assert config.num_layers == 3
    if count:
        assert "norm.weight" in loaded(config)
    else:
        with pytest.raises(ValueError, match=r"unexpected: blk\.3\.nextn\.eh_proj\.weight"):
            loaded(config)


@pytest.mark.parametrize("file", ["", "m.gguf"])
def test_corrections_keep_float32(file: str, tmp_path: Path) -> None:
    """A small error may choose another expert."""
    model = make_model("glm4_moe")
    save(model, tmp_path) if not file else write_gguf(tmp_path / file, model, "glm4moe")
    found = loaded(load_model_config(tmp_path / file), torch.bfloat16)[corrections_name(1)]
    expected = model.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert not torch.equal(expected, expected.bfloat16().float())


@pytest.mark.parametrize("file", ["", "m.gguf"])
def test_the_router_of_ernie_keeps_float32(file: str, tmp_path: Path) -> None:
    model = make_model("ernie4_5_moe")
    save(model, tmp_path) if not file else write_gguf(tmp_path / file, model, "ernie4_5-moe")
    found = loaded(load_model_config(tmp_path / file), torch.bfloat16)
    expected = model.state_dict()
    names = {router_name(1): "weight", corrections_name(1): "moe_statics.e_score_correction_bias"}
    for ours, theirs in names.items():
        tensor = expected[f"model.layers.1.mlp.gate.{theirs}"]
        assert found[ours].dtype == torch.float32 and torch.equal(found[ours].flatten(), tensor.flatten())
    assert found["layers.1.o_proj.weight"].dtype == torch.bfloat16
