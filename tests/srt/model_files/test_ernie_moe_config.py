"""Configs of ERNIE 4.5 models with experts: some layers are dense, and the router is corrected and has float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_models import make_model
from transformers import AutoConfig, Ernie4_5_MoeConfig

from tercet.srt.model_files.experts_config import SharedExpert
from tercet.srt.model_files.load_config import load_model_config

BARE: dict[str, Any] = {
    "model_type": "ernie4_5_moe",
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def dense_layers(config: Ernie4_5_MoeConfig) -> tuple[int, ...]:
    """As transformers chooses the layers."""
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    sparse = {layer for layer in range(first, last + 1) if (layer + 1) % config.moe_layer_interval == 0}
    return tuple(layer for layer in range(config.num_hidden_layers) if layer not in sparse)


@pytest.mark.parametrize("given", [{}, {"head_dim": 24}], ids=str)
def test_defaults_are_those_of_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    keys = BARE | given
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert_equals_transformers(config, theirs)
    assert config.tie_word_embeddings and config.rope.theta == 500_000
    experts = config.experts
    assert experts is not None and experts.has_corrections and not experts.has_sigmoids and experts.float32_router
    assert (experts.num_experts, experts.num_experts_per_token) == (theirs.moe_num_experts, theirs.moe_k)
    assert experts.least_sum == theirs.moe_norm_min and experts.normalized and experts.dense_layers == (0,)
    width = theirs.moe_intermediate_size
    assert experts.intermediate_size == width
    assert experts.shared == SharedExpert(width * theirs.moe_num_shared_experts, has_gate=False)


@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("last", [-1, 1, 3, 9])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_the_dense_layers_are_those_of_transformers(first: int, last: int, step: int, tmp_path: Path) -> None:
    keys = {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": step}
    experts = load(tmp_path, BARE | keys).experts
    dense = dense_layers(AutoConfig.for_model(**BARE, **keys))
    assert (tuple(range(6)) if experts is None else experts.dense_layers) == dense


def test_biases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_bias must be false, got True"):
        load(tmp_path, BARE | {"use_bias": True})


@pytest.mark.parametrize("name", ["ernie4_5_moe", "ernie4_5_moe_sparse"])
def test_gguf(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "hf")
    found = load_model_config(write_gguf(tmp_path / "m.gguf", model, "ernie4_5-moe")).experts
    expected = load_model_config(tmp_path / "hf").experts
    assert found is not None and expected is not None
    assert (found.shared, found.dense_layers, found.float32_router) == (expected.shared, expected.dense_layers, True)
    assert (found.widths, found.num_experts) == (expected.widths, expected.num_experts)
    assert (found.has_corrections, found.least_sum) == (True, 1e-12), "files have no key for it"
