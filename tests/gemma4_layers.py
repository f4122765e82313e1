"""Fields that give the layers of a ModelConfig what those of Gemma 4 have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tercet.srt.model_files.gemma4_config import Gemma4Config, Heads
from tercet.srt.model_files.model_config import ModelConfig


def like_gemma4(config: ModelConfig, *, input_dim: int = 32) -> dict[str, Any]:
    """The fields for four layers: half have windows, the last one shares K and V, and heads have two sizes."""
    local, full = Heads(config.num_kv_heads, config.head_dim), Heads(1, 2 * config.head_dim)
    ropes = [replace(config.rope, head_dim=heads.head_dim) for heads in (local, full)]
    return {
        "architecture": "Gemma4ForCausalLM",
        "num_layers": 4,
        "head_dim": full.head_dim,
        "sliding_windows": (70, None) * 2,
        "layer_ropes": (*ropes, *ropes),
        "qk_norm": "heads",
        "hidden_act": "gelu_tanh",
        "output_norms": True,
        "gemma4": Gemma4Config(
            heads=(local, full) * 2,
            kv_sources=(0, 1, 2, 1),
            widths=(config.intermediate_size,) * 4,
            layers_without_values=(1,),
            input_dim=input_dim,
            input_vocab_size=config.vocab_size,
        ),
    }
