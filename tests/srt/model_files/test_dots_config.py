"""Configs of dots.llm1, whose experts may be in groups, and whose upper layers may have a sliding window."""

from __future__ import annotations

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

# The shape of dots.llm1.
DOTS: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151649,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 152064,
}


def test_the_published_shape(tmp_path: Path) -> None:
    config = load(tmp_path, DOTS)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (62, 32, 32, 128)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (False, False, "heads")
    assert config.sliding_windows == (None,) * 62
    assert config.experts == ExpertsConfig(
        num_experts=128,
        num_experts_per_token=6,
        intermediate_size=1408,
        normalized=True,
        has_sigmoids=True,
        has_corrections=True,
        scale=2.5,
        dense_layers=(0,),
        shared=SharedExpert(2816, has_gate=False),
    )


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 65}])
def test_defaults_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    """Without keys, layers from the 63rd have a window."""
    keys = {"model_type": "dots1", "intermediate_size": 96, "hidden_size": 64, "num_attention_heads": 32}
    keys |= {"num_hidden_layers": 3, "max_position_embeddings": 128, "vocab_size": 131}
    keys |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1} | changes
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert_equals_transformers(config, theirs)
    experts = config.experts
    assert experts is not None and experts.intermediate_size == theirs.moe_intermediate_size
    assert (experts.normalized, experts.scale) == (theirs.norm_topk_prob, theirs.routed_scaling_factor)
    assert len(experts.dense_layers) == theirs.first_k_dense_replace
    assert (experts.num_groups, experts.groups_per_token) == (theirs.n_group, theirs.topk_group)


@pytest.mark.parametrize("name", ["dots1", "dots1_window"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert_equals_transformers(config, source)
    assert config.qk_norm == "heads"
    assert config.sliding_windows == ((None, 9, 9) if name == "dots1_window" else (None,) * 3)


def test_windows(tmp_path: Path) -> None:
    def windows(**changes: Any) -> tuple[int | None, ...]:
        return load(tmp_path, DOTS | {"num_hidden_layers": 3, "sliding_window": 8} | changes).sliding_windows

    assert windows() == (None,) * 3
    assert windows(max_window_layers=2) == (None, None, 8)
    assert windows(layer_types=["sliding_attention", "full_attention", "sliding_attention"]) == (8, None, 8)
    assert windows(max_window_layers=2, use_sliding_window=False) == (None,) * 3


def test_gguf(tmp_path: Path) -> None:
    CONFIGS["dots1"]().save_pretrained(tmp_path)
    expected = load_model_config(tmp_path / "config.json", "dummy")
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("dots1"), "dots1"))
    assert config.architecture == "Dots1ForCausalLM" and config.experts == expected.experts
    assert config.qk_norm == "heads" and config.sliding_windows == expected.sliding_windows


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_gating_func": 1}, "dots1.expert_gating_func must be 2, got 1"),
        ({"expert_group_count": 4}, r"dots1.expert_group_count must be a divisor of expert_count \(15\), got 4"),
        ({"attention.sliding_window": 9}, "dots1.attention.sliding_window must be 0 or absent, got 9"),
    ],
)
def test_gguf_files_that_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("dots1"), "dots1", keys=keys)
    with pytest.raises(ValueError, match=message):
        load_model_config(path)
