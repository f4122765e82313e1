"""Configs of tiny models with latent attention, as transformers has them."""

from __future__ import annotations

from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, MiniCPM3Config, YoutuConfig

BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 32,
    "v_head_dim": 40,
}
"""All sizes of a head differ."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
"""GGUF files have one number for both."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(16)],
    "long_factor": [2.0 + 0.5 * index for index in range(16)],
    "original_max_position_embeddings": 32,
}

EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

LATENT_CONFIGS = {
    "deepseek_v2": lambda: DeepseekV2Config(**BASE | EXPERTS, q_lora_rank=None, rope_parameters=YARN),
    "deepseek_v2_groups": lambda: DeepseekV2Config(
        **BASE | EXPERTS,
        q_lora_rank=96,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        tie_word_embeddings=True,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **BASE | EXPERTS, q_lora_rank=96, n_group=4, topk_group=2, rope_parameters=YARN | {"mscale_all_dim": 1.0}
    ),
    "deepseek_v3_one_group": lambda: DeepseekV3Config(
        **BASE | EXPERTS | {"first_k_dense_replace": 0}, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**BASE | EXPERTS, q_lora_rank=96),
    "glm4_moe_lite_dense": lambda: Glm4MoeLiteConfig(
        **BASE | EXPERTS | {"n_shared_experts": 1}, q_lora_rank=96, mlp_layer_types=["sparse", "dense", "sparse"]
    ),
    "youtu": lambda: YoutuConfig(**BASE, q_lora_rank=96, rms_norm_eps=1e-2),
    "youtu_yarn": lambda: YoutuConfig(**BASE, q_lora_rank=None, rope_parameters=YARN, tie_word_embeddings=False),
    "minicpm3": lambda: MiniCPM3Config(**BASE, q_lora_rank=96, dim_model_base=16, rms_norm_eps=1e-2),
    "minicpm3_long": lambda: MiniCPM3Config(
        **BASE, q_lora_rank=None, scale_emb=1, tie_word_embeddings=False, rope_parameters=LONGROPE
    ),
}
