"""Random LoRA adapters of tiny models, in folders as PEFT writes them, and models with merged adapters."""

from __future__ import annotations

import copy
import json
import math

import torch
from safetensors.torch import load_file, save_file

from tercet.model_executor.models.family import family_of
from tercet.model_executor.models.parameters import is_expert
from tercet.model_executor.weights.quantization import is_linear

ALL = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj",
    "input_linear", "output_linear", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
)  # fmt: skip
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none",
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "use_dora": False, "use_rslora": False,
    "rank_pattern": {}, "alpha_pattern": {}, "revision": None, "r": 4, "lora_alpha": 6,
}  # fmt: skip


def modules_of(model, targets=ALL):
    """The dense linear layers of a model that have these names, by their whole names."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.split(".")[-1] in targets and isinstance(module, torch.nn.Linear) and ".experts" not in name
        if "vision" not in name
    }


def make_tensors(modules, rank=4, seed=1, scale=0.3):
    """Random matrices of an adapter. `rank`: a number, or of each module by name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in modules.items():
        r = rank if isinstance(rank, int) else rank[name]
        for side, shape in (("A", (r, module.in_features)), ("B", (module.out_features, r))):
            matrix = torch.randn(shape, generator=generator) * scale
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = matrix
    return tensors


def save_tensors(folder, tensors, **config):
    folder.mkdir(exist_ok=True, parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".lora_")[0].split(".")[-1] for name in tensors})
    values = {**CONFIG, "target_modules": targets, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return str(folder)


def save_adapter(folder, model, targets=ALL, *, rank=4, seed=1, **config):
    return save_tensors(folder, make_tensors(modules_of(model, targets), rank, seed), r=rank, **config)


def save_for_config(folder, config, *, rank=4, seed=1, **settings):
    """A random adapter of all dense layers of a model without files."""
    modules = {}
    for parameter in family_of(config).parameters(config):
        if is_linear(parameter) and not is_expert(parameter.name):
            for part in parameter.parts:
                rows = sum(other.shape[0] for other in parameter.parts if other.name == part.name)
                modules[part.name.removesuffix(".weight")] = torch.nn.Linear(parameter.shape[1], rows, device="meta")
    return save_tensors(folder, make_tensors(modules, rank, seed), r=rank, **settings)


def merged(model, folder):
    """A copy of the model with an adapter of one rank added to its weights, in float64."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = copy.deepcopy(model)
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")].double()
            weight = found.get_submodule(name.removeprefix("base_model.model.").split(".lora_")[0]).weight
            weight.data = (weight.data.double() + scale * (b @ a.double())).to(weight.dtype)
    return found
