"""The families of models: how the config and the checkpoint of each differ from those of plain Llama."""

from __future__ import annotations

import dataclasses

from .experts_config import (
    ERNIE_GGUF_KEYS,
    ERNIE_NAMES,
    GLM_NAMES,
    GPT_OSS_NAMES,
    MIXTRAL_NAMES,
    ClampedGate,
    ernie_experts,
    ernie_gguf_experts,
    gpt_oss_experts,
    mixtral_experts,
    olmoe_experts,
    qwen2_experts,
    qwen_experts,
)
from .experts_deepseek import DEEPSEEK_GGUF_KEYS, dots_experts, glm_experts, glm_gguf_experts
from .family import Family
from .gemma import GEMMA2, GEMMA3, GEMMA4
from .granite_families import GRANITE_FAMILIES
from .latent_families import LATENT_FAMILIES
from .layer_windows import (
    no_window,
    rotated_layers,
    rotated_with_window,
    window_everywhere,
    window_everywhere_if_used,
    window_if_given,
    window_of_chosen_layers,
    window_of_every_other_layer,
    window_of_named_layers,
    window_of_pattern,
    window_of_three_in_four_layers,
    window_of_upper_layers,
)
from .lfm2_families import LFM2_FAMILIES
from .qwen35_families import QWEN35_FAMILIES

SOFT_CAP_KEYS = ("attn_logit_softcapping", "final_logit_softcapping")
"""The keys of the soft caps of scores and of logits, in config.json and in GGUF files."""

_OLMO2 = Family(
    "olmo2",
    "decoder",
    no_window,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="rows",
    default_rms_norm_eps=1e-5,
    input_norms=False,
    output_norms=True,
    defaults={"eos_token_id": 50279},
)

_GLM = Family(
    "glm",
    "decoder",
    no_window,
    qkv_bias="attention_bias",
    stacked_gate_up=True,
    partial_rotary=True,
    interleaved_rotary=True,
    default_rms_norm_eps=1.5625e-7,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "eos_token_id": [151329, 151336, 151338],
    },
)

_ERNIE = Family(
    "ernie4_5",
    "decoder",
    no_window,
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    interleaved_rotary=True,
    default_rope_theta=500_000.0,
    default_rms_norm_eps=1e-5,
    tied_by_default=True,
    defaults={"num_key_value_heads": 2, "head_dim": 128, "bos_token_id": 1, "eos_token_id": 2},
)

