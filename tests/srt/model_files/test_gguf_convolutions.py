"""The config of GGUF files of LFM2 and LFM2-MoE, and what is refused in such files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import write_gguf
from tiny_models import initialised, make_model
from transformers import Lfm2Config

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.generation_defaults import GenerationDefaults
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.short_convolutions import ShortConvolutions

HEADS, WIDTH = "attention.head_count_kv", "shortconv.l_cache"


def load(folder: Path, arch: str = "lfm2", model: Any = None, **options: Any) -> ModelConfig:
    """`options`: see `write_gguf`."""
    if model is None:
        model = make_model("lfm2_moe" if arch == "lfm2moe" else "lfm2" if arch == "lfm2" else arch)
    return load_model_config(write_gguf(folder / "m.gguf", model, arch, **options))


@pytest.mark.parametrize(("name", "arch"), [("lfm2", "lfm2"), ("lfm2_moe", "lfm2moe")])
def test_a_file_has_the_config_of_the_model_it_was_made_from(name: str, arch: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "hf")
    expected, found = load_model_config(tmp_path / "hf"), load(tmp_path, arch, model)
    assert expected.convolutions == ShortConvolutions((0, 2, 3), 64, 3)
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps), "it has float32 in a file"
    of_files: dict[str, Any] = {
        "model_path": "", "load_format": "dummy", "generation": GenerationDefaults(), "bos_token_id": None,
        "eos_token_ids": (), "rms_norm_eps": 1e-5,
    }  # fmt: skip
    assert dataclasses.replace(found, **of_files) == dataclasses.replace(expected, **of_files)


@pytest.mark.parametrize("heads", [2, [2, 2]])
def test_a_file_whose_layers_all_have_attention(heads: int | list[int], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = initialised(Lfm2Config(**sizes, vocab_size=131, layer_types=["full_attention"] * 2), seed=0)
    for width in (3, None):
        config = load(tmp_path, model=model, keys={HEADS: heads, WIDTH: width})
        assert (config.convolutions, config.num_kv_heads) == (None, 2)


@pytest.mark.parametrize("heads", [[0, 2, 2, 0], [2, 0, 0, 0], [0, 0, 0, 2]], ids=str)
def test_the_array_says_which_layers_have_convolutions(heads: list[int], tmp_path: Path) -> None:
    first = next(layer for layer, count in enumerate(heads) if count)
    beside = {} if first == 1 else {f"blk.{first}.attn_q.weight": np.zeros((64, 64), np.float16)}
    config = load(tmp_path, keys={HEADS: heads, WIDTH: 5}, beside=beside)
    layers = tuple(layer for layer, count in enumerate(heads) if count == 0)
    assert config.convolutions == ShortConvolutions(layers, 64, 5) and config.num_kv_heads == 2
    assert config.dtype == ("float32" if first == 1 else "float16"), "the type of the first projection of attention"


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([0, 2, 0], r"must be an integer of at least 0 for each of 4 layers, got \[0, 2, 0\]"),
        ([0, 2, 0, 0, 0], "must be an integer of at least 0 for each of 4 layers"),
        ([0, -2, 0, 0], r"must be an integer of at least 0 for each of 4 layers, got \[0, -2, 0, 0\]"),
        ([0.0, 2.0, 0.0, 0.0], "must be an integer of at least 0 for each of 4 layers"),
        ([False, True, False, False], "must be an integer of at least 0 for each of 4 layers"),
        (["0", "2", "0", "0"], "must be an integer of at least 0 for each of 4 layers"),
        ([0, 2, 4, 0], r"must be the same number for all layers that have attention, got \[0, 2, 4, 0\]"),
    ],
    ids=str,
)
def test_heads_that_are_refused(heads: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"m\.gguf: lfm2\.attention\.head_count_kv {message}"):
        load(tmp_path, keys={HEADS: heads})


def test_a_file_without_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"at least one layer must have attention, but .*head_count_kv is 0"):
        load(tmp_path, keys={HEADS: [0] * 4})


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("lfm2", {WIDTH: None}, r"lfm2\.shortconv\.l_cache must be an integer from 1 to .*, got None"),
        ("lfm2moe", {WIDTH: None}, r"lfm2moe\.shortconv\.l_cache must be an integer from 1 to .*, got None"),
        ("lfm2", {WIDTH: 0}, r"lfm2\.shortconv\.l_cache must be an integer from 1 to .*, got 0"),
        ("lfm2", {HEADS: [0, 3, 0, 0]}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ("lfm2", {HEADS: [0, 0, 2, 0]}, r"is not a complete model: it has no tensor 'blk\.2\.attn_q\.weight'"),
        ("lfm2", {HEADS: 2}, r"is not a complete model: it has no tensor 'blk\.0\.attn_q\.weight'"),
        ("lfm2", {"attention.sliding_window": 9}, r"lfm2\.attention\.sliding_window must be 0 or absent, got 9"),
        ("lfm2", {"embedding_length_out": 128}, r"lfm2\.embedding_length_out=128 is not supported"),
        ("lfm2", {"expert_count": 8}, "a mixture of 8 experts is not supported with lfm2"),
        ("lfm2", {"expert_gating_func": 2}, r"lfm2\.expert_gating_func=2 is not supported"),
        ("lfm2moe", {"expert_gating_func": 1}, r"lfm2moe\.expert_gating_func must be 2, got 1"),
        ("lfm2moe", {"expert_shared_count": 1}, r"lfm2moe\.expert_shared_count=1 is not supported"),
        ("llama", {WIDTH: 3}, r"llama\.shortconv\.l_cache=3 is not supported"),
    ],
    ids=str,
)
def test_keys_that_are_refused(arch: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, arch, keys=keys)


def test_what_files_of_mixtures_may_lack(tmp_path: Path) -> None:
    """The converter of llama.cpp writes neither the factor of the experts' weights nor that their sum is 1."""
    names = ("leading_dense_block_count", "expert_gating_func", "expert_weights_scale")
    experts = load(tmp_path, "lfm2moe", keys=dict.fromkeys(names)).experts
    assert experts is not None and experts.has_sigmoids and experts.normalized
    assert (experts.dense_layers, experts.scale) == ((), 1.0)
    experts = load(tmp_path, "lfm2moe", keys={"expert_weights_norm": False, "expert_weights_scale": 2.5}).experts
    assert experts is not None and not experts.normalized and experts.scale == 2.5
    assert load(tmp_path, "lfm2moe", keys={"leading_dense_block_count": 4}).experts is None
