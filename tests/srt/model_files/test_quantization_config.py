"""Integer weights in config.json: what is read, and what is refused by name. test_fp8_checkpoint.py tests fp8."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from fp8_models import change_config
from integer_models import KINDS
from tiny_configs import BASE
from transformers import LlamaConfig

from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.quantization_config import IntegerConfig

GPTQ, AWQ, PACKED = (KINDS[name].config() for name in ("gptq", "awq", "packed"))


def read(folder: Path, config: dict[str, Any]) -> IntegerConfig:
    (folder / "config.json").write_text(LlamaConfig(**BASE, architectures=["LlamaForCausalLM"]).to_json_string())
    change_config(folder, quantization_config=config)
    found = load_model_config(folder).quantization
    assert isinstance(found, IntegerConfig)
    return found


def packed(**weights: object) -> dict[str, Any]:
    """compressed-tensors with changed settings of the weights."""
    config = copy.deepcopy(PACKED)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def with_targets(*targets: str) -> dict[str, Any]:
    """The same with targets."""
    config = copy.deepcopy(PACKED)
    config["config_groups"]["group_0"]["targets"] = list(targets)
    return config


def with_activations(**activations: object) -> dict[str, Any]:
    """The same with rounded activations."""
    config = copy.deepcopy(PACKED)
    config["config_groups"]["group_0"]["input_activations"] = activations
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, IntegerConfig("gptq", 4, 32, False, False)),
        (GPTQ | {"checkpoint_format": None, "bits": 8, "group_size": -1}, IntegerConfig("gptq", 8, None, False, False)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True}, IntegerConfig("gptq_v2", 4, 32, False, True)),
        (GPTQ | {"dynamic": {"-:.*v_proj": {}}}, IntegerConfig("gptq", 4, 32, False, False, ("re:.*v_proj",))),
        # as GPTQConfig of transformers writes it
        (
            GPTQ | {"backend": "auto", "tokenizer": None, "dataset": ["a"], "use_exllama": True, "batch_size": 1},
            IntegerConfig("gptq", 4, 32, False, False),
        ),
        (AWQ | {"version": "GEMM"}, IntegerConfig("awq", 4, 128, False, False)),
        # as AutoRound writes them
        (AWQ | {"zero_point": False, "amp": True}, IntegerConfig("awq", 4, 128, False, False)),
        (
            GPTQ
            | {"act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True}
            | {"autoround_version": "0.5.1", "super_bits": None, "to_quant_block_names": None, "amp": True},
            IntegerConfig("gptq", 4, 32, False, False),
        ),
        (
            GPTQ | {"modules_to_not_convert": ["*lm_head"]},
            IntegerConfig("gptq", 4, 32, False, False, ("*lm_head",)),
        ),
        # as GPTQModel writes it
        (
            AWQ | {"version": None, "format": "gemm", "pack_dtype": "int32", "lm_head": False, "desc_act": False},
            IntegerConfig("awq", 4, 128, False, False),
        ),
        (
            AWQ | {"modules_to_not_convert": ["visual"], "do_fuse": False},
            IntegerConfig("awq", 4, 128, False, False, ("visual",)),
        ),
        (PACKED, IntegerConfig("pack-quantized", 4, 32, True, False, ("lm_head",))),
        (
            packed(actorder="static", symmetric=False) | {"sparsity_config": {"format": "dense"}},
            IntegerConfig("pack-quantized", 4, 32, False, False, ("lm_head",)),
        ),
        (
            packed(strategy=None, group_size=-1, num_bits=8, actorder="group"),
            IntegerConfig("pack-quantized", 8, None, True, True, ("lm_head",)),
        ),
        (
            with_activations(num_bits=8, type="int", symmetric=False, dynamic=True, strategy="token"),
            IntegerConfig("pack-quantized", 4, 32, True, False, ("lm_head",)),
        ),
    ],
)
def test_a_config_is_read(config: dict[str, Any], expected: IntegerConfig, tmp_path: Path) -> None:
    assert read(tmp_path, config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": 3}, "bits must be 4 or 8, got 3"),
        (GPTQ | {"bits": None}, "bits must be 4 or 8, got None"),
        (GPTQ | {"bits": 4.0}, "bits must be 4 or 8, got 4.0"),
        (GPTQ | {"group_size": 0}, "group_size must be an integer from 1"),
        (GPTQ | {"group_size": None}, "group_size must be an integer from 1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq' or 'gptq_v2', got 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype must be 'int32', got 'int16'"),
        (GPTQ | {"dynamic": {"+:.*v_proj": {"bits": 8}}}, r"dynamic: .*v_proj.* is not supported"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "regular expressions"),
        (GPTQ | {"rotation": "hadamard"}, "rotation"),
        (GPTQ | {"surprise": 1}, "surprise"),
        (AWQ | {"version": "gemv"}, "version must be 'gemm', got 'gemv'"),
        (AWQ | {"backend": "llm-awq"}, "backend 'llm-awq' has another layout"),
        (AWQ | {"bits": 8}, "bits must be 4, got 8"),
        (AWQ | {"zero_point": 1}, "zero_point must be true or false, got 1"),
        (GPTQ | {"act_bits": 8}, "act_bits=8 is not supported: activations are not rounded"),
        (packed(num_bits=2), "num_bits must be 4 or 8, got 2"),
        (packed(type="float"), "type must be 'int', got 'float'"),
        (packed(dynamic=True), "dynamic must be False, got True"),
        (packed(strategy="tensor"), "strategy must be group with a group_size, or channel without, got 'tensor'"),
        (packed(strategy="channel"), "got 'channel' with 32"),
        (packed(actorder="size"), "actorder must be weight, static, group, dynamic or null"),
        (packed(block_structure=[1, 2]), "block_structure"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format must be 'dense'"),
        (PACKED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED | {"format": "int-quantized"}, "num_bits must be 8, got 4"),
        (with_targets(), r"group_0.targets must be 'Linear', names .*, got \[\]"),
        (with_targets("re:.*proj", "Embedding"), "targets must be 'Linear', names .*'Embedding'"),
        (with_targets("re:("), "targets must be names or regular expressions"),
        (with_activations(num_bits=8, strategy="tensor", dynamic=False), "dynamic must be True, got False"),
        (with_activations(num_bits=4, strategy="token", dynamic=True), "num_bits must be 8, got 4"),
    ],
)
def test_a_config_that_would_be_ignored_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, config)


def test_targets_select_linear_layers_by_class_by_whole_name_and_by_regular_expression(tmp_path: Path) -> None:
    up, query = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"

    def quantized(*targets: str) -> list[str]:
        config = read(tmp_path, with_targets(*targets))
        return [name for name in (up, query, "lm_head") if not config.excludes(name)]

    assert quantized("Linear") == quantized("Linear", "re:.*mlp") == [up, query]
    assert quantized("re:.*self_attn.*", r"re:.*mlp\.(up|gate|down)_proj") == [up, query]
    assert quantized("re:.*mlp.*") == quantized(up) == [up]
    assert quantized("up_proj") == quantized("model.layers.0.mlp") == []
    assert quantized("lm_head") == []  # `ignore` counts more


def test_settings_of_gptq_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    # as AutoGPTQ before 0.7 writes it
    older = {key: GPTQ[key] for key in ("bits", "group_size", "damp_percent", "desc_act", "sym", "true_sequential")}
    older |= {"model_name_or_path": None, "model_file_base_name": "model", "is_marlin_format": False}
    path = tmp_path / "quantize_config.json"
    path.write_text(json.dumps(older))
    expected = IntegerConfig("gptq", 4, 32, False, False)
    assert read(tmp_path, {}) == expected
    path.write_text(json.dumps(older | {"bits": 3}))
    assert read(tmp_path, GPTQ) == expected
    with pytest.raises(ValueError, match=r"quantize_config.json: bits must be 4 or 8, got 3"):
        read(tmp_path, {})


OLD_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
"""As AutoAWQ before 0.2 writes it."""


def test_settings_of_awq_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "quant_config.json"

    def read_old(**changes: object) -> IntegerConfig:
        path.write_text(json.dumps({key: value for key, value in (OLD_AWQ | changes).items() if value != "absent"}))
        return read(tmp_path, {})

    expected = read(tmp_path, AWQ)
    assert read_old() == expected == IntegerConfig("awq", 4, 128, False, False)
    assert read_old(version="absent", modules_to_not_convert=None) == expected  # 0.0 and 0.1.7
    assert read_old(q_group_size=-1) == expected._replace(group_size=None)
    assert read_old(modules_to_not_convert=["lm_head"]) == expected._replace(excluded=("lm_head",))
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"quant_config.json' must hold a JSON object"):
        read(tmp_path, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_bit": 8}, "w_bit must be 4, got 8"),
        ({"w_bit": None}, "w_bit must be an integer from 1 to .*, got None"),
        ({"q_group_size": 0}, "q_group_size must be an integer from 1 to .*, got 0"),
        ({"q_group_size": None}, "q_group_size must be an integer from 1 to .*, got None"),
        ({"zero_point": False}, "zero_point must be true, got False"),
        ({"version": "GEMV"}, "version must be 'gemm', got 'GEMV'"),
        ({"bits": 4}, "{'bits': 4} is not supported"),
        ({"quant_method": "hqq"}, "method 'hqq'. is not supported"),
    ],
)
def test_other_settings_in_the_file_of_awq_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "quant_config.json").write_text(json.dumps(OLD_AWQ | changes))
    with pytest.raises(ValueError, match=rf"quant_config.json: .*{message}"):
        read(tmp_path, {})
    assert read(tmp_path, AWQ).layout == "awq"  # config.json counts more


@pytest.mark.parametrize("form", ["language_model.model.", "model.language_model."])
def test_names_in_a_model_that_also_takes_images(form: str) -> None:
    """Files name modules as the whole model has them, and tensors of the language model are read without that."""
    module, regex = "model.layers.1.mlp.up_proj", form.replace(".", r"\.")
    for pattern in (f"{form}layers.1", f"{form}layers.1.mlp.up_proj", f"re:{regex}layers\\.1\\..*"):
        config = IntegerConfig("pack-quantized", 4, 32, True, False, excluded=(pattern,))
        assert config.excludes(module) and not config.excludes("model.layers.0.mlp.up_proj"), pattern
    for target in (f"{form}layers.1.mlp.up_proj", f"re:^{regex}layers\\.1\\..*_proj$", "re:.*language_model.*"):
        targeted = IntegerConfig("pack-quantized", 4, 32, True, False, targets=(target,))
        assert not targeted.excludes(module), target
    others = IntegerConfig("pack-quantized", 4, 32, True, False, excluded=("re:vision_tower.*", "re:.*lm_head"))
    assert not others.excludes(module) and others.excludes("lm_head")
