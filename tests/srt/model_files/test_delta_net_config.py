"""The config of Qwen 3.5: the layers that have a Gated DeltaNet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_configs import CONFIGS
from tiny_delta_net_configs import DELTA_NET_CONFIGS

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.delta_net_config import DeltaNetConfig
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import RopeConfig

TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "eos_token_id": 2,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "vocab_size": 248320,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}
"""As the text_config of published models, which also take images."""


def load(folder: Path, **changes: Any) -> ModelConfig:
    """`changes`: a value of None removes a key of text_config."""
    text = {key: value for key, value in (TEXT | changes).items() if value is not None}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 12},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


@pytest.mark.parametrize("name", DELTA_NET_CONFIGS)
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    layers = tuple(layer for layer, kind in enumerate(source.layer_types) if kind == "linear_attention")
    sizes = (
        source.linear_num_key_heads,
        source.linear_num_value_heads,
        source.linear_key_head_dim,
        source.linear_value_head_dim,
        source.linear_conv_kernel_dim,
    )
    assert config.delta_net == (DeltaNetConfig(layers, *sizes, name == "qwen3_next") if layers else None)
    assert config.attention_layers == tuple(layer for layer in range(config.num_layers) if layer not in layers)
    assert config.num_attention_gates == config.num_heads * config.head_dim
    assert config.norm_offset == 1 and config.qkv_bias == config.o_bias == source.attention_bias


def test_a_published_config(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.delta_net == DeltaNetConfig((0, 1, 2, 4, 5, 6), 16, 16, 128, 128, 4)
    assert config.delta_net.projected_sizes == (6144, 2048, 16, 16)
    assert config.rope == RopeConfig(theta=1e7, rotary_dim=64)
    assert config.tie_word_embeddings and (config.head_dim, config.context_len) == (256, 262144)
    assert load(tmp_path, full_attention_interval=None) == config
    assert load(tmp_path, full_attention_interval=2).attention_layers == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 7}, "layer_types must be 'linear_attention' or 'full_attention'"),
        ({"layer_types": ["mamba"] * 8}, "layer_types must be"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads must be a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer from 2 to 16, got 1"),
        ({"rope_parameters": {"rope_type": "default", "x": 1}}, "rope type 'default' has settings .* x=1"),
        ({"linear_key_head_dim": 512}, "linear_key_head_dim must be an integer from 1 to 256, got 512"),
    ],
)
def test_sizes_that_make_no_sense(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"layer_types": ["linear_attention"] * 8}, "at least one layer must have attention"),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=message):
        load(tmp_path, **changes)
