"""The config of LFM2: the layers that have a short convolution, and the keys that have other names than Llama's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_configs import CONFIGS
from tiny_convolution_configs import CONVOLUTION_CONFIGS
from transformers import Lfm2Config, Lfm3Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import ProportionalScaling, RopeConfig
from tercet.srt.model_files.short_convolutions import ShortConvolutions

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 131,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "norm_eps": 1e-4,
    "rope_theta": 5e5,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
"""As the files of LFM2-1.2B: keys that newer versions of transformers do not write."""


def load(folder: Path, **changes: Any) -> ModelConfig:
    """`changes`: a value of None removes a key."""
    settings = {key: value for key, value in (LFM2 | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    return load_model_config(folder)


@pytest.mark.parametrize("name", CONVOLUTION_CONFIGS)
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    kinds = source.layer_types
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")
    assert config.convolutions == ShortConvolutions(layers, 64, source.conv_L_cache, source.conv_bias)
    assert config.attention_layers == tuple(layer for layer in range(len(kinds)) if layer not in layers)
    assert config.rms_norm_eps == source.norm_eps and config.qk_norm == "heads"
    assert config.tie_word_embeddings == source.tie_word_embeddings
    windows = [getattr(source, "sliding_window", 0) if kind == "sliding_attention" else None for kind in kinds]
    assert config.sliding_windows == tuple(windows)
    assert (config.attention_gates == "heads") == getattr(source, "use_attention_gate", False)
    assert config.output_norms == getattr(source, "use_sandwich_norm", False)
    assert (config.rope.theta, config.bos_token_id, config.eos_token_ids) == (1e6, 1, (2,))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_ff_dim": 6912},
        {"block_ff_dim": None, "intermediate_size": 200},
        {"block_ffn_dim_multiplier": 1.3},
        {"block_multiple_of": 7},
        {"block_auto_adjust_ff_dim": False},
    ],
    ids=str,
)
def test_the_width_of_feed_forward_layers_is_that_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    config = load(tmp_path, **changes)
    assert config.intermediate_size == Lfm2MLP(Lfm2Config.from_pretrained(tmp_path)).w1.out_features


def test_an_old_config(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.rms_norm_eps, config.rope.theta, config.tie_word_embeddings) == (1e-4, 5e5, True)
    assert not load(tmp_path, tie_embedding=False).tie_word_embeddings
    assert load(tmp_path, layer_types=None, full_attn_idxs=[0, 3]).attention_layers == (0, 3)
    assert load(tmp_path, layer_types=None).convolutions is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["conv"] * 4}, ModelNotSupported, "at least one layer must have attention"),
        ({"layer_types": ["conv"]}, ValueError, "layer_types must be 'conv' or 'full_attention' for each of 4 layers"),
        ({"layer_types": ["conv", "mamba"] * 2}, ValueError, "layer_types must be 'conv' or 'full_attention'"),
        ({"layer_types": None, "full_attn_idxs": [4]}, ValueError, r"full_attn_idxs must be layers below 4, got \[4\]"),
        ({"conv_L_cache": 0}, ValueError, "conv_L_cache must be an integer from 1 to 64, got 0"),
        ({"conv_L_cache": 65}, ValueError, "conv_L_cache must be an integer from 1 to 64, got 65"),
        ({"block_multiple_of": 0}, ValueError, "block_multiple_of must be an integer from 1"),
        ({"norm_eps": "small"}, ValueError, "norm_eps must be a finite number above 0, got 'small'"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        load(tmp_path, **changes)


def test_experts_need_corrections(tmp_path: Path) -> None:
    changes = {"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "intermediate_size": 96}
    assert load(tmp_path, **changes).experts is not None
    with pytest.raises(ModelNotSupported, match="use_expert_bias must be true"):
        load(tmp_path, **changes, use_expert_bias=False)
    assert load(tmp_path, **changes, num_dense_layers=4).experts is None


LFM3 = {
    "architectures": ["Lfm3ForCausalLM"],
    "model_type": "lfm3",
    "num_hidden_layers": 9,
    "head_dim": 16,
    "intermediate_size": 96,
    "layer_types": None,
    "block_ff_dim": None,
    "block_multiple_of": None,
    "rope_theta": None,
}


def test_defaults_of_lfm3_are_those_of_transformers(tmp_path: Path) -> None:
    config = load(tmp_path, **LFM3)
    theirs = Lfm3Config.from_pretrained(tmp_path)
    kinds = theirs.layer_types
    assert kinds.count("sliding_attention") == kinds.count("full_attention") == 2
    assert config.attention_layers == tuple(layer for layer, kind in enumerate(kinds) if kind != "conv")
    assert config.sliding_windows == tuple(256 if kind == "sliding_attention" else None for kind in kinds)
    assert config.convolutions is not None and config.convolutions.width == theirs.conv_L_cache == 7
    assert config.attention_gates and config.output_norms and config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert config.ropes[2] == RopeConfig(1e6, ProportionalScaling(4, 1.0)) and config.ropes[4] == RopeConfig(1e4)


@pytest.mark.parametrize("keys", [{}, {"norm_eps": 1e-3}, {"rms_norm_eps": 1e-3}], ids=str)
def test_the_epsilon_of_lfm3_has_two_names(keys: dict[str, float], tmp_path: Path) -> None:
    config = load(tmp_path, **LFM3 | {"norm_eps": None} | keys)
    assert config.rms_norm_eps == Lfm3Config.from_pretrained(tmp_path).norm_eps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"] * 8 + ["chunked_attention"]}, "layer_types must be 'conv' or 'full_attention' or 's"),
        ({"layer_types": ["full_attention"]}, "layer_types must be .* for each of 9 layers"),
        ({"attention_bias": True}, "attention_bias is not supported for Lfm3ForCausalLM"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor must be at most 1, got 1.5",
        ),
    ],
    ids=str,
)
def test_what_is_refused_of_lfm3(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **LFM3 | changes)
