"""Configs of tiny models of Gemma 4, as transformers has them."""

from __future__ import annotations

from transformers import Gemma4Config, Gemma4TextConfig

SLIDING, FULL = "sliding_attention", "full_attention"
BASE = {
    "vocab_size": 131,
    "vocab_size_per_layer_input": 137,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 7,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHARING = BASE | {
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}

GEMMA4_CONFIGS = {
    "gemma4": lambda: Gemma4TextConfig(**BASE, final_logit_softcapping=3.0),
    "gemma4_heads": lambda: Gemma4TextConfig(
        **BASE | {"layer_types": [SLIDING, FULL, FULL], "global_head_dim": 32},
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        tie_word_embeddings=False,
    ),
    "gemma4_inputs": lambda: Gemma4TextConfig(
        **BASE | {"hidden_size_per_layer_input": 12, "global_head_dim": 8, "layer_types": [FULL, SLIDING, FULL]},
        rope_parameters={
            FULL: {"rope_type": "proportional", "rope_theta": 20000.0, "partial_rotary_factor": 0.5, "factor": 2.0},
            SLIDING: {"rope_type": "default", "rope_theta": 500.0},
        },
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma4_sharing": lambda: Gemma4TextConfig(**SHARING, use_double_wide_mlp=True),
    # No prompt of a test has the tokens that stand for images and sound.
    "gemma4_images": lambda: Gemma4Config(
        text_config=SHARING, vision_config=VISION, image_token_id=201, video_token_id=202, audio_token_id=203
    ),
}
