"""The families of Gemma 2, Gemma 3 and Gemma 4."""

from __future__ import annotations

import dataclasses
from typing import Any

from .family import MAX_LAYERS, Family
from .gemma4_config import gemma4_from_hf
from .layer_windows import window_of_every_other_layer, window_of_local_layers
from .settings import Settings

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


_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def _with_gemma3_keys(config: Settings) -> Settings:
    """The settings with what Gemma 3 has keys for."""
    if config.flag("enable_moe_block"):
        raise config.unsupported("enable_moe_block=true is not supported: only dense models of Gemma 4 are")
    if config.get("attn_logit_softcapping") is not None:
        raise config.unsupported("attn_logit_softcapping is not supported for Gemma 4")
    values: dict[str, Any] = {"query_pre_attn_scalar": 1}
    if config.get("use_bidirectional_attention") == "vision":  # concerns only the tokens of images
        values["use_bidirectional_attention"] = None
    if config.get("rope_parameters") is None:
        values["rope_parameters"] = _ROPES
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    types = config.texts("layer_types")
    if types is None:
        types = [_FULL if (layer + 1) % 6 == 0 else _SLIDING for layer in range(num_layers)]
    # As in transformers, the last layer never has a window.
    values["layer_types"] = [*types[:-1], _FULL] if types else types
    return config.with_values(values)


GEMMA4 = dataclasses.replace(
    GEMMA3,
    model_type="gemma4_text",
    gemma4=gemma4_from_hf,
    with_llama_keys=_with_gemma3_keys,
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    has_soft_caps=True,
    norm_offset=0.0,
    gguf_window_period=None,
    gguf_layers_scaled_by_width=None,
)
