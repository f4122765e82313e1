"""Configs of Gemma 3, for text only and for images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_configs import CONFIGS
from tiny_models import make_model
from transformers import Gemma3Config, Gemma3TextConfig

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.rope_config import LinearScaling, RopeConfig

# What the config.json of the model with 1 billion parameters says about text.
TEXT: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
# The same of the one with 4 billion, which leaves most settings to their defaults.
IMAGES: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}


def test_a_model_for_text(tmp_path: Path) -> None:
    config = load(tmp_path, TEXT)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (26, 4, 1, 256)
    assert config.sliding_windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert config.ropes == tuple(RopeConfig(1e6 if window is None else 1e4) for window in config.sliding_windows)
    assert config.hidden_act == "gelu_tanh" and config.attention_scale == 1 / 16
    assert config.embedding_scale == 34  # the root of 1152 is 33.94, which bfloat16 cannot hold
    assert config.output_norms and config.norm_offset == 1 and config.qk_norm and config.tie_word_embeddings
    assert config.eos_token_ids == (1, 106) and config.dtype == "bfloat16"
    assert load(tmp_path, TEXT | {"torch_dtype": "float32"}).embedding_scale == pytest.approx(math.sqrt(1152), rel=1e-7)
    assert load(tmp_path, TEXT | {"torch_dtype": "float16"}).embedding_scale == 33.9375


def test_a_model_for_images(tmp_path: Path) -> None:
    config = load(tmp_path, IMAGES)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (34, 8, 4, 256)
    assert (config.vocab_size, config.context_len, config.hidden_size) == (262208, 131072, 2560)
    assert config.sliding_windows[:6] == (1024,) * 5 + (None,)
    assert config.ropes[4:6] == (RopeConfig(1e4), RopeConfig(1e6, LinearScaling(8)))
    assert config.eos_token_ids == (1, 106) and config.dtype == "bfloat16" and config.tie_word_embeddings


@pytest.mark.parametrize("name", ["gemma3", "gemma3_default", "gemma3_scaled", "gemma3_images"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    kind = "Gemma3ForConditionalGeneration" if name == "gemma3_images" else "Gemma3ForCausalLM"
    source.architectures = [kind]
    source.save_pretrained(tmp_path)
    config, text = load_model_config(tmp_path), source.get_text_config()
    assert_equals_transformers(config, text)
    assert config.attention_scale == text.query_pre_attn_scalar**-0.5


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    source, config = Gemma3TextConfig(), load(tmp_path, {"model_type": "gemma3_text"})
    assert_equals_transformers(config, source)
    assert config.context_len == source.max_position_embeddings
    assert {rope.theta for rope in config.ropes} == {1e4, 1e6} and config.hidden_act == "gelu_tanh"
    assert load(tmp_path, {"model_type": "gemma3", "text_config": {}}).tie_word_embeddings
    assert Gemma3Config().text_config.to_dict().items() >= {"eos_token_id": 1, "bos_token_id": 2}.items()
    assert (config.eos_token_ids, config.bos_token_id) == ((1,), 2)


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_rope_scaling_does_not_hide_the_parameters(empty: dict[str, Any] | None, tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    keys = {"rope_scaling": empty, "rope_parameters": {"full_attention": linear}}
    config = load(tmp_path, {"model_type": "gemma3_text"} | keys)
    assert config.ropes[4:6] == (RopeConfig(1e4), RopeConfig(5e5, LinearScaling(8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "always causal"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported.*gelu_pytorch_tanh"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters has settings.*rope_type"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=message):
        load(tmp_path, TEXT | changes)


def test_images_need_a_text_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="it has no text_config"):
        load(tmp_path, {key: value for key, value in IMAGES.items() if key != "text_config"})
    with pytest.raises(ValueError, match=r"text_config\.hidden_size must be an integer"):
        load(tmp_path, IMAGES | {"text_config": {"hidden_size": "wide"}})


def test_gguf(tmp_path: Path) -> None:
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("gemma3_default"), "gemma3"))
    assert config.sliding_windows == (7,) * 5 + (None, 7)
    assert config.ropes[4:6] == (RopeConfig(1e4), RopeConfig(20000, LinearScaling(2.5)))
    assert config.attention_scale == 1 / 4 and config.embedding_scale == 8
    assert config.norm_offset == 0 and config.output_norms and config.hidden_act == "gelu_tanh"
    keys = {"attention.sliding_window_pattern": 3}
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("gemma3_default"), "gemma3", keys=keys))
    assert config.sliding_windows == (7, 7, None, 7, 7, None, 7)


def test_a_gguf_file_of_62_layers_has_the_scale_of_the_largest_model(tmp_path: Path) -> None:
    for num_layers, dim in ((61, 24), (62, 64 / 4)):
        path = write_gguf(tmp_path / "m.gguf", make_model("gemma3"), "gemma3", keys={"block_count": num_layers})
        assert load_model_config(path).attention_scale == dim**-0.5


def test_a_gguf_file_beside_parts_for_images(tmp_path: Path) -> None:
    """Google's own files describe these parts, which are in a file of their own."""
    keys = {"mm.tokens_per_image": 256, "vision.block_count": 27, "vision.attention.head_count": 16}
    plain = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("gemma3_default"), "gemma3"))
    assert (
        load_model_config(write_gguf(tmp_path / "m.gguf", make_model("gemma3_default"), "gemma3", keys=keys)) == plain
    )
    with pytest.raises(ModelNotSupported, match=r"gemma3\.visionary=1 is not supported"):
        load_model_config(
            write_gguf(tmp_path / "m.gguf", make_model("gemma3_default"), "gemma3", keys={"visionary": 1})
        )


def test_a_gguf_file_without_a_window(tmp_path: Path) -> None:
    """As in llama.cpp, all layers attend to all positions, with the rotation of global layers."""
    model = make_model("gemma3_default")
    model.config.sliding_window = 0
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "gemma3"))
    assert config.sliding_windows == (None,) * 7
    assert config.ropes == (RopeConfig(20000, LinearScaling(2.5)),) * 7
