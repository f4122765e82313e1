"""Configs of Granite 3, which has factors of embeddings, residuals, scores and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_models import make_model
from transformers import AutoConfig

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.experts_config import SharedExpert
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import NO_ROTATION

# The config.json of granite-3.1-2b-instruct.
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49155,
}
BARE = {
    "model_type": "granite",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def factors(config: ModelConfig) -> tuple[float, ...]:
    return config.embedding_scale, config.residual_scale, config.attention_scale, config.logits_divisor


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, GRANITE)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (40, 32, 8, 64)
    assert factors(config) == (12.0, 0.22, 1 / 64, 8.0)
    assert config.embedding_factor == pytest.approx(12 / 0.22)
    assert config.residual_norm_eps == pytest.approx(1e-5 / 0.22**2)
    assert config.tie_word_embeddings and config.eos_token_ids == (0,) and config.rope.theta == 5e6


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config, theirs = load(tmp_path, BARE), AutoConfig.for_model(**BARE)
    assert factors(config) == (1.0, 1.0, 1.0, 1.0)
    names = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
    assert factors(config) == tuple(getattr(theirs, name) for name in names)
    assert_equals_transformers(config, theirs)
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


@pytest.mark.parametrize("value", [0, -1.0, "8", True])
@pytest.mark.parametrize("key", ["embedding_multiplier", "residual_multiplier", "logits_scaling"])
def test_a_factor_must_be_a_positive_number(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{key} must be a finite number above 0"):
        load(tmp_path, GRANITE | {key: value})


def test_gguf(tmp_path: Path) -> None:
    def of(arch: str = "granite", **keys: Any) -> ModelConfig:
        named = {key.replace("__", "."): value for key, value in keys.items()}
        name = "granite" if arch == "granite" else "llama"
        return load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), arch, keys=named))

    config = of()
    assert config.architecture == "GraniteForCausalLM" and factors(config) == pytest.approx((3.0, 0.22, 0.1, 6.0))
    assert of(rope__scaling__finetuned=True) == config
    with pytest.raises(ValueError, match=r"granite\.rope\.scaling\.finetuned must be true, got False"):
        of(rope__scaling__finetuned=False)
    with pytest.raises(ValueError, match=r"llama\.logit_scale=8.0 is not supported"):
        of("llama", logit_scale=8.0)


def test_a_granite_4_without_experts_and_mamba(tmp_path: Path) -> None:
    """The keys of granite-4.0-micro that others of the family have with other values."""
    keys = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_local_experts": 0}
    keys |= {"layer_types": ["attention"] * 40, "shared_intermediate_size": 512, "position_embedding_type": "rope"}
    config = load(tmp_path, GRANITE | keys)
    assert (config.intermediate_size, config.experts, config.ropes[0].theta) == (512, None, 5e6)
    assert factors(config) == (12.0, 0.22, 1 / 64, 8.0)
    older = {"layer_types": None, "layers_block_type": ["attention"] * 40, "position_embedding_type": "nope"}
    config = load(tmp_path, GRANITE | keys | older)
    assert set(config.ropes) == {NO_ROTATION}
    config = load(tmp_path, GRANITE | keys | {"num_local_experts": 4, "num_experts_per_tok": 3})
    assert config.experts is not None and config.experts.shared == SharedExpert(512, has_gate=False)
    assert config.experts.num_experts_per_token == 3 and config.intermediate_size == 8192
    for num_experts in (0, 4):
        bare = {key: value for key, value in (GRANITE | keys).items() if key != "shared_intermediate_size"}
        config = load(tmp_path, bare | {"num_local_experts": num_experts})
        assert AutoConfig.from_pretrained(tmp_path).shared_intermediate_size == config.feed_forward_widths[-1] == 1024
    refused: list[tuple[dict[str, Any], str]] = [
        ({"layer_types": ["attention", "mamba"] * 20}, "layer_types must be 'attention' or 'full_attention' for each"),
        ({"layer_types": ["attention"]}, "layer_types must be"),
        ({"layer_types": None}, r"layers_block_type must be .*, got \['linear_attention'\]"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type must be rope, nope or null, got 'alibi'"),
    ]
    for changes, message in refused:
        with pytest.raises(ModelNotSupported, match=message):
            load(tmp_path, GRANITE | keys | changes)
