"""Small checkpoints with fp8 weights, in the formats that checkpoints have, and their widened twins."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_configs import BASE
from tiny_models import save, stored_tensors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tercet.model_executor.layers.fp8_weight import Fp8Weight, quantize_fp8

DEEPSEEK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True, "observer": None}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["re:.*lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": _EIGHT_BITS | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head", "model.layers.1"]}
CONFIGS = {"blocks": DEEPSEEK, "channels": COMPRESSED, "tensors": PER_TENSOR}
"""quantization_config by the kind of its scales."""


def wide_model(seed: int = 0) -> LlamaForCausalLM:
    """A model whose matrices have several blocks of 128 in both directions, the last ones incomplete."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 160, "intermediate_size": 288, "num_hidden_layers": 2, "head_dim": 40, "vocab_size": 132}
    return LlamaForCausalLM(LlamaConfig(**BASE | sizes)).bfloat16().eval()


def save_pair(folder: Path, kind: str, seed: int = 0, model: PreTrainedModel | None = None) -> tuple[Path, Path]:
    """Saves a model, `wide_model` by default, with fp8 weights, and with the float32 numbers that these stand for."""
    model, (fp8, wide) = model or wide_model(seed), (folder / "fp8", folder / "wide")
    for path in (fp8, wide):
        path.mkdir(parents=True)
        save(model, path)
    tensors: dict[str, torch.Tensor] = {}
    widened: dict[str, torch.Tensor] = {}
    for name, tensor in stored_tensors(model).items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        is_linear = name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")) and not (
            kind == "tensors" and ".layers.1." in name
        )
        if not is_linear:
            tensors[name], widened[name] = tensor.clone(), tensor.float()
            continue
        weight, stored_scales = rounded(tensor, kind)
        tensors[name], widened[name] = weight.values, weight.dequantize()
        tensors[name + ("_scale_inv" if kind == "blocks" else "_scale")] = stored_scales
    for path, content in ((fp8, tensors), (wide, widened)):
        for old in path.glob("*.safetensors*"):
            old.unlink()
        save_file(content, path / "model.safetensors")
    change_config(fp8, quantization_config=CONFIGS[kind])
    change_config(wide, dtype="float32", torch_dtype="float32")
    return fp8, wide


def rounded(tensor: torch.Tensor, kind: str) -> tuple[Fp8Weight, torch.Tensor]:
    """A matrix in 8 bits, and its scales as a file has them."""
    if kind == "tensors":
        scale = tensor.float().abs().max() / 448
        values = (tensor.float() / scale).to(torch.float8_e4m3fn)
        return Fp8Weight(values, scale.expand(1, len(tensor)).contiguous()), scale
    weight = quantize_fp8(tensor, "fp8_block" if kind == "blocks" else "fp8")
    return weight, weight.scales.t()[:: 128 if kind == "blocks" else 1].contiguous()


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
