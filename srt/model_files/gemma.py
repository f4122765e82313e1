"""The families of Gemma 2 and Gemma 3."""

from __future__ import annotations

import dataclasses

from .family import Family
from .layer_windows import window_of_every_other_layer, window_of_local_layers

GEMMA3 = Family(
    "gemma3_text",
    "decoder",
    window_of_local_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="heads",
    tied_by_default=True,
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    activation_key="hidden_activation",
    has_query_pre_attn_scalar=True,
    default_rope_theta=1e6,
    has_local_rope=True,
    local_rope_theta=10000.0,
    scales_embeddings=True,
    output_norms=True,
    norm_offset=1.0,
    gguf_window_period=6,
    gguf_layers_scaled_by_width=62,
)

GEMMA2 = dataclasses.replace(
    GEMMA3,
    model_type="gemma2",
    sliding_windows=window_of_every_other_layer,
    qk_norm=None,
    defaults=GEMMA3.defaults
    | {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    default_rope_theta=10000.0,
    has_local_rope=False,
    local_rope_theta=None,
    has_soft_caps=True,
    gguf_window_period=2,
    gguf_window=4096,
    gguf_layers_scaled_by_width=46,
)
