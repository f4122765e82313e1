"""Configs of tiny models with short convolutions, as transformers has them."""

from __future__ import annotations

from transformers import Lfm2Config, Lfm2MoeConfig, Lfm3Config

BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}

CONVOLUTION_CONFIGS = {
    "lfm2": lambda: Lfm2Config(**BASE, intermediate_size=130, block_multiple_of=32),
    "lfm2_bias": lambda: Lfm2Config(
        **BASE | {"layer_types": ["full_attention", "conv", "conv", "full_attention"]},
        intermediate_size=96,
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
        conv_L_cache=5,
        tie_word_embeddings=False,
    ),
    "lfm3": lambda: Lfm3Config(
        **BASE | {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
        bos_token_id=1,
        head_dim=24,
        intermediate_size=96,
        sliding_window=7,
    ),
    "lfm3_plain": lambda: Lfm3Config(
        **BASE | {"layer_types": ["sliding_attention", "conv", "full_attention"], "num_hidden_layers": 3},
        bos_token_id=1,
        head_dim=16,
        intermediate_size=96,
        sliding_window=5,
        conv_bias=True,
        use_attention_gate=False,
        use_sandwich_norm=False,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **BASE,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
}
