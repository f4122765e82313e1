"""Configs of GPT-OSS: the published one, and what transformers makes of others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_configs import assert_equals_transformers, load
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from tercet.benchmarks import presets
from tercet.model_executor.layers.rotary import rope_frequencies
from tercet.srt.model_files.experts_config import ClampedGate, ExpertsConfig
from tercet.srt.model_files.generation_defaults import GenerationDefaults
from tercet.srt.model_files.quantization_config import Mxfp4Config
from tercet.srt.model_files.rope_config import YarnScaling

BARE: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "max_position_embeddings": 131072,
    "vocab_size": 131,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "truncate": True}


def test_the_published_model(tmp_path: Path) -> None:
    """It has its rope settings in two places, several tokens that end an answer, and no type of its numbers."""
    keys = json.loads(Path(presets.model_path("gpt-oss-20b")).read_text())
    del keys["torch_dtype"]
    generation = {"bos_token_id": 199998, "do_sample": True, "eos_token_id": [200002, 199999, 200012]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = load(tmp_path, keys)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (24, 64, 8, 64)
    assert config.sliding_windows == (128, None) * 12 and config.context_len == 131072
    assert config.rope.theta == 150000
    assert config.rope.scaling == YarnScaling(32.0, 4096, 32.0, 1.0, pytest.approx(0.1 * math.log(32) + 1), False)
    assert config.qkv_bias and config.o_bias and not (config.qk_norm or config.tie_word_embeddings)
    assert config.experts == ExpertsConfig(
        num_experts=32,
        num_experts_per_token=4,
        intermediate_size=2880,
        normalized=True,
        gate=ClampedGate(1.702, 7.0),
        has_biases=True,
    )
    assert config.eos_token_ids == (200002, 199999, 200012) and config.generation == GenerationDefaults()
    assert config.dtype is None and isinstance(config.quantization, Mxfp4Config)
    excluded = {"lm_head", "model.embed_tokens", "model.layers.7.mlp.router", "model.layers.12.self_attn.q_proj"}
    assert all(map(config.quantization.excludes, excluded))
    assert not config.quantization.excludes("model.layers.7.mlp.experts")


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    assert_equals_transformers(load(tmp_path, BARE), AutoConfig.for_model(**BARE))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 20000},
        {"rope_parameters": None},
        {"rope_parameters": None, "rope_theta": 20000},
        {"rope_parameters": {}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": YARN | {"rope_theta": 20000.0}},
        {"rope_parameters": YARN, "rope_theta": 20000},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_scaling": YARN, "rope_theta": 20000},
        {"rope_scaling": YARN, "rope_parameters": None},
        {"rope_scaling": {}, "rope_parameters": YARN},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(keys: dict[str, Any], tmp_path: Path) -> None:
    rope = load(tmp_path, BARE | keys).rope
    # Their config changes its arguments.
    theirs = GptOssRotaryEmbedding(AutoConfig.for_model(**json.loads(json.dumps(BARE | keys))))
    frequencies, factors = rope_frequencies(rope, 64)
    torch.testing.assert_close(frequencies, theirs.inv_freq)
    torch.testing.assert_close(factors, torch.full_like(factors, theirs.attention_scaling))
