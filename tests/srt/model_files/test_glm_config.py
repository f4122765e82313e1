"""Configs of GLM-4, which rotates neighbouring components of a part of each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_configs import CONFIGS
from tiny_models import make_model
from transformers import AutoConfig

from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import YarnScaling

# The config.json of GLM-4-9B-0414.
GLM4: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151552,
}
BARE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, GLM4)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (40, 32, 2, 128)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    assert config.input_norms and config.output_norms and config.qk_norm is None
    assert config.rope.rotary_dim == 64 and config.eos_token_ids == (151329, 151336, 151338)
    assert not load(tmp_path, GLM4 | {"architectures": ["GlmForCausalLM"], "model_type": "glm"}).output_norms


def test_longer_contexts(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = load(tmp_path, GLM4 | {"rope_scaling": yarn})
    assert isinstance(config.rope.scaling, YarnScaling) and config.rope.rotary_dim == 64
    assert config.context_len == 131072


@pytest.mark.parametrize("model_type", ["glm", "glm4"])
def test_defaults_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    keys = BARE | {"model_type": model_type}
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert config.qkv_bias and theirs.attention_bias and not config.o_bias
    assert config.rope.rotary_dim == config.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, tuple(theirs.eos_token_id))
    theirs.attention_bias = False  # that of the output, which never has one
    assert_equals_transformers(load(tmp_path, keys | {"attention_bias": False}), theirs)


@pytest.mark.parametrize("name", ["glm", "glm_whole", "glm4", "glm4_yarn"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    rotary_dim = source.head_dim * source.rope_parameters["partial_rotary_factor"]
    assert (config.rope.rotary_dim or config.head_dim) == rotary_dim and config.qkv_bias == source.attention_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, "mlp_bias is not supported for Glm4ForCausalLM"),
        ({"sliding_window": 4096}, "sliding_window is not supported"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, GLM4 | changes)


def test_gguf(tmp_path: Path) -> None:
    def of(name: str, arch: str = "glm4", **keys: Any) -> ModelConfig:
        named = {key.replace("__", "."): value for key, value in keys.items()}
        return load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), arch, keys=named))

    config = of("glm4")
    assert config.architecture == "Glm4ForCausalLM" and config.input_norms and config.output_norms
    assert config.rope.rotary_dim == 8 and config.qkv_bias and not config.o_bias
    assert of("glm4_yarn").rope.rotary_dim == 18 and not of("glm4_yarn").qkv_bias
    # What a model that also takes images has: other positions for each part of a head.
    with pytest.raises(ValueError, match=r"glm4\.rope\.dimension_sections=.* is not supported"):
        of("glm4", rope__dimension_sections=[2, 3, 3])