_MINISTRAL3 = Family(
    "ministral3",
    "decoder",
    window_if_given,
    default_rms_norm_eps=1e-5,
    has_query_scale=True,
    default_rope={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    defaults={"num_key_value_heads": 8, "head_dim": 128, "bos_token_id": 1, "eos_token_id": 2},
)

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", "decoder", no_window, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Family("mistral", "decoder", window_everywhere, defaults={"num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family(
        "qwen2", "decoder", window_of_upper_layers, qkv_bias=True, defaults={"num_key_value_heads": 32}
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "decoder",
        window_of_upper_layers,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="heads",
        default_head_dim=128,
        defaults={"num_key_value_heads": 32},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "decoder",
        window_if_given,
        default_rms_norm_eps=1e-5,
        default_original_context_len=4096,
        stacked_qkv=True,
        stacked_gate_up=True,
        partial_rotary=True,
        gguf_window_period=0,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        "decoder",
        window_of_named_layers,
        qkv_bias="qkv_bias",
        defaults={"num_key_value_heads": 16, "qkv_bias": True},
        experts=qwen2_experts,
        gguf_normalized=False,
        gguf_shared_gate=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "decoder",
        window_everywhere_if_used,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="heads",
        defaults={"num_key_value_heads": 4},
        experts=qwen_experts,
    ),
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Mistral3ForConditionalGeneration": dataclasses.replace(
        _MINISTRAL3, model_type="mistral3", has_text_config=True, text_model_type="ministral3"
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "decoder",
        window_if_given,
        defaults={"num_key_value_heads": 8},
        default_rms_norm_eps=1e-5,
        default_rope_theta=1e6,
        experts=mixtral_experts,
        expert_names=MIXTRAL_NAMES,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        "decoder",
        no_window,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="rows",
        default_rms_norm_eps=1e-5,
        defaults={"eos_token_id": 50279},
        experts=olmoe_experts,
        gguf_normalized=False,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "decoder",
        window_of_chosen_layers,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": 4},
        default_rope_theta=2e6,
        tied_by_default=True,
        rotated_layers=rotated_layers,
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": dataclasses.replace(
        _OLMO2,
        model_type="olmo3",
        sliding_windows=window_of_three_in_four_layers,
        default_rope_theta=500000.0,
        has_local_rope=True,
        defaults=_OLMO2.defaults | {"sliding_window": 4096},
        gguf_window_period=4,
    ),
    **GRANITE_FAMILIES,
    **QWEN35_FAMILIES,
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": dataclasses.replace(
        _GLM,
        model_type="glm4",
        output_norms=True,
        output_norm_names=("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        "decoder",
        no_window,
        qkv_bias="attention_bias",
        qk_norm="heads",
        qk_norm_key="use_qk_norm",
        partial_rotary=True,
        default_rms_norm_eps=1e-5,
        defaults={"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
        has_extra_layers=True,
        experts=glm_experts,
        expert_names=GLM_NAMES,
        gguf_experts=glm_gguf_experts,
        gguf_expert_keys=DEEPSEEK_GGUF_KEYS,
    ),
    "Dots1ForCausalLM": Family(
        "dots1",
        "decoder",
        window_of_upper_layers,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="heads",
        defaults={"num_key_value_heads": 32, "use_sliding_window": True, "max_window_layers": 62},
        experts=dots_experts,
        expert_names=GLM_NAMES,
        gguf_experts=glm_gguf_experts,
        gguf_expert_keys=DEEPSEEK_GGUF_KEYS,
    ),
    "ArceeForCausalLM": Family(
        "arcee",
        "decoder",
        no_window,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_gates=False,
        default_rms_norm_eps=1e-5,
        defaults={"hidden_act": "relu2", "bos_token_id": 128_000, "eos_token_id": 128_001},
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        "decoder",
        no_window,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="rotated_heads",
        qk_norm_key="use_qk_norm",
        qk_norm_names=("query_layernorm", "key_layernorm"),
        has_rope_alpha=True,
        default_rms_norm_eps=1e-5,
        defaults={"use_qk_norm": True, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        "decoder",
        no_window,
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": dataclasses.replace(
        _ERNIE,
        model_type="ernie4_5_moe",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        defaults={"num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2},
        experts=ernie_experts,
        expert_names=ERNIE_NAMES,
        gguf_experts=ernie_gguf_experts,
        gguf_expert_keys=ERNIE_GGUF_KEYS,
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        "decoder",
        window_of_pattern,
        qk_norm="heads",
        default_rms_norm_eps=1e-5,
        input_norms=False,
        output_norms=True,
        rotated_layers=rotated_with_window,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "bos_token_id": 0, "eos_token_id": 2},
        gguf_window_period=4,
    ),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": dataclasses.replace(GEMMA3, model_type="gemma3", has_text_config=True),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": dataclasses.replace(GEMMA4, model_type="gemma4", has_text_config=True),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        "decoder",
        window_of_every_other_layer,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        attention_sinks=True,
        default_head_dim=64,
        default_rms_norm_eps=1e-5,
        default_rope_theta=150000.0,
        defaults={"num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128},
        default_rope=_GPT_OSS_ROPE,
        experts=gpt_oss_experts,
        expert_names=GPT_OSS_NAMES,
        stacked_experts=True,
        gguf_window_period=2,
        gguf_window=None,
        gguf_gate=ClampedGate(1.702, 7.0),
    ),
    **LATENT_FAMILIES,
    **LFM2_FAMILIES,
}


def not_in_families(architecture: str) -> str:
    """The message about an architecture without a family."""
    return f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
