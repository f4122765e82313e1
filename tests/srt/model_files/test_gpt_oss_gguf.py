"""Configs of GGUF files of GPT-OSS, with the keys that llama.cpp's converter writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_models import write_gguf
from tiny_models import make_model

from tercet.benchmarks.presets import load_shape
from tercet.srt.model_files.experts_config import ClampedGate
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import YarnScaling

NOT_IN_A_GGUF_FILE = {"quantization", "model_path", "load_format", "eos_token_ids"}


def of_20b(path: Path, *, has_betas: bool) -> ModelConfig:
    """The config of a file with the header of gpt-oss-20b, and without its data. `has_betas`: as newer files have."""
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    writer.add_block_count(24)
    writer.add_context_length(131_072)
    writer.add_embedding_length(2880)
    writer.add_feed_forward_length(2880)
    writer.add_head_count(64)
    writer.add_head_count_kv(8)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    if has_betas:
        writer.add_rope_scaling_yarn_beta_fast(32.0)
        writer.add_rope_scaling_yarn_beta_slow(1.0)
    writer.add_rope_freq_base(150_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(32)
    writer.add_expert_used_count(4)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_sliding_window(128)
    writer.add_expert_feed_forward_length(2880)
    writer.add_eos_token_id(200_002)
    for name, shape in {
        "token_embd.weight": (201_088, 2880),
        "output.weight": (201_088, 2880),
        "blk.0.attn_q.weight": (4096, 2880),
        "blk.0.attn_q.bias": (4096,),
        "blk.0.attn_output.bias": (2880,),
    }.items():
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 0, gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(32))  # what the tensors begin at
    return load_model_config(path)


@pytest.mark.parametrize("has_betas", [False, True])
def test_the_config_is_that_of_the_hugging_face_model(has_betas: bool, tmp_path: Path) -> None:
    config = dataclasses.asdict(of_20b(tmp_path / "m.gguf", has_betas=has_betas))
    expected = dataclasses.asdict(load_shape("gpt-oss-20b"))
    for name, value in expected.items():
        if name not in NOT_IN_A_GGUF_FILE:
            assert config[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def tiny(folder: Path, **numbers: int) -> ModelConfig:
    keys = {key.replace("__", "."): number for key, number in numbers.items()}
    return load_model_config(write_gguf(folder / "m.gguf", make_model("gpt_oss"), "gpt-oss", keys=keys))


def test_layers_and_experts(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    assert config.architecture == "GptOssForCausalLM" and config.sliding_windows == (6, None, 6)
    assert config.layer_ropes == () and isinstance(config.rope.scaling, YarnScaling)
    assert not config.rope.scaling.truncate and config.rope.scaling.factor == 4
    assert config.experts is not None and config.experts.gate == ClampedGate(1.702, 7.0)
    assert config.experts.has_biases and config.experts.normalized and config.experts.num_experts == 5
    assert config.qkv_bias and config.o_bias and not config.mlp_bias
    assert tiny(tmp_path, attention__sliding_window_pattern=3).sliding_windows == (6, 6, None)
    assert tiny(tmp_path, rope__freq_base_swa=5000).ropes == config.ropes


def test_other_architectures_still_truncate(tmp_path: Path) -> None:
    """As they do in llama.cpp and in transformers."""
    path = write_gguf(tmp_path / "m.gguf", make_model("qwen2_yarn"), "qwen2", keys={"rope.scaling.yarn_beta_fast": 16})
    scaling = load_model_config(path).rope.scaling
    assert isinstance(scaling, YarnScaling) and scaling.truncate
    assert (scaling.beta_fast, scaling.beta_slow) == (16, 1)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"rope__freq_base_swa": 10_000}, r"gpt-oss\.rope\.freq_base_swa=10000 is not supported"),
        ({"rope__scaling__yarn_beta_slow": 0}, r"yarn_beta_slow must be a finite number above 0, got 0"),
        ({"attention__sliding_window_pattern": 0}, r"sliding_window_pattern must be an integer from 1"),
        ({"expert_gating_func": 2}, r"gpt-oss\.expert_gating_func=2 is not supported"),
        ({"rope__scaling__yarn_log_multiplier": 1}, r"yarn_log_multiplier=1 is not supported"),
    ],
)
def test_keys_that_are_refused(numbers: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(tmp_path, **numbers)


def test_a_file_without_a_window_is_refused(tmp_path: Path) -> None:
    model = make_model("gpt_oss")
    model.config.sliding_window = 0
    with pytest.raises(ValueError, match=r"m\.gguf: .*sliding_window must be an integer from 1"):
        load_model_config(write_gguf(tmp_path / "m.gguf", model, "gpt-oss"))
