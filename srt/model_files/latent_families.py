"""The families whose attention is latent attention (latent_config.py)."""

from __future__ import annotations

import dataclasses

from .experts_config import GLM_NAMES
from .experts_deepseek import (
    DEEPSEEK_GGUF_KEYS,
    deepseek_gguf_experts,
    deepseek_v2_experts,
    deepseek_v3_experts,
    glm_flash_experts,
)
from .family import Family
from .layer_windows import no_window

_DEEPSEEK_SIZES = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "decoder",
    no_window,
    has_latents=True,
    interleaved_rotary=True,
    has_extra_layers=True,
    defaults=_DEEPSEEK_SIZES | {"bos_token_id": 1, "eos_token_id": 2, "num_nextn_predict_layers": 0},
    experts=deepseek_v2_experts,
    expert_names=GLM_NAMES,
    gguf_experts=deepseek_gguf_experts,
    gguf_expert_keys=DEEPSEEK_GGUF_KEYS,
)
_DEEPSEEK_V3 = dataclasses.replace(
    _DEEPSEEK_V2,
    model_type="deepseek_v3",
    defaults=_DEEPSEEK_SIZES | {"bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1},
    experts=deepseek_v3_experts,
)
LATENT_FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": dataclasses.replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        default_rms_norm_eps=1e-5,
        defaults={
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "num_nextn_predict_layers": 0,
        },
        experts=glm_flash_experts,
    ),
    "YoutuForCausalLM": Family(
        "youtu",
        "decoder",
        no_window,
        has_latents=True,
        interleaved_rotary=True,
        tied_by_default=True,
        defaults=_DEEPSEEK_SIZES | {"bos_token_id": 128_000, "eos_token_id": 128_001},
    ),
    "MiniCPM3ForCausalLM": Family(
        "minicpm3",
        "decoder",
        no_window,
        has_latents=True,
        has_depth_scale=True,
        default_rms_norm_eps=1e-5,
        tied_by_default=True,
        defaults={
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}
