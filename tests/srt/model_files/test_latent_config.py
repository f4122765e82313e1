"""Configs of models with latent attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hf_configs import load
from latent_gguf import write_latent_gguf
from tiny_configs import CONFIGS
from tiny_latent_configs import LATENT_CONFIGS
from tiny_models import make_model
from transformers import AutoConfig

from tercet.srt.model_files.latent_config import LatentConfig
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.quantization_config import Fp8Config
from tercet.srt.model_files.rope_config import LongRopeScaling, YarnScaling

DEEPSEEK = LatentConfig(latent_dim=512, nope_dim=128, rope_dim=64, value_dim=128, query_rank=1536)
SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# What matters of the config.json of DeepSeek-V2-Lite.
V2_LITE: dict[str, Any] = SIZES | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
}
V3: dict[str, Any] = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
GLM_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def test_deepseek_v2_lite(tmp_path: Path) -> None:
    config = load(tmp_path, V2_LITE)
    assert config.latent == DEEPSEEK._replace(query_rank=None)
    assert (config.num_kv_heads, config.head_dim, config.rope_dim, config.value_dim) == (1, 576, 64, 128)
    assert math.isclose(config.attention_scale, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert isinstance(config.rope.scaling, YarnScaling) and config.rope.scaling.attention_factor == 1.0
    experts = config.experts
    assert experts is not None and experts.dense_layers == (0,) and experts.shared is not None
    assert (experts.num_experts, experts.num_experts_per_token, experts.num_groups) == (64, 6, 1)
    assert experts.widths == (1408, 2816)
    assert not (experts.normalized or experts.has_sigmoids or experts.has_corrections)


def test_deepseek_v3(tmp_path: Path) -> None:
    config = load(tmp_path, V3)
    assert config.latent == DEEPSEEK and config.num_extra_layers == 1
    assert math.isclose(config.attention_scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    experts = config.experts
    assert experts is not None and experts.dense_layers == (0, 1, 2) and experts.scale == 2.5
    assert (experts.num_groups, experts.groups_per_token) == (8, 4) and experts.has_corrections and experts.normalized


def test_youtu(tmp_path: Path) -> None:
    """The published file has a YaRN that changes nothing."""
    rope = {"type": "yarn", "factor": 1.0, "mscale_all_dim": 0}
    keys = {"architectures": ["YoutuForCausalLM"], "model_type": "youtu", "rope_scaling": rope, "rope_theta": 1600000}
    config = load(tmp_path, V3 | keys)
    assert config.attention_scale == 1 / math.sqrt(192) and config.experts is None
    assert isinstance(config.rope.scaling, YarnScaling) and config.rope.scaling.attention_factor == 1.0


@pytest.mark.parametrize("mscale_all_dim", [None, 0, 0.0])
def test_without_mscale_all_dim_yarn_concerns_rotations_only(mscale_all_dim: float | None, tmp_path: Path) -> None:
    config = load(tmp_path, V3 | {"rope_scaling": V3["rope_scaling"] | {"mscale_all_dim": mscale_all_dim}})
    assert config.attention_scale == 1 / math.sqrt(192)
    scaling = config.rope.scaling
    assert isinstance(scaling, YarnScaling) and math.isclose(scaling.attention_factor, 0.1 * math.log(40) + 1)


def test_an_empty_rope_scaling_counts_as_absent(tmp_path: Path) -> None:
    rope = V3["rope_scaling"]
    config = load(tmp_path, V3 | {"rope_scaling": {}, "rope_parameters": rope})
    assert config.attention_scale == load(tmp_path, V3).attention_scale != 1 / math.sqrt(192)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0", "other"])
def test_deepseek_v3_in_fp8(scale_fmt: str | None, tmp_path: Path) -> None:
    """DeepSeek-V3.1 names the format of scales."""
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    keys = {"quantization_config": fp8 | ({} if scale_fmt is None else {"scale_fmt": scale_fmt})}
    if scale_fmt == "other":
        with pytest.raises(ValueError, match="scale_fmt must be 'ue8m0', got 'other'"):
            load(tmp_path, V3 | keys)
    else:
        assert load(tmp_path, V3 | keys).quantization == Fp8Config(True, ())


def test_glm_flash(tmp_path: Path) -> None:
    config = load(tmp_path, GLM_FLASH)
    assert config.latent == LatentConfig(latent_dim=512, nope_dim=192, rope_dim=64, value_dim=256, query_rank=768)
    assert config.attention_scale == 1 / 16 and config.rope.theta == 1e6 and config.rms_norm_eps == 1e-5
    experts = config.experts
    assert experts is not None and experts.dense_layers == (0,) and experts.scale == 1.8 and experts.num_groups == 1


@pytest.mark.parametrize(
    ("types", "fits"),
    [
        (["dense"] + ["sparse"] * 46, True),
        (["dense"] * 2 + ["sparse"] * 45, True),
        (["sparse", "dense"] + ["sparse"] * 45, True),
        (["dense"] * 46, False),
        (["dense"] + ["other"] * 46, False),
    ],
)
def test_glm_flash_names_the_layers_with_experts(types: list[str], fits: bool, tmp_path: Path) -> None:
    keys = {key: value for key, value in GLM_FLASH.items() if key != "first_k_dense_replace"}
    if not fits:
        with pytest.raises(ValueError, match="mlp_layer_types must be 'dense' or 'sparse' for each of 47 layers"):
            load(tmp_path, keys | {"mlp_layer_types": types})
        return
    config = load(tmp_path, keys | {"mlp_layer_types": types})
    assert [config.is_sparse(layer) for layer in range(47)] == [kind == "sparse" for kind in types]


def test_the_named_layers_take_precedence_over_the_number_of_dense_ones(tmp_path: Path) -> None:
    kinds = {"mlp_layer_types": ["dense"] + ["sparse"] * 46}
    assert load(tmp_path, GLM_FLASH | kinds | {"first_k_dense_replace": 47}) == load(tmp_path, GLM_FLASH)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"])
def test_defaults_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    bare = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 128,
        "vocab_size": 300000,
    }
    config, theirs = load(tmp_path, bare), AutoConfig.for_model(**bare)
    latent = config.latent
    assert latent is not None
    assert latent == LatentConfig(
        theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim, theirs.q_lora_rank
    )
    for name in ("rms_norm_eps", "tie_word_embeddings", "bos_token_id"):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.eos_token_ids == (theirs.eos_token_id,)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    if model_type == "minicpm3":
        assert config.embedding_scale == theirs.scale_emb and config.logits_divisor == theirs.logits_scaling
        assert math.isclose(config.residual_scale, theirs.scale_depth / math.sqrt(6))
    experts = config.experts
    assert (experts is None) == (model_type in ("youtu", "minicpm3"))
    if experts is None:
        return
    dense = getattr(theirs, "first_k_dense_replace", 1)
    assert experts.dense_layers == tuple(range(dense)) and experts.num_experts == theirs.n_routed_experts
    assert experts.intermediate_size == theirs.moe_intermediate_size and experts.scale == theirs.routed_scaling_factor
    assert experts.normalized == theirs.norm_topk_prob
    assert (experts.num_groups, experts.groups_per_token) == (theirs.n_group or 1, theirs.topk_group or 1)


@pytest.mark.parametrize("name", LATENT_CONFIGS)
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.latent is not None and config.latent.query_rank == source.q_lora_rank
    assert config.tie_word_embeddings == source.tie_word_embeddings
    if name == "minicpm3_long":
        assert isinstance(config.rope.scaling, LongRopeScaling)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave must be true, got False"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even for rotary embedding, got 63"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be an integer from 1"),
        ({"q_lora_rank": "many"}, "q_lora_rank must be an integer from 1"),
        ({"attention_bias": True}, "attention_bias is not supported for DeepseekV3ForCausalLM"),
        (
            {"rope_scaling": V3["rope_scaling"] | {"mscale_all_dim": 1e200}},
            r"rope_scaling.mscale_all_dim must be a number from 0 to 1000, got 1e\+200",
        ),
    ],
)
def test_wrong_keys_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, V3 | keys)


@pytest.mark.parametrize("divided", [False, True], ids=["old", "new"])
@pytest.mark.parametrize("name", ["youtu", "youtu_yarn"])
def test_a_gguf_file_says_the_same(name: str, divided: bool, tmp_path: Path) -> None:
    model = make_model(name)
    path = write_latent_gguf(tmp_path / "model.gguf", model, divided=divided)
    model.config.save_pretrained(tmp_path / "config")
    found, expected = load_model_config(path), load_model_config(tmp_path / "config")
    assert found.latent == expected.latent
    assert math.isclose(found.attention_scale, expected.attention_scale, rel_tol=1e-6)
    if name == "youtu":
        assert found.rope == expected.rope and found.head_dim == expected.head_dim
    else:
        assert isinstance(found.rope.scaling, YarnScaling) and found.rope.scaling.attention_factor == 1.0


@pytest.mark.parametrize("says_it", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v2_groups", "deepseek_v3_one_group", "glm4_moe_lite"])
def test_the_experts_of_a_gguf_file(name: str, says_it: bool, tmp_path: Path) -> None:
    """Files may lack the function of the router. Then those with corrections have sigmoids."""
    model = make_model(name)
    keys = {} if says_it else {"expert_gating_func": None}
    path = write_latent_gguf(tmp_path / "model.gguf", model, divided=True, keys=keys)
    model.config.save_pretrained(tmp_path / "config")
    assert load_model_config(path).experts == load_model_config(tmp_path / "config").experts


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.key_length": 97}, "attention.key_length must be 96 beside attention.key_length_mla, got 97"),
        ({"attention.value_length": 65}, "attention.value_length must be 64 beside attention.value_length_mla, got 65"),
        ({"rope.dimension_count": 31}, "rope.dimension_count must be even for rotary embedding, got 31"),
        ({"attention.key_length_mla": 32}, "attention.key_length_mla must be an integer from 33"),
    ],
)
def test_wrong_keys_of_a_gguf_file_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_latent_gguf(tmp_path / "model.gguf", make_model("youtu"), divided=True, keys=keys)
    with pytest.raises(ValueError, match=message):
        load_model_config(path)
