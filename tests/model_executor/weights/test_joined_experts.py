"""Checkpoints that have the matrices of all experts of a layer in one tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model, save

from tercet.model_executor.weights.loader import load_parameters
from tercet.srt.model_files.load_config import load_model_config


def _load(folder: Path) -> Mapping[str, Any]:
    return load_parameters(load_model_config(folder), torch.float32, torch.device("cpu"))


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _join(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = torch.cat([gate, up], 1), down


def test_a_checkpoint_as_published(tmp_path: Path) -> None:
    """The language model is beside parts for images, and beside layers that predict further tokens."""
    save(make_model("qwen3_5_moe"), tmp_path)
    expected = _load(tmp_path)

    def publish(tensors: dict[str, torch.Tensor]) -> None:
        _join(tensors)
        for name in list(tensors):
            if name.startswith("model."):
                tensors[f"model.language_model.{name.removeprefix('model.')}"] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = torch.ones(2)
        tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(2)

    _edit(tmp_path, publish)
    text = json.loads((tmp_path / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = _load(tmp_path)
    assert all(torch.equal(expected[name], loaded[name]) for name in {*expected, *loaded})


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    save(make_model("qwen3_5_moe"), tmp_path)
    original = (tmp_path / "model.safetensors").read_bytes()
    joined = "model.layers.0.mlp.experts.gate_up_proj"

    def refused(message: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        (tmp_path / "model.safetensors").write_bytes(original)
        _edit(tmp_path, change)
        with pytest.raises(ValueError, match=message):
            _load(tmp_path)

    refused("gate_proj.weight' is also in '.*gate_up_proj'", lambda x: x.update({joined: torch.ones(8, 64, 64)}))
    for shape in ((8, 63, 64), (8, 64)):
        refused("must have the dimensions experts, rows and columns", lambda x: x.update({joined: torch.ones(shape)}))  # noqa: B023

    def too_few(tensors: dict[str, torch.Tensor]) -> None:
        _join(tensors)
        tensors[joined] = tensors[joined][:7]

    refused(r"missing: .*experts\.7\.gate_proj\.weight", too_few)
