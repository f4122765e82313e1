"""Tiny random checkpoints of every supported architecture, saved by transformers itself."""

from __future__ import annotations

import torch
from tiny_configs import BASE, CONFIGS
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, Qwen3MoeConfig

from tercet.srt.model_files.load_config import load_model_config

GRANITE_NAMES = {
    "router.weight": "router.layer.weight",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}
"""Parts of the names of tensors that a checkpoint has in another form than transformers has in memory."""


def make_model(name, seed=0):
    """A float32 model with random biases and norms. Their usual values, 0 and 1, would hide a missing parameter."""
    return initialised(CONFIGS[name](), seed)


def make_wide_model(*, tied):
    """The same with rows of whole blocks of Q4_K and Q6_K."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return initialised(LlamaConfig(**{**BASE, **shape}, tie_word_embeddings=tied), seed=0)


def make_wide_experts(kind=Qwen3MoeConfig, **changes):
    """A model with experts, whose rows are whole blocks of all GGUF types. `kind`: the class of its config."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return initialised(kind(**BASE | sizes | experts | changes), seed=0)


def make_odd_model():
    """A model whose feed-forward width is odd."""
    return initialised(LlamaConfig(**{**BASE, "intermediate_size": 33, "num_hidden_layers": 1}), seed=0)


def initialised(config, seed):
    torch.manual_seed(seed)
    kind = AutoModelForImageTextToText if config.model_type == "mistral3" else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for key, parameter in model.named_parameters():
        if key.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            # Large weights make attention far from uniform, so that a wrong rotation changes the output.
            torch.nn.init.normal_(parameter, 0, 0.2)
    for key, buffer in model.named_buffers():
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, 0, 0.2)
        elif key.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model.eval()


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    return str(folder)


def stored_tensors(model):
    """The tensors of a model as a checkpoint has them. transformers stacks the weights of experts in memory."""
    found = {}
    for name, tensor in model.state_dict().items():
        if model.config.model_type == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if model.config.model_type in ("granitemoe", "granitemoeshared"):
            for of_transformers, of_files in GRANITE_NAMES.items():
                name = name.replace(of_transformers, of_files)
        name = name.replace(".gate.moe_statics.", ".moe_statics.")
        stem, is_experts, last = name.partition(".experts.")
        if not is_experts or model.config.model_type == "gpt_oss":
            found[name] = tensor
            continue
        has_numbers = model.config.model_type in ("mixtral", "lfm2_moe")
        names = ("w1", "w3", "w2") if has_numbers else ("gate_proj", "up_proj", "down_proj")
        parts = dict(zip(names[:2], tensor.chunk(2, 1), strict=True)) if last == "gate_up_proj" else {names[2]: tensor}
        for part, stack in parts.items():
            found |= {f"{stem}.experts.{number}.{part}.weight": matrix for number, matrix in enumerate(stack)}
    return found


def checkpoint(folder, name="llama", *, seed=1, dtype=torch.float32):
    """The ModelConfig of a model saved in a new folder."""
    folder.mkdir()
    return load_model_config(save(make_model(name, seed).to(dtype), folder))


@torch.inference_mode()
def reference_logits(model, ids):
    """[len(ids), vocab]"""
    return model(torch.tensor([ids])).logits[0]
