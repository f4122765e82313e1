"""Configs of tiny models with Gated DeltaNets, as transformers has them."""

from __future__ import annotations

from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_DELTA_NET, _ATTENTION = "linear_attention", "full_attention"

DELTA_NET_CONFIGS = {
    "qwen3_5": lambda: Qwen3_5TextConfig(**BASE),
    "qwen3_5_bias": lambda: Qwen3_5TextConfig(
        **BASE | {"linear_num_value_heads": 2, "head_dim": 16},
        layer_types=[_ATTENTION, _DELTA_NET, _DELTA_NET, _ATTENTION],
        attention_bias=True,
        linear_conv_kernel_dim=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **{key: value for key, value in BASE.items() if key != "intermediate_size"},
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **BASE | {"num_hidden_layers": 3, "linear_value_head_dim": 16},
        layer_types=[_DELTA_NET, _ATTENTION, _DELTA_NET],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1],
    ),
    "qwen3_5_attention": lambda: Qwen3_5TextConfig(
        **BASE | {"num_hidden_layers": 2}, layer_types=[_ATTENTION] * 2, full_attention_interval=1
    ),
}
