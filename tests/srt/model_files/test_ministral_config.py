"""Configs of Ministral 3, whose queries are scaled by their positions."""

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
from tercet.srt.model_files.rope_config import QueryScale, YarnScaling

ROPE: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
# What matters of the text_config of Ministral-3-8B.
MINISTRAL: dict[str, Any] = {
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": ROPE,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
WITH_IMAGES = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "mistral3",
    "text_config": {key: value for key, value in MINISTRAL.items() if key != "architectures"},
    "vision_config": {"model_type": "pixtral"},
}
BARE = {
    "model_type": "ministral3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 262144,
    "vocab_size": 131,
}


def scale_and_factor(config: ModelConfig) -> tuple[QueryScale | None, float]:
    assert isinstance(config.rope.scaling, YarnScaling)
    return config.rope.query_scale, config.rope.scaling.attention_factor


@pytest.mark.parametrize("keys", [MINISTRAL, WITH_IMAGES], ids=["text", "images"])
def test_a_published_model(keys: dict[str, Any], tmp_path: Path) -> None:
    config = load(tmp_path, keys)
    assert scale_and_factor(config) == (QueryScale(0.1, 16384), 1.0)
    assert config.rope.theta == 1e6 and config.sliding_windows == (None,) * 34
    assert config.dtype == keys.get("dtype") and not config.tie_word_embeddings


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config, theirs = load(tmp_path, BARE), AutoConfig.for_model(**BARE)
    assert_equals_transformers(config, theirs)
    rope = theirs.rope_parameters
    scale = QueryScale(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    assert scale_and_factor(config) == (scale, 1.0)
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


@pytest.mark.parametrize("name", ["ministral3", "ministral3_window", "ministral3_images"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.architectures = [
        "Mistral3ForConditionalGeneration" if name == "ministral3_images" else "Ministral3ForCausalLM"
    ]
    source.save_pretrained(tmp_path)
    text, config = source.get_text_config(), load_model_config(tmp_path)
    assert config.sliding_windows == (text.sliding_window,) * 3 and config.head_dim == text.head_dim
    assert config.tie_word_embeddings == source.tie_word_embeddings
    assert config.rope.query_scale == QueryScale(0.5, 16) and config.rope.theta == text.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama_4_scaling_beta": None}, "llama_4_scaling_beta must be a finite number above 0, got None"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings must be an integer"),
        ({"max_position_embeddings": 9}, "max_position_embeddings must be 262144, as at the top level .*, got 9"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, MINISTRAL | {"rope_parameters": ROPE | changes})


def test_another_language_model_beside_parts_for_images_is_refused(tmp_path: Path) -> None:
    keys = WITH_IMAGES | {"text_config": MINISTRAL | {"model_type": "mistral4"}}
    with pytest.raises(ValueError, match=r"text_config\.model_type must be ministral3, got 'mistral4'"):
        load(tmp_path, keys)


def test_queries_of_other_models_are_not_scaled(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    with pytest.raises(ValueError, match=r"settings that are not supported: llama_4_scaling_beta=0\.1"):
        load(tmp_path, MINISTRAL | changes)


@pytest.mark.parametrize(("mscale_all", "factor"), [(1.0, 1.0), (0.0, 1.1386294)])
def test_gguf(mscale_all: float, factor: float, tmp_path: Path) -> None:
    model = make_model("ministral3_window")
    model.config.rope_parameters["mscale_all_dim"] = mscale_all
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "mistral3"))
    assert config.architecture == "Ministral3ForCausalLM"
    scale, found = scale_and_factor(config)
    assert scale == QueryScale(0.5, 16) and found == pytest.approx(factor)


@pytest.mark.parametrize("key", ["attention.temperature_scale", "rope.scaling.yarn_log_multiplier"])
def test_factors_of_a_gguf_file_are_checked(key: str, tmp_path: Path) -> None:
    model = make_model("ministral3")
    name = "llama_4_scaling_beta" if key == "attention.temperature_scale" else "mscale_all_dim"
    model.config.rope_parameters[name] = -0.5
    with pytest.raises(ValueError, match=f"mistral3.{key} must be a number from 0 to 1000, got -0.5"):
        load_model_config(write_gguf(tmp_path / "m.gguf", model, "mistral3"))


def test_a_gguf_file_without_a_scale(tmp_path: Path) -> None:
    """As of Mistral Small 3, which has the same name."""
    model = make_model("ministral3")
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    assert load_model_config(write_gguf(tmp_path / "m.gguf", model, "mistral3")).rope.query_scale is None
