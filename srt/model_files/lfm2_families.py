"""The families of LFM2 and LFM2-MoE (arXiv 2511.23404), and of LFM3."""

from __future__ import annotations

import dataclasses
from functools import partial

from .experts_config import ExpertNames, ExpertsConfig
from .experts_deepseek import glm_gguf_experts
from .family import MAX_LAYERS, Family, LayerNames
from .layer_windows import SlidingWindows, no_window
from .settings import Settings
from .short_convolutions import convolutions_from_hf

_LAYER_NAMES = LayerNames(
    input_norm="operator_norm",
    feed_forward_norm="ffn_norm",
    o_proj="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    last_norm="model.embedding_norm",
)
_EXPERT_NAMES = ExpertNames(
    "feed_forward.gate", "feed_forward.experts.", "w1", "w3", "w2", corrections="feed_forward.expert_bias"
)


def _with_llama_keys(config: Settings) -> Settings:
    return config.with_values(
        {
            "rms_norm_eps": config.number("norm_eps", 1e-5),
            "tie_word_embeddings": config.flag("tie_embedding", config.flag("tie_word_embeddings", True)),
        }
    )


def _with_adjusted_width(config: Settings) -> Settings:
    """The settings of a dense model, whose feed-forward width may be computed from the given one."""
    width = config.integer("block_ff_dim", config.integer("intermediate_size", 12288))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of", 256)
        width = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return _with_llama_keys(config).with_values({"intermediate_size": width})


def _experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    num_dense = config.integer("num_dense_layers", 2, minimum=0)
    if not config.flag("use_expert_bias", True):
        raise config.unsupported_value("use_expert_bias", "true", False)
    if num_dense >= num_layers:
        return None
    return ExpertsConfig(
        num_experts=config.integer("num_experts", 32),
        num_experts_per_token=config.integer("num_experts_per_tok", 4),
        intermediate_size=config.integer("moe_intermediate_size", 1792),
        normalized=config.flag("norm_topk_prob", True),
        has_sigmoids=True,
        has_corrections=True,
        scale=config.number("routed_scaling_factor", 1.0),
        dense_layers=tuple(range(num_dense)),
    )


def _gguf_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    """The experts of a GGUF file. In llama.cpp the weights of a token's experts always have the sum 1."""
    absent = {"expert_weights_norm": True, "expert_shared_count": 0}
    return glm_gguf_experts(config.with_defaults(absent), num_layers)


_GGUF_EXPERT_KEYS = (
    "expert_gating_func", "leading_dense_block_count", "expert_weights_norm", "expert_weights_scale",
)  # fmt: skip
_LFM2 = Family(
    "lfm2",
    "decoder",
    no_window,
    qk_norm="heads",
    qk_norm_names=("q_layernorm", "k_layernorm"),
    default_rms_norm_eps=1e-5,
    default_rope_theta=1e6,
    layer_names=_LAYER_NAMES,
    convolutions=convolutions_from_hf,
    with_llama_keys=_with_adjusted_width,
    defaults={
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "max_position_embeddings": 128_000,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)


_SLIDING, _FULL = "sliding_attention", "full_attention"
_LFM3_ROPES = {
    _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def _of_lfm3(config: Settings) -> Settings:
    num_layers = config.integer("num_hidden_layers", 24, maximum=MAX_LAYERS)
    kinds = [_FULL if layer % 4 == 2 else "conv" if layer % 4 or not layer else _SLIDING for layer in range(num_layers)]
    defaults = {"num_hidden_layers": num_layers, "layer_types": kinds, "rope_parameters": _LFM3_ROPES}
    # As in transformers, which knows two names of this key in LFM3, and one in LFM2.
    defaults["norm_eps"] = config.number("rms_norm_eps", 1e-5)
    absent = {key: default for key, default in defaults.items() if config.get(key) is None}
    return _with_llama_keys(config.with_values(absent))


def _windows(config: Settings, num_layers: int) -> SlidingWindows:
    kinds = config.texts("layer_types") or []
    window = config.integer("sliding_window") if _SLIDING in kinds else None
    return tuple(window if kind == _SLIDING else None for kind in kinds)


_LFM3 = dataclasses.replace(
    _LFM2,
    model_type="lfm3",
    sliding_windows=_windows,
    qk_norm_names=("q_norm", "k_norm"),
    default_head_dim=128,
    has_local_rope=True,
    layer_names=_LAYER_NAMES._replace(o_proj="self_attn.o_proj"),
    convolutions=partial(convolutions_from_hf, attention=(_FULL, _SLIDING)),
    with_llama_keys=_of_lfm3,
    output_norms_key="use_sandwich_norm",
    output_norm_names=("post_operator_norm", "post_ffn_norm"),
    attention_gates="heads",
    attention_gates_key="use_attention_gate",
    adapted_names={"g_proj": "gate_proj"},
    defaults={
        "num_key_value_heads": 4,
        "vocab_size": 128_000,
        "max_position_embeddings": 128_000,
        "sliding_window": 256,
        "conv_L_cache": 7,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "bos_token_id": 124_894,
        "eos_token_id": 124_900,
    },
)
LFM2_FAMILIES = {
    "Lfm2ForCausalLM": _LFM2,
    "Lfm3ForCausalLM": _LFM3,
    "Lfm2MoeForCausalLM": dataclasses.replace(
        _LFM2,
        model_type="lfm2_moe",
        with_llama_keys=_with_llama_keys,
        experts=_experts,
        expert_names=_EXPERT_NAMES,
        gguf_experts=_gguf_experts,
        gguf_expert_keys=_GGUF_EXPERT_KEYS,
    ),
}
