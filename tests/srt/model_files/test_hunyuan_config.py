"""Configs of dense Hunyuan models, which normalise queries and keys after their rotation."""

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
from tercet.srt.model_files.rope_config import YarnScaling

ROPE = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}
# What matters of the config.json of Hunyuan-7B-Instruct.
HUNYUAN: dict[str, Any] = {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eod_token_id": 127960,
    "eos_token_id": 127960,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": ROPE,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
BARE = {
    "model_type": "hunyuan_v1_dense",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, HUNYUAN)
    assert config.qk_norm == "rotated_heads" and config.tie_word_embeddings
    assert config.rope.theta == pytest.approx(10000 * 1000 ** (128 / 126)) and config.rope.scaling is None
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias)


def test_norms_may_be_missing(tmp_path: Path) -> None:
    assert load(tmp_path, HUNYUAN | {"use_qk_norm": False}).qk_norm is None


@pytest.mark.parametrize("given", [{}, {"head_dim": None}, {"num_key_value_heads": None}], ids=str)
def test_defaults_are_those_of_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    keys = BARE | given
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert_equals_transformers(config, theirs)
    assert config.qk_norm == "rotated_heads"
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


@pytest.mark.parametrize("name", ["hunyuan_v1_dense", "hunyuan_v1_dense_tied"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.architectures = ["HunYuanDenseV1ForCausalLM"]
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert (config.qkv_bias, config.o_bias) == (source.attention_bias,) * 2 and config.head_dim == source.head_dim
    assert config.tie_word_embeddings == source.tie_word_embeddings
    assert isinstance(config.rope.scaling, YarnScaling) == (name == "hunyuan_v1_dense_tied")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": ROPE | {"alpha": None}}, "alpha must be a finite number above 0, got None"),
        ({"rope_scaling": ROPE | {"factor": 2}}, "factor must be 1 beside alpha, got 2"),
        ({"rope_scaling": ROPE | {"gamma": 2}}, "'dynamic' has settings that are not supported: gamma=2"),
        ({"rope_scaling": ROPE | {"alpha": 1e300}}, "alpha must be at most 2147483647, got 1e"),
        ({"head_dim": 2}, "alpha needs heads of more than 2 components, got 2"),
        ({"use_cla": True}, "use_cla=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported for HunYuanDenseV1ForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "rope type 'dynamic' is not supported"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, HUNYUAN | changes)


def test_gguf(tmp_path: Path) -> None:
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("hunyuan_v1_dense"), "hunyuan-dense"))
    assert config.architecture == "HunYuanDenseV1ForCausalLM" and config.qk_norm == "rotated_heads"
    assert config.rope.theta == pytest.approx(1000 * 50 ** (24 / 22)) and config.rope.scaling is None
    assert config.qkv_bias and config.o_bias and config.head_dim == 24
