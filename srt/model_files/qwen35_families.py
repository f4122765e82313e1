"""The families of Qwen3-Next and Qwen 3.5: Gated DeltaNets (arXiv 2412.06464), and gated attention in each fourth
layer."""

from __future__ import annotations

import dataclasses
from functools import partial

from .delta_net_config import delta_net_from_hf
from .experts_config import ExpertsConfig, SharedExpert, qwen2_experts
from .family import Family
from .layer_windows import no_window
from .settings import Settings

_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_KEYS_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys of rope settings that divide angles among the positions of an image. Those of a text are equal."""


def _with_llama_keys(config: Settings) -> Settings:
    if not config.flag("attn_output_gate", True):
        raise config.unsupported_value("attn_output_gate", "true", False)
    ropes = {key: config.get(key) for key in _ROPE_KEYS}
    return config.with_values(
        {
            key: {name: value for name, value in rope.items() if name not in _KEYS_OF_IMAGES}
            for key, rope in ropes.items()
            if isinstance(rope, dict)
        }
    )


_QWEN35 = Family(
    "qwen3_5_text",
    "decoder",
    no_window,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="heads",
    norm_offset=1.0,
    attention_gates="components",
    delta_net=delta_net_from_hf,
    with_llama_keys=_with_llama_keys,
    default_head_dim=256,
    partial_rotary=True,
    defaults={"num_key_value_heads": 4, "partial_rotary_factor": 0.25},
)


def _experts(config: Settings, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=config.integer("num_experts", 256),
        num_experts_per_token=config.integer("num_experts_per_tok", 8),
        intermediate_size=config.integer("moe_intermediate_size", 512),
        normalized=True,
        shared=SharedExpert(config.integer("shared_expert_intermediate_size", 512), has_gate=True),
    )


_QWEN35_MOE = dataclasses.replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    experts=_experts,
    joined_experts=True,
    # No layer is dense.
    defaults={"num_key_value_heads": 2, "partial_rotary_factor": 0.25, "intermediate_size": 1},
)


def _qwen3_next_experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    absent = {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    return qwen2_experts(config.with_defaults(absent), num_layers)


QWEN35_FAMILIES = {
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5ForConditionalGeneration": dataclasses.replace(
        _QWEN35, model_type="qwen3_5", has_text_config=True, text_model_type="qwen3_5_text"
    ),
    "Qwen3_5MoeForCausalLM": _QWEN35_MOE,
    "Qwen3NextForCausalLM": dataclasses.replace(
        _QWEN35,
        model_type="qwen3_next",
        delta_net=partial(delta_net_from_hf, stored_by_head=True),
        experts=_qwen3_next_experts,
        defaults={"num_key_value_heads": 2, "partial_rotary_factor": 0.25, "intermediate_size": 5632},
    ),
    "Qwen3_5MoeForConditionalGeneration": dataclasses.replace(
        _QWEN35_MOE, model_type="qwen3_5_moe", has_text_config=True, text_model_type="qwen3_5_moe_text"
    ),
}
