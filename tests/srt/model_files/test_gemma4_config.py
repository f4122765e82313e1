"""Configs of Gemma 4, for text only and for images and sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_configs import load
from tiny_configs import CONFIGS
from tiny_gemma4_configs import GEMMA4_CONFIGS
from transformers import Gemma4TextConfig

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.gemma4_config import Heads
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import ProportionalScaling, RopeConfig

TEXT: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 6,
    "final_logit_softcapping": 30.0,
    "dtype": "bfloat16",
}


def assert_has_the_layers_of(config: ModelConfig, theirs: Gemma4TextConfig) -> None:
    layers = range(theirs.num_hidden_layers)
    own = [theirs.per_layer_config[layer] for layer in layers]
    assert config.num_layers == len(layers) and config.num_heads == theirs.num_attention_heads
    assert [config.heads(layer) for layer in layers] == [(each.num_key_value_heads, each.head_dim) for each in own]
    assert (config.num_kv_heads, config.head_dim) == tuple(map(max, *(config.heads(layer) for layer in layers)))
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert config.sliding_windows == tuple(windows)
    stores = [mode != "reuse" for mode in theirs.kv_sharing_modes]
    assert config.kv_layers == tuple(layer for layer in layers if stores[layer])
    for layer in layers:
        source = config.kv_source(layer)
        assert stores[source] and theirs.layer_types[source] == theirs.layer_types[layer]
        assert source == layer if stores[layer] else theirs.kv_sharing_modes[source] == "store"
    assert [rope.theta for rope in config.ropes] == [
        theirs.rope_parameters[kind]["rope_theta"] for kind in theirs.layer_types
    ]
    assert config.attention_scale == 1 and config.stream_divisor == 1
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.logits_soft_cap == theirs.final_logit_softcapping and config.scores_soft_cap is None
    assert config.qkv_bias == config.o_bias == theirs.attention_bias
    gemma4 = config.gemma4
    assert gemma4 is not None and gemma4.input_dim == theirs.hidden_size_per_layer_input
    assert not gemma4.input_dim or gemma4.input_vocab_size == theirs.vocab_size_per_layer_input
    doubled = [theirs.use_double_wide_mlp and not each for each in stores]
    assert gemma4.widths == tuple(theirs.intermediate_size * (1 + each) for each in doubled)
    assert config.intermediate_size == max(gemma4.widths)
    full = [window is None and each for window, each in zip(windows, stores, strict=True)]
    assert gemma4.layers_without_values == tuple(layer for layer in layers if full[layer] and theirs.attention_k_eq_v)


@pytest.mark.parametrize("name", GEMMA4_CONFIGS)
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    kind = "Gemma4ForConditionalGeneration" if name == "gemma4_images" else "Gemma4ForCausalLM"
    source.architectures = [kind]
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.architecture == kind
    assert_has_the_layers_of(config, source.get_text_config())


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size_per_layer_input": 0},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 128},
        {"num_global_key_value_heads": 2},
        {"num_kv_shared_layers": 6, "use_double_wide_mlp": True},
        {"num_hidden_layers": 8},
        {"per_layer_config": {"5": {"head_dim": 128}, "11": {"head_dim": 128}}, "num_hidden_layers": 12},
    ],
)
def test_defaults_are_those_of_transformers(keys: dict[str, Any], tmp_path: Path) -> None:
    assert_has_the_layers_of(load(tmp_path, {"model_type": "gemma4_text"} | keys), Gemma4TextConfig(**keys))


def test_heads_of_two_sizes(tmp_path: Path) -> None:
    config = load(tmp_path, TEXT)
    assert config.sliding_windows == ((512,) * 5 + (None,)) * 2
    assert config.ropes[:5] == (RopeConfig(1e4, head_dim=256),) * 5
    # A quarter of the frequencies of a head of 512 components.
    assert config.ropes[5] == RopeConfig(1e6, ProportionalScaling(64, 1.0), head_dim=512)
    assert [config.heads(layer) for layer in (4, 5)] == [Heads(4, 256), Heads(4, 512)]
    assert config.gemma4 is not None and config.gemma4.kv_sources == (0, 1, 2, 3, 4, 5, 4, 4, 4, 4, 4, 5)
    assert config.embedding_factor == 48 and config.output_norm_factor == 1 and config.logits_soft_cap == 30
    images = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": TEXT}
    assert load(tmp_path, images).gemma4 == config.gemma4


def test_heads_of_one_size(tmp_path: Path) -> None:
    config = load(tmp_path, TEXT | {"global_head_dim": 256})
    assert {config.heads(layer) for layer in range(12)} == {Heads(4, 256)}
    assert config.ropes[5] == RopeConfig(1e6, ProportionalScaling(32, 1.0))


def test_what_concerns_only_images_is_not_read(tmp_path: Path) -> None:
    assert load(tmp_path, TEXT | {"use_bidirectional_attention": "vision"}) == load(tmp_path, TEXT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block=true is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be true or false, got 'all'"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers must be so few that each kind .* got 7"),
        ({"num_kv_shared_layers": 13}, "num_kv_shared_layers must be an integer from 0 to 12, got 13"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(8\) must be a multiple of num_key_value_heads \(3\)"),
        ({"global_head_dim": 33}, "head_dim must be even for rotary embedding, got 33"),
        (
            {"vocab_size_per_layer_input": 7},
            r"vocab_size_per_layer_input must be at least vocab_size \(262144\), got 7",
        ),
        ({"per_layer_config": {"1": {"sliding_window": 5}}}, "per_layer_config has keys that are not supported"),
        ({"per_layer_config": {"12": {"head_dim": 16}}}, r"per_layer_config must name layers below 12, got \['12'\]"),
        ({"per_layer_config": {"5": {"head_dim": 128}}}, "must give all layers of one kind .* the same heads"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ModelNotSupported, ValueError), match=message):
        load(tmp_path, TEXT | changes)


def test_layers_with_two_digits_as_transformers_writes_them(tmp_path: Path) -> None:
    theirs = Gemma4TextConfig(architectures=["Gemma4ForCausalLM"])
    theirs.save_pretrained(tmp_path)
    assert '"05"' in (tmp_path / "config.json").read_text()
    assert_has_the_layers_of(load_model_config(tmp_path), theirs)
