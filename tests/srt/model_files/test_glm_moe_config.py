"""Configs of GLM-4.5, whose router has sigmoids, and whose checkpoints may have layers that predict further tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_configs import CONFIGS
from tiny_models import make_model
from transformers import AutoConfig

from tercet.srt.model_files.experts_config import ExpertsConfig, SharedExpert
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

# The config.json of GLM-4.5-Air.
AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
EXPERTS = ExpertsConfig(
    num_experts=128,
    num_experts_per_token=8,
    intermediate_size=1408,
    normalized=True,
    has_sigmoids=True,
    has_corrections=True,
    dense_layers=(0,),
    shared=SharedExpert(1408, has_gate=False),
)


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, AIR)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (46, 96, 8, 128)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, None)
    assert config.rope.rotary_dim == 64 and config.experts == EXPERTS and config.num_extra_layers == 1
    larger = AIR | {"use_qk_norm": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}
    config = load(tmp_path, larger)
    assert config.qk_norm == "heads"
    assert config.experts == replace(EXPERTS, scale=2.5, dense_layers=(0, 1, 2))


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    keys = {"model_type": "glm4_moe", "intermediate_size": 96, "hidden_size": 64, "num_attention_heads": 16}
    keys |= {"num_hidden_layers": 3, "max_position_embeddings": 128, "vocab_size": 131}
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert_equals_transformers(config, theirs)
    assert config.rope.rotary_dim == config.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    assert config.experts == EXPERTS and config.num_extra_layers == theirs.num_nextn_predict_layers == 1
    assert config.qk_norm is None and not theirs.use_qk_norm
    given = theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size, theirs.norm_topk_prob
    assert given == (128, 8, 1408, True)
    assert (theirs.first_k_dense_replace, theirs.n_shared_experts, theirs.routed_scaling_factor) == (1, 1, 1.0)


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_sparse"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    rotary_dim = source.head_dim * source.rope_parameters["partial_rotary_factor"]
    assert (config.rope.rotary_dim or config.head_dim) == rotary_dim and config.qkv_bias == source.attention_bias
    assert config.qk_norm == ("heads" if source.use_qk_norm else None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_group": 2}, "topk_group must be an integer from 1 to 1, got 2"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be a finite number above 0"),
        ({"n_routed_experts": 4}, "a token must have from 1 to 4 experts.*got 8"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer"),
        ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers must be an integer from 0 to 10000"),
        ({"sliding_window": 4096}, "sliding_window is not supported"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, AIR | changes)


def test_layers(tmp_path: Path) -> None:
    assert load(tmp_path, AIR | {"first_k_dense_replace": 46}).experts is None
    assert load(tmp_path, AIR | {"first_k_dense_replace": 0}).feed_forward_widths == (1408, 1408)
    assert load(tmp_path, AIR | {"n_shared_experts": 2}).feed_forward_widths == (10944, 1408, 2816)
    assert load(tmp_path, AIR | {"n_shared_experts": 0}).feed_forward_widths == (10944, 1408)


def test_gguf(tmp_path: Path) -> None:
    def of(name: str, **keys: Any) -> ModelConfig:
        return load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), "glm4moe", keys=keys))

    for name in ("glm4_moe", "glm4_moe_sparse"):
        CONFIGS[name]().save_pretrained(tmp_path)
        expected, config = load_model_config(tmp_path / "config.json", "dummy"), of(name)
        assert config.architecture == "Glm4MoeForCausalLM" and config.experts == expected.experts
        assert (config.qk_norm, config.rope.rotary_dim) == (expected.qk_norm, expected.rope.rotary_dim)
    assert of("glm4_moe", nextn_predict_layers=2).num_extra_layers == 2
    assert of("glm4_moe", nextn_predict_layers=2).num_layers == 3
    assert of("glm4_moe", leading_dense_block_count=3).experts is None
    # As in llama.cpp
    keys = ("leading_dense_block_count", "expert_gating_func", "expert_weights_norm", "expert_weights_scale")
    experts = of("glm4_moe", **dict.fromkeys(keys)).experts
    assert experts is not None and experts.dense_layers == ()
    assert (experts.normalized, experts.scale, experts.has_sigmoids) == (False, 1.0, True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_gating_func": 1}, "glm4moe.expert_gating_func must be 2, got 1"),
        ({"expert_group_count": 4}, r"glm4moe.expert_group_count must be a divisor of expert_count \(6\), got 4"),
        ({"expert_group_used_count": 4}, "glm4moe.expert_group_used_count must be an integer from 1 to 1, got 4"),
        ({"expert_shared_count": None}, "glm4moe.expert_shared_count must be an integer"),
        ({"expert_shared_feed_forward_length": 8}, "expert_shared_feed_forward_length=8 is not supported"),
    ],
)
def test_gguf_files_that_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("glm4_moe"), "glm4moe", keys=keys)
    with pytest.raises(ValueError, match=message):
        load_model_config(path)


def test_more_extra_layers_than_layers_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("glm4_moe"), "glm4moe", keys={"nextn_predict_layers": 1})
    content = path.read_bytes()
    key = b"glm4moe.nextn_predict_layers"
    at = content.index(key) + len(key) + 4
    path.write_bytes(content[:at] + (4).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ValueError, match=r"glm4moe\.block_count must be an integer from 5 .*, got 4"):
        load_model_config(path)
