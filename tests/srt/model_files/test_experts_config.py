"""The config of a mixture of experts, from config.json and from GGUF files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers
from tiny_configs import CONFIGS
from tiny_latent_configs import LATENT_CONFIGS
from tiny_models import make_model
from transformers import AutoConfig

from tercet.srt.model_files.experts_config import ClampedGate, ExpertsConfig, SharedExpert
from tercet.srt.model_files.load_config import load_model_config

QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}

QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}


@pytest.fixture
def load(tmp_path):
    """Loads a config.json of these settings."""

    def load(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load_model_config(tmp_path)

    return load


EXPERTS = {
    "qwen3_moe": ExpertsConfig(
        num_experts=6, num_experts_per_token=3, intermediate_size=32, normalized=True, dense_layers=(1,)
    ),
    "qwen3_moe_sparse": ExpertsConfig(num_experts=5, num_experts_per_token=2, intermediate_size=64, normalized=False),
    "qwen3_moe_all": ExpertsConfig(num_experts=8, num_experts_per_token=4, intermediate_size=32, normalized=True),
    "mixtral": ExpertsConfig(num_experts=4, num_experts_per_token=2, intermediate_size=96, normalized=True),
    "mixtral_window": ExpertsConfig(num_experts=3, num_experts_per_token=1, intermediate_size=96, normalized=True),
    "olmoe": ExpertsConfig(num_experts=6, num_experts_per_token=3, intermediate_size=96, normalized=False),
    "olmoe_normalized": ExpertsConfig(num_experts=4, num_experts_per_token=2, intermediate_size=96, normalized=True),
    "granitemoe": ExpertsConfig(num_experts=6, num_experts_per_token=3, intermediate_size=96, normalized=True),
    "granitemoe_biases": ExpertsConfig(num_experts=3, num_experts_per_token=2, intermediate_size=96, normalized=True),
    "qwen2_moe": ExpertsConfig(
        num_experts=6,
        num_experts_per_token=3,
        intermediate_size=32,
        normalized=True,
        dense_layers=(1,),
        shared=SharedExpert(64, has_gate=True),
    ),
    "qwen2_moe_all": ExpertsConfig(
        num_experts=5,
        num_experts_per_token=2,
        intermediate_size=32,
        normalized=False,
        shared=SharedExpert(160, has_gate=True),
    ),
    "granitemoeshared": ExpertsConfig(
        num_experts=6,
        num_experts_per_token=3,
        intermediate_size=96,
        normalized=True,
        shared=SharedExpert(64, has_gate=False),
    ),
    "granitemoeshared_biases": ExpertsConfig(
        num_experts=3,
        num_experts_per_token=2,
        intermediate_size=96,
        normalized=True,
        shared=SharedExpert(128, has_gate=False),
    ),
    "granitemoeshared_none": ExpertsConfig(
        num_experts=3, num_experts_per_token=2, intermediate_size=96, normalized=True
    ),
    "glm4_moe": ExpertsConfig(
        num_experts=6,
        num_experts_per_token=3,
        intermediate_size=32,
        normalized=True,
        has_sigmoids=True,
        has_corrections=True,
        scale=2.5,
        dense_layers=(0,),
        shared=SharedExpert(64, has_gate=False),
    ),
    "glm4_moe_sparse": ExpertsConfig(
        num_experts=5,
        num_experts_per_token=2,
        intermediate_size=64,
        normalized=False,
        has_sigmoids=True,
        has_corrections=True,
        shared=SharedExpert(64, has_gate=False),
    ),
    "glm4_moe_groups": ExpertsConfig(
        num_experts=12,
        num_experts_per_token=3,
        intermediate_size=32,
        normalized=True,
        has_sigmoids=True,
        has_corrections=True,
        num_groups=4,
        groups_per_token=2,
        shared=SharedExpert(32, has_gate=False),
    ),
    "dots1": ExpertsConfig(
        num_experts=15,
        num_experts_per_token=4,
        intermediate_size=32,
        normalized=True,
        has_sigmoids=True,
        has_corrections=True,
        scale=2.5,
        num_groups=5,
        groups_per_token=2,
        dense_layers=(0,),
        shared=SharedExpert(64, has_gate=False),
    ),
    "dots1_window": ExpertsConfig(
        num_experts=5,
        num_experts_per_token=2,
        intermediate_size=64,
        normalized=False,
        has_sigmoids=True,
        has_corrections=True,
        shared=SharedExpert(64, has_gate=False),
    ),
    "ernie4_5_moe": ExpertsConfig(
        num_experts=6,
        num_experts_per_token=3,
        intermediate_size=32,
        normalized=True,
        has_corrections=True,
        least_sum=1e-12,
        float32_router=True,
        dense_layers=(0,),
        shared=SharedExpert(64, has_gate=False),
    ),
    "ernie4_5_moe_sparse": ExpertsConfig(
        num_experts=5,
        num_experts_per_token=2,
        intermediate_size=64,
        normalized=True,
        has_corrections=True,
        least_sum=0.75,
        float32_router=True,
    ),
    "gpt_oss": ExpertsConfig(
        num_experts=5,
        num_experts_per_token=2,
        intermediate_size=96,
        normalized=True,
        gate=ClampedGate(1.702, 1.5),
        has_biases=True,
    ),
    "gpt_oss_full": ExpertsConfig(
        num_experts=4,
        num_experts_per_token=4,
        intermediate_size=96,
        normalized=True,
        gate=ClampedGate(1.702, 7.0),
        has_biases=True,
    ),
    "granitemoehybrid_experts": ExpertsConfig(
        num_experts=3,
        num_experts_per_token=2,
        intermediate_size=96,
        normalized=True,
        shared=SharedExpert(64, has_gate=False),
    ),
    "qwen3_5_moe": ExpertsConfig(
        num_experts=8,
        num_experts_per_token=3,
        intermediate_size=32,
        normalized=True,
        shared=SharedExpert(64, has_gate=True),
    ),
    "qwen3_next": ExpertsConfig(
        num_experts=8,
        num_experts_per_token=3,
        intermediate_size=32,
        normalized=True,
        dense_layers=(1,),
        shared=SharedExpert(64, has_gate=True),
    ),
    "lfm2_moe": ExpertsConfig(
        num_experts=8,
        num_experts_per_token=3,
        intermediate_size=32,
        normalized=True,
        has_sigmoids=True,
        has_corrections=True,
        scale=1.5,
        dense_layers=(0,),
    ),
}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in LATENT_CONFIGS])
def test_what_transformers_writes(name, tmp_path):
    CONFIGS[name]().save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.experts == EXPERTS.get(name)
    widths = {
        "qwen3_moe": (96, 32),
        "qwen3_moe_sparse": (64,),
        "qwen3_moe_all": (32,),
        "qwen2_moe": (96, 32, 64),
        "qwen2_moe_all": (32, 160),
        "glm4_moe": (96, 32, 64),
        "glm4_moe_sparse": (64, 64),
        "glm4_moe_groups": (32, 32),
        "dots1": (96, 32, 64),
        "lfm2_moe": (96, 32),
        "qwen3_5_moe": (32, 64),
        "qwen3_next": (96, 32, 64),
        "gemma4_sharing": (192,),
        "granitemoehybrid": (48,),
        "granitemoehybrid_experts": (96, 64),
        "dots1_window": (64, 64),
        "ernie4_5_moe": (96, 32, 64),
        "ernie4_5_moe_sparse": (64,),
        "granitemoeshared": (96, 64),
        "granitemoeshared_biases": (96, 128),
    }
    assert config.feed_forward_widths == widths.get(name, (96,))


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "olmoe", "granitemoe", "granitemoeshared"]
)
def test_defaults_of_experts_are_those_of_transformers(model_type, load):
    bare = {key: value for key, value in QWEN_MOE.items() if key != "architectures"} | {"model_type": model_type}
    config, theirs = load(bare), AutoConfig.for_model(**bare)
    assert config.experts == ExpertsConfig(
        num_experts=theirs.num_local_experts if model_type.startswith("granitemoe") else theirs.num_experts,
        num_experts_per_token=theirs.num_experts_per_tok,
        intermediate_size=theirs.moe_intermediate_size if model_type.startswith("qwen") else theirs.intermediate_size,
        normalized=model_type not in ("qwen2_moe", "qwen3_moe", "olmoe"),
        gate=ClampedGate(theirs.swiglu_alpha, theirs.swiglu_limit) if model_type == "gpt_oss" else None,
        has_biases=model_type == "gpt_oss",
        shared=SharedExpert(theirs.shared_expert_intermediate_size, True) if model_type == "qwen2_moe" else None,
    )
    assert_equals_transformers(config, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 4, "num_experts_per_tok": 5}, "a token must have from 1 to 4 experts.*got 5"),
        ({"num_experts": 4, "num_local_experts": 5}, "num_experts is 4, but num_local_experts is 5"),
        ({"num_experts": 0}, "num_experts must be an integer from 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of integers of at least 0"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of integers of at least 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        (
            {"architectures": [], "model_type": "olmoe", "clip_qkv": 8.0},
            "clip_qkv=8.0 is not supported; supported: null",
        ),
        ({"use_sliding_window": True, "max_window_layers": 2}, "max_window_layers with use_sliding_window"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 3}, "layer_types in a Qwen3Moe config"),
        (QWEN2_MOE | {"use_sliding_window": True}, "use_sliding_window without layer_types in a Qwen2Moe config"),
        (QWEN2_MOE | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be an integer"),
    ],
)
def test_refused_of_experts(load, change, message):
    with pytest.raises(ValueError, match=message):
        load(QWEN_MOE | change)


def test_integers_in_experts_of_granite_are_refused(load):
    given = {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    with pytest.raises(ValueError, match="quantization_config is not supported for GraniteMoeForCausalLM"):
        load(QWEN_MOE | given | {"quantization_config": gptq})


def test_layers_of_a_model_with_experts(load):
    def dense(**change):
        config = load(QWEN_MOE | change)
        assert [config.is_sparse(index) for index in range(3)] == [
            config.experts is not None and index not in config.experts.dense_layers for index in range(3)
        ]
        return None if config.experts is None else config.experts.dense_layers

    assert dense() == () and dense(num_experts=16, num_local_experts=16) == ()
    assert dense(decoder_sparse_step=2) == (0, 2)
    assert dense(mlp_only_layers=[2, 9]) == (2,)
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) is None
    assert load(QWEN_MOE | {"decoder_sparse_step": 4}).feed_forward_widths == (96,)
    real = QWEN_MOE | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 48}
    assert load(real).sliding_windows == (None,) * 3
    window = {"use_sliding_window": True, "sliding_window": 8}
    assert load(QWEN_MOE | window).sliding_windows == (8,) * 3


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("mixtral", "llama"),
        ("qwen3_moe_all", "qwen3moe"),
        ("olmoe", "olmoe"),
        ("granitemoe", "granitemoe"),
        ("granitemoeshared", "granitemoe"),
        ("qwen2_moe_all", "qwen2moe"),
    ],
)
def test_gguf_files(tmp_path, name, arch):
    model = make_model(name)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, arch))
    assert config.architecture == type(model).__name__ and config.experts == EXPERTS[name]
    # llama.cpp divides the weights by their sum or not for all files of an architecture
    model.config.norm_topk_prob = not EXPERTS[name].normalized
    assert load_model_config(write_gguf(tmp_path / "m.gguf", model, arch)).experts == EXPERTS[name]


def test_an_old_gguf_file_with_tensors_for_each_expert_is_refused(tmp_path):
    model = make_model("mixtral")
    stacked = [name for name in model.state_dict() if ".experts." in name]
    names = (
        f"blk.{layer}.ffn_{kind}.{n}.weight" for layer in range(3) for kind in ("gate", "up", "down") for n in range(4)
    )
    old = {name: np.zeros((64, 96) if "down" in name else (96, 64), np.float32) for name in names}
    path = write_gguf(tmp_path / "m.gguf", model, "llama", drop=stacked, beside=old)
    with pytest.raises(ValueError, match=r"each expert has tensors of its own, such as 'blk.0.ffn_gate.0.weight'"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("qwen3", {"expert_count": 8}, "a mixture of 8 experts is not supported with qwen3"),
        ("llama", {"expert_count": 8}, "llama.expert_used_count must be an integer"),
        ("llama", {"expert_count": 8, "expert_used_count": 9}, "from 1 to 8 experts.*got 9"),
        (
            "qwen3moe",
            {"expert_count": 8, "expert_used_count": 2, "expert_shared_feed_forward_length": 8},
            "expert_shared_feed_forward_length=8 is not supported",
        ),
        ("qwen3moe", {}, "qwen3moe.expert_count must be an integer"),
        ("llama", {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}, "expert_gating_func=2"),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1}, "expert_shared_count=1"),
    ],
)
def test_gguf_files_that_are_refused(tmp_path, arch, keys, message):
    model = make_model("qwen3")
    path = write_gguf(tmp_path / "m.gguf", model, arch, keys=keys)
    with pytest.raises(ValueError, match=message):
        load_model_config(path)
