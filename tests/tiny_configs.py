"""Configs of tiny models of every supported architecture, as transformers has them."""

from __future__ import annotations

from tiny_convolution_configs import CONVOLUTION_CONFIGS
from tiny_delta_net_configs import DELTA_NET_CONFIGS
from tiny_gemma4_configs import GEMMA4_CONFIGS
from tiny_latent_configs import LATENT_CONFIGS
from transformers import (
    ArceeConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
ATTENTION = ["full_attention"] * 3
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}

SMALL_THETA = {"rope_type": "default", "rope_theta": 1000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}
LARGE_EPS = {"rms_norm_eps": 1e-2}
"""Models whose residual stream is divided show with it which epsilon each norm has."""
GEMMA = (
    BASE
    | LARGE_EPS
    | {"head_dim": 24, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
)
GEMMA2 = BASE | {
    "head_dim": 24, "sliding_window": 7, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
"""Both caps are less than many scores and logits."""
GRANITE = BASE | LARGE_EPS | {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 6.0,
}  # fmt: skip
MINISTRAL = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
"""Queries are scaled from position 16 on."""
TINY_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip

CONFIGS = {
    "llama": lambda: LlamaConfig(**BASE),
    "llama_biases": lambda: LlamaConfig(**BASE, attention_bias=True, mlp_bias=True, head_dim=24),
    "llama_31_tied": lambda: LlamaConfig(**BASE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama_linear": lambda: LlamaConfig(
        **BASE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    ),
    "llama_mha": lambda: LlamaConfig(**{**BASE, "num_key_value_heads": 4}),
    "mistral_window": lambda: MistralConfig(**BASE, sliding_window=7),
    "mistral_full": lambda: MistralConfig(**BASE, sliding_window=None, head_dim=32),
    "qwen2_tied": lambda: Qwen2Config(**BASE, tie_word_embeddings=True),
    "qwen2_upper_window": lambda: Qwen2Config(**BASE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen2_yarn": lambda: Qwen2Config(**BASE, rope_parameters=YARN),
    "phi3": lambda: Phi3Config(**BASE, sliding_window=6),
    "phi3_partial": lambda: Phi3Config(
        **BASE,
        tie_word_embeddings=True,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75},
        original_max_position_embeddings=32,
    ),
    "smollm3": lambda: SmolLM3Config(
        **BASE, no_rope_layer_interval=2, tie_word_embeddings=True, rope_parameters=SMALL_THETA
    ),
    "smollm3_default": lambda: SmolLM3Config(
        **BASE | {"num_hidden_layers": 4}, tie_word_embeddings=True, rope_parameters=SMALL_THETA
    ),
    "smollm3_window": lambda: SmolLM3Config(
        **BASE, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=5, tie_word_embeddings=False
    ),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=24, attention_bias=True),
    "qwen3_layer_types": lambda: Qwen3Config(
        **BASE,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **BASE,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2_moe_all": lambda: Qwen2MoeConfig(
        **BASE,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=160,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **BASE,
        head_dim=24,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_moe_sparse": lambda: Qwen3MoeConfig(
        **BASE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, tie_word_embeddings=True
    ),
    "qwen3_moe_all": lambda: Qwen3MoeConfig(
        **BASE, head_dim=16, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "olmo2": lambda: Olmo2Config(**BASE),
    "olmo2_scaled": lambda: Olmo2Config(
        **BASE | {"num_key_value_heads": 1}, attention_bias=True, tie_word_embeddings=True, rope_parameters=YARN
    ),
    "olmo3": lambda: Olmo3Config(
        **BASE | {"num_hidden_layers": 5, "num_key_value_heads": 4},
        sliding_window=7,
        rope_parameters={"full_attention": YARN | {"rope_theta": 500000.0}},
    ),
    "olmo3_types": lambda: Olmo3Config(
        **BASE,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attention_bias=True,
        rope_parameters={"full_attention": SMALL_THETA, "sliding_attention": SMALL_THETA | {"rope_theta": 100.0}},
    ),
    "granite": lambda: GraniteConfig(**GRANITE, tie_word_embeddings=True),
    "granite_biases": lambda: GraniteConfig(**GRANITE | {"logits_scaling": 8.0}, attention_bias=True, mlp_bias=True),
    "granitemoe": lambda: GraniteMoeConfig(
        **GRANITE, num_local_experts=6, num_experts_per_tok=3, tie_word_embeddings=True
    ),
    "granitemoe_biases": lambda: GraniteMoeConfig(**GRANITE, attention_bias=True, num_local_experts=3),
    "granitemoeshared": lambda: GraniteMoeSharedConfig(
        **GRANITE, num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=64, tie_word_embeddings=True
    ),
    "granitemoeshared_biases": lambda: GraniteMoeSharedConfig(
        **GRANITE, attention_bias=True, num_local_experts=3, shared_intermediate_size=128
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **GRANITE,
        layer_types=ATTENTION,
        num_local_experts=0,
        shared_intermediate_size=48,
        position_embedding_type="rope",
    ),
    "granitemoehybrid_experts": lambda: GraniteMoeHybridConfig(
        **GRANITE, layer_types=ATTENTION, num_local_experts=3, shared_intermediate_size=64, tie_word_embeddings=True
    ),
    "granitemoeshared_none": lambda: GraniteMoeSharedConfig(**GRANITE, num_local_experts=3),
    # The configs of GLM add their partial_rotary_factor to the dict that they get.
    "glm": lambda: GlmConfig(**BASE, head_dim=24, rope_parameters=dict(SMALL_THETA)),
    "glm_whole": lambda: GlmConfig(
        **BASE,
        head_dim=16,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters=SMALL_THETA | {"partial_rotary_factor": 1.0},
    ),
    "glm4": lambda: Glm4Config(**BASE | LARGE_EPS, head_dim=16, rope_parameters=dict(SMALL_THETA)),
    "glm4_yarn": lambda: Glm4Config(
        **BASE | {"num_key_value_heads": 1},
        head_dim=24,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"partial_rotary_factor": 0.75},
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **BASE,
        head_dim=24,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        rope_parameters=dict(SMALL_THETA),
    ),
    "glm4_moe_sparse": lambda: Glm4MoeConfig(
        **BASE,
        head_dim=16,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters=SMALL_THETA | {"partial_rotary_factor": 1.0},
    ),
    "glm4_moe_groups": lambda: Glm4MoeConfig(
        **BASE,
        head_dim=16,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=32,
        first_k_dense_replace=0,
    ),
    "dots1": lambda: Dots1Config(
        **BASE,
        n_routed_experts=15,
        num_experts_per_tok=4,
        n_group=5,
        topk_group=2,
        moe_intermediate_size=32,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=None,
        rope_parameters=dict(SMALL_THETA),
    ),
    "dots1_window": lambda: Dots1Config(
        **BASE,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        attention_bias=True,
        sliding_window=9,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "arcee": lambda: ArceeConfig(**BASE, head_dim=24, rope_parameters=dict(YARN)),
    "arcee_biases": lambda: ArceeConfig(**BASE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "ministral3": lambda: Ministral3Config(**BASE, head_dim=24, rope_parameters=dict(MINISTRAL)),
    "ministral3_window": lambda: Ministral3Config(
        **BASE,
        head_dim=16,
        sliding_window=9,
        tie_word_embeddings=True,
        rope_parameters=MINISTRAL | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "ministral3_images": lambda: Mistral3Config(
        text_config=BASE | {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL},
        vision_config=TINY_VISION | {"model_type": "pixtral", "head_dim": 8},
        eos_token_id=2,
        image_token_index=130,
        tie_word_embeddings=False,
    ),
    "hunyuan_v1_dense": lambda: HunYuanDenseV1Config(
        **BASE,
        head_dim=24,
        attention_bias=True,
        rope_parameters=SMALL_THETA | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
    ),
    "hunyuan_v1_dense_tied": lambda: HunYuanDenseV1Config(
        **BASE, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN | {"attention_factor": 1.3}
    ),
    "seed_oss": lambda: SeedOssConfig(**BASE, head_dim=24, mlp_bias=True, rope_parameters=SMALL_THETA),
    "seed_oss_out": lambda: SeedOssConfig(
        **BASE, head_dim=16, attention_bias=False, attention_out_bias=True, tie_word_embeddings=True
    ),
    "ernie4_5": lambda: Ernie4_5Config(**BASE, head_dim=24, rope_parameters=dict(SMALL_THETA)),
    "ernie4_5_biases": lambda: Ernie4_5Config(**BASE, head_dim=16, use_bias=True, tie_word_embeddings=False),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(
        **BASE,
        moe_num_experts=6,
        moe_k=3,
        moe_intermediate_size=32,
        moe_num_shared_experts=2,
        rope_parameters=dict(SMALL_THETA),
    ),
    "ernie4_5_moe_sparse": lambda: Ernie4_5_MoeConfig(
        **BASE,
        moe_num_experts=5,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_norm_min=0.75,
        tie_word_embeddings=False,
    ),
    "exaone4": lambda: Exaone4Config(**BASE | {"num_hidden_layers": 5}, sliding_window=7, head_dim=24),
    "exaone4_types": lambda: Exaone4Config(
        **BASE,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(LLAMA3),
    ),
    "exaone4_full": lambda: Exaone4Config(
        **BASE, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True
    ),
    "gemma2": lambda: Gemma2Config(**GEMMA2),
    "gemma2_scores": lambda: Gemma2Config(
        **GEMMA2 | {"head_dim": 16, "query_pre_attn_scalar": 9, "final_logit_softcapping": None},
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.5},
    ),
    "gemma2_logits": lambda: Gemma2Config(**GEMMA2 | {"attn_logit_softcapping": None, "num_key_value_heads": 1}),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA),
    "gemma3_default": lambda: Gemma3TextConfig(
        **BASE | {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
        rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.5}},
    ),
    "gemma3_scaled": lambda: Gemma3TextConfig(
        **GEMMA | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "head_dim": 16},
        query_pre_attn_scalar=9,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gemma3_images": lambda: Gemma3Config(
        text_config=GEMMA, vision_config=TINY_VISION, eos_token_id=2, image_token_index=130
    ),
    "mixtral": lambda: MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: OlmoeConfig(**BASE, num_experts=6, num_experts_per_tok=3),
    "olmoe_normalized": lambda: OlmoeConfig(
        **BASE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True
    ),
    "gpt_oss": lambda: GptOssConfig(
        **BASE,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=6,
        swiglu_limit=1.5,
        rope_parameters=YARN | {"truncate": False},
    ),
    "gpt_oss_full": lambda: GptOssConfig(
        **BASE | {"num_hidden_layers": 2},
        head_dim=24,
        num_local_experts=4,
        num_experts_per_tok=4,
        layer_types=["full_attention"] * 2,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters=SMALL_THETA,
    ),
    "mixtral_window": lambda: MixtralConfig(**BASE, num_local_experts=3, num_experts_per_tok=1, sliding_window=7),
    **LATENT_CONFIGS,
    **CONVOLUTION_CONFIGS,
    **DELTA_NET_CONFIGS,
    **GEMMA4_CONFIGS,
}
