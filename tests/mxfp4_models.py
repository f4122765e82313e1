"""Tiny GPT-OSS checkpoints with experts of 4 bits (MXFP4), and the same models in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf_models import Kind, write_gguf
from safetensors.torch import save_file
from tiny_configs import CONFIGS
from tiny_models import initialised, make_model, stored_tensors
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""As GPT-OSS has it"""
SCALES = range(122, 126)
"""Drawn scales, which stand for 2^(scale - 127)"""


def draw_blocks(shape: tuple[int, int, int], seed: int, scales: range = SCALES) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of matrices [experts, n, k]."""
    generator = torch.Generator().manual_seed(seed)
    *rows, k = shape
    blocks = torch.randint(0, 256, (*rows, k // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(scales.start, scales.stop, (*rows, k // 32), generator=generator, dtype=torch.uint8)


def draw_experts(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Gives the experts of a model numbers of 4 bits. Returns their blocks and scales by name of the tensor."""
    drawn = {}
    for index, layer in enumerate(model.model.layers):
        for projection in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, projection)
            count, k, n = parameter.shape
            blocks, scales = draw_blocks((count, n, k), seed=index)
            parameter.data = convert_moe_packed_tensors(blocks, scales).float()
            drawn[f"model.layers.{index}.mlp.experts.{projection}"] = blocks, scales
    return drawn


def save_mxfp4(folder: Path, name: str = "gpt_oss", **keys: object) -> torch.nn.Module:
    """Saves a checkpoint with experts of 4 bits. Returns the model, whose experts have the same numbers in float32.

    `keys`: changes of its config.json.
    """
    model = make_model(name)
    tensors = stored_tensors(model)
    for stored, (blocks, scales) in draw_experts(model).items():
        del tensors[stored]
        tensors |= {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
    folder.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config | keys))
    return model


def write_mxfp4_gguf(path: Path, **options: Any) -> torch.nn.Module:
    """Writes a GGUF file with experts of 4 bits. Returns the model, whose experts have the same numbers in float32.

    `options`: those of `write_gguf`.
    """
    source = CONFIGS["gpt_oss"]()
    source.swiglu_limit = 7.0  # GGUF files cannot have another one
    model = initialised(source, seed=0)
    draw_experts(model)
    layers, projections = range(source.num_hidden_layers), ("gate_proj", "up_proj", "down_proj")
    kinds = {f"model.layers.{n}.mlp.experts.{name}.weight": Kind.MXFP4 for n in layers for name in projections}
    write_gguf(path, model, "gpt-oss", **{"kinds": kinds, **options})
    return model


def mxfp4_config(folder: Path, name: str = "gpt_oss") -> ModelConfig:
    """The config of such a checkpoint in a new folder."""
    save_mxfp4(folder, name)
    return load_model_config(folder)
