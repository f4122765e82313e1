"""Configs of Gemma 2, whose attention scores and logits have soft caps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_configs import CONFIGS
from tiny_models import make_model
from transformers import Gemma2Config

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import RopeConfig

# The config.json of gemma-2-27b-it, whose scale of attention is not that of its heads.
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "initializer_range": 0.02,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256000,
}


def caps(config: ModelConfig) -> tuple[float | None, float | None]:
    return config.scores_soft_cap, config.logits_soft_cap


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, GEMMA2)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (46, 32, 16, 128)
    assert config.sliding_windows == (4096, None) * 23 and config.ropes == (RopeConfig(1e4),) * 46
    assert caps(config) == (50, 30) and config.attention_scale == 1 / 12
    assert config.hidden_act == "gelu_tanh" and config.embedding_scale == 68  # the root of 4608 is 67.88
    assert config.output_norms and config.norm_offset == 1 and config.qk_norm is None and config.tie_word_embeddings
    assert config.eos_token_ids == (1,) and config.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["gemma2", "gemma2_scores", "gemma2_logits"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.architectures = ["Gemma2ForCausalLM"]
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert_equals_transformers(config, source)
    assert caps(config) == (source.attn_logit_softcapping, source.final_logit_softcapping)
    assert config.attention_scale == source.query_pre_attn_scalar**-0.5


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    source, config = Gemma2Config(), load(tmp_path, {"model_type": "gemma2"})
    assert_equals_transformers(config, source)
    assert caps(config) == (source.attn_logit_softcapping, source.final_logit_softcapping)
    assert config.context_len == source.max_position_embeddings and config.hidden_act == "gelu_tanh"
    assert (config.eos_token_ids, config.bos_token_id) == ((1,), 2)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_cap_is_a_positive_number_or_null(key: str, tmp_path: Path) -> None:
    plain = dict(zip(("attn_logit_softcapping", "final_logit_softcapping"), caps(load(tmp_path, GEMMA2)), strict=True))
    assert caps(load(tmp_path, GEMMA2 | {key: None})) == tuple((plain | {key: None}).values())
    for value in (0, -1.0, "50", True):
        with pytest.raises(ValueError, match=f"{key} must be a finite number above 0"):
            load(tmp_path, GEMMA2 | {key: value})
    llama = GEMMA2 | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "sliding_window": None}
    other = "final_logit_softcapping" if key.startswith("attn") else "attn_logit_softcapping"
    with pytest.raises(ModelNotSupported, match=f"{key} is not supported for LlamaForCausalLM"):
        load(tmp_path, llama | {other: None})


def test_gguf(tmp_path: Path) -> None:
    def of(**keys: Any) -> ModelConfig:
        named = {key.replace("__", "."): value for key, value in keys.items()}
        return load_model_config(write_gguf(tmp_path / "m.gguf", model, "gemma2", keys=named))

    model = make_model("gemma2")
    config = of()
    assert config.architecture == "Gemma2ForCausalLM" and caps(config) == (1.5, 3.0)
    assert config.sliding_windows == (7, None, 7) and config.ropes == (RopeConfig(1e4),) * 3
    assert config.attention_scale == 24**-0.5 and config.embedding_scale == 8 and config.qk_norm is None
    assert config.norm_offset == 0 and config.output_norms and config.hidden_act == "gelu_tanh"
    assert of(attention__sliding_window_pattern=3).sliding_windows == (7, 7, None)
    with pytest.raises(ModelNotSupported, match=r"gemma2\.router_logit_softcapping=1 is not supported"):
        of(router_logit_softcapping=1)


def test_a_gguf_file_of_the_first_converters(tmp_path: Path) -> None:
    """It names neither the window nor the caps. llama.cpp takes those of the published models, too."""
    model = make_model("gemma2")
    left_out = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    for name in left_out:
        setattr(model.config, name, None)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "gemma2"))
    assert config.sliding_windows == (4096, None, 4096) and caps(config) == (50, 30)


def test_the_scale_of_the_largest_model_in_a_gguf_file(tmp_path: Path) -> None:
    """GGUF files have no key for it. As in llama.cpp, the number of layers tells."""
    model = make_model("gemma2")
    model.config.num_hidden_layers = 46
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "gemma2"))
    assert config.attention_scale == (64 // 4) ** -0.5
