"""Configs of OLMo, whose layers normalise their outputs, and combinations of norms that no model has."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_configs import CONFIGS
from tiny_models import make_model
from toy_runner import TOY
from transformers import AutoConfig

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.experts_config import ExpertsConfig
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import LinearScaling, RopeConfig, YarnScaling

# The config.json of OLMo-2-0425-1B.
OLMO2: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": False,
    "vocab_size": 100352,
}
# That of Olmo-3-7B-Instruct.
OLMO3: dict[str, Any] = OLMO2 | {
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 100278,
}
BARE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}
EXPERTS = ExpertsConfig(num_experts=3, num_experts_per_token=2, intermediate_size=16, normalized=True)


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, OLMO2)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 16, 16, 128)
    assert config.output_norms and not config.input_norms and config.qk_norm == "rows"
    assert config.rope.theta == 500000 and config.rms_norm_eps == 1e-6 and config.sliding_windows == (None,) * 16
    assert config.eos_token_ids == (100257,) and not (config.tie_word_embeddings or config.qkv_bias or config.o_bias)


def test_a_published_model_with_windows(tmp_path: Path) -> None:
    config = load(tmp_path, OLMO3)
    yarn = RopeConfig(500000, YarnScaling(8.0, 8192, 32, 1, 1.2079441541679836, True))
    assert config.sliding_windows == (4096, 4096, 4096, None) * 8 and config.context_len == 65536
    assert config.ropes == (RopeConfig(500000), RopeConfig(500000), RopeConfig(500000), yarn) * 8
    assert config.output_norms and not config.input_norms and config.qk_norm == "rows"
    assert load(tmp_path, {key: value for key, value in OLMO3.items() if key != "layer_types"}) == config


@pytest.mark.parametrize("name", ["olmo3", "olmo3_types"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.architectures = ["Olmo3ForCausalLM"]
    source.save_pretrained(tmp_path)
    assert_equals_transformers(load_model_config(tmp_path), source)


def test_both_kinds_of_layers_may_have_a_rotation_of_their_own(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0}
    parameters = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}
    config = load(tmp_path, BARE | {"model_type": "olmo3", "rope_parameters": parameters})
    assert config.ropes[2:4] == (RopeConfig(70.0), RopeConfig(3000.0, LinearScaling(4.0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 10000.0}, "rope_theta=10000 outside rope_parameters is not supported.*supported: 500000"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": None}, "rope_parameters has settings"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
        ({"sliding_window": None}, "sliding_window must be an integer"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, OLMO3 | changes)


@pytest.mark.parametrize("model_type", ["olmo2", "olmo3"])
def test_defaults_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    keys = BARE | {"model_type": model_type}
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert_equals_transformers(config, theirs)
    assert config.eos_token_ids == (theirs.eos_token_id,) and config.bos_token_id == theirs.bos_token_id
    assert (config.sliding_windows == (4096, 4096, 4096, None, 4096)) == (model_type == "olmo3")


def test_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="sliding_window is not supported with this architecture"):
        load(tmp_path, OLMO2 | {"sliding_window": 4096})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_norms": False}, "without norms of their inputs and outputs"),
        ({"output_norms": True, "experts": EXPERTS}, "norms of outputs are not supported in a mixture of experts"),
        ({"embedding_scale": 2.0, "input_norms": False, "output_norms": True}, "without norms of the layers' inputs"),
    ],
)
def test_norms_that_the_decoder_would_ignore_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotSupported, match=message):
        dataclasses.replace(TOY, **changes)


def gguf(folder: Path, name: str = "olmo3", **options: Any) -> ModelConfig:
    return load_model_config(write_gguf(folder / "m.gguf", make_model(name), "olmo2", **options))


def test_gguf_files(tmp_path: Path) -> None:
    plain, windows = gguf(tmp_path, "olmo2_scaled"), gguf(tmp_path)
    assert plain.architecture == "Olmo2ForCausalLM" and plain.sliding_windows == (None,) * 3
    assert plain.rope.theta == 5000 and isinstance(plain.rope.scaling, YarnScaling)
    assert windows.architecture == "Olmo3ForCausalLM" and windows.sliding_windows == (7, 7, 7, None, 7)
    assert [rope.scaling is None for rope in windows.ropes] == [True, True, True, False, True]
    for config in (plain, windows):
        assert {rope.theta for rope in config.ropes} == {config.rope.theta}
        assert config.qk_norm == "rows" and config.output_norms and not config.input_norms


def test_a_gguf_file_may_name_the_layers_with_a_window_or_their_period(tmp_path: Path) -> None:
    def of(pattern: Any) -> ModelConfig:
        return gguf(tmp_path, keys={"attention.sliding_window_pattern": pattern})

    assert of([True, False, True, False, False]).sliding_windows == (7, None, 7, None, None)
    assert of(3).sliding_windows == (7, 7, None, 7, 7)
    assert of(None).sliding_windows == (7, 7, 7, None, 7)
    for wrong in ([True] * 4, [1, 0, 1, 1, 1]):
        with pytest.raises(ValueError, match="a period, or true or false for each of 5 layers"):
            of(wrong)


def test_factors_that_yarn_implies(tmp_path: Path) -> None:
    """Files from before llama.cpp's key for YaRN have the whole factor in the other one."""
    factor = 0.1 * math.log(4) + 1

    def of(**values: float) -> RopeConfig:
        return gguf(tmp_path, keys={f"rope.scaling.{key}": value for key, value in values.items()}).rope

    plain = of()
    assert isinstance(plain.scaling, YarnScaling) and plain.scaling.attention_factor == pytest.approx(factor)
    assert plain == of(attn_factor=factor) == of(yarn_attn_factor=factor) == of(attn_factor=1.0)
    with pytest.raises(ValueError, match=r"rope\.scaling\.attn_factor must be 1 or 1\.138629 without"):
        of(attn_factor=1.2)
    with pytest.raises(ValueError, match=r"rope\.scaling\.yarn_attn_factor must be 1\.138629 without"):
        of(yarn_attn_factor=1.0)
