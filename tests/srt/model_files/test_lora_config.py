"""The config of LoRA adapters: what each module's rank and scale are, and what is refused."""

from __future__ import annotations

import json
import math
import os

import pytest
from lora_adapters import CONFIG

from tercet.srt.model_files.lora_config import read_lora_config

Q5 = "model.layers.5.self_attn.q_proj"


def write(folder, **changes):
    values = {**CONFIG, "target_modules": ["q_proj", "v_proj"], **changes}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return str(folder)


def read(folder, **changes):
    return read_lora_config(write(folder, **changes))


def test_scales(tmp_path):
    assert read(tmp_path, r=8, lora_alpha=24).scale_of(Q5) == 3
    assert read(tmp_path, r=16, lora_alpha=8, use_rslora=True).scale_of(Q5) == 2
    found = read(tmp_path, r=4, lora_alpha=8, rank_pattern={"q_proj": 16, r"layers\.5\..*": 2}, use_rslora=True)
    assert found.rank == 16 and found.rank_of(Q5) == 16  # the first pattern counts
    assert found.rank_of("model.layers.5.self_attn.v_proj") == 2 and found.rank_of("model.layers.4.mlp.up_proj") == 4
    assert found.scale_of(Q5) == 2 and found.scale_of("model.layers.5.mlp.up_proj") == 8 / math.sqrt(2)
    found = read(tmp_path, r=4, alpha_pattern={Q5: 20, r"^model\.layers\.1\..*": 2})
    assert [found.scale_of(name) for name in (Q5, Q5.replace("5", "15"), Q5.replace("5", "1"))] == [5, 1.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [0, 5]),
        ({"layers_to_transform": 5}, [5]),
        ({"layers_to_transform": [0]}, [0]),
        ({"layers_to_transform": []}, [0, 5]),
        ({"target_modules": [Q5, "v_proj"]}, [5]),
        ({"target_modules": [Q5, "v_proj"], "exclude_modules": [Q5]}, [5]),
        ({"target_modules": ["self_attn.q_proj"]}, [0, 5]),
        ({"target_modules": ["proj"]}, []),
        ({"target_modules": r".*\.(q|v)_proj"}, [0, 5]),
        ({"target_modules": "all-linear"}, [0, 5]),
    ],
)
def test_targets(changes, layers, tmp_path):
    found = read(tmp_path, **changes)
    assert [layer for layer in (0, 5) if found.targets(Q5.replace("5", str(layer)))] == layers
    has_names = isinstance(changes.get("target_modules", []), list) and "exclude_modules" not in changes
    assert found.is_exact == has_names


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, 'peft_type must be "LORA"'),
        ({"peft_type": None}, 'peft_type must be "LORA"'),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "lora_only"}, 'bias must be "none"'),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not supported"),
        ({"use_later_invention": {"x": 1}}, "use_later_invention={'x': 1} is not known"),
        ({"r": 0}, "r must be an integer from 1"),
        ({"r": 1 << 20}, "r must be an integer from 1"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a finite number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a finite number"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern.q_proj must be an integer"),
        ({"rank_pattern": {"(q_proj": 8}}, r"rank_pattern has the key '\(q_proj', but that is no pattern"),
        ({"rank_pattern": {"(.+)+q_proj": 8}}, "rank_pattern has the key .* too complex"),
        ({"alpha_pattern": {".*.*.*.*q_proj": 8}}, "alpha_pattern has the key .* too complex"),
        ({"rank_pattern": {"(.|.)" * 40 + "!": 8}}, "rank_pattern has the key .* too complex"),
        ({"rank_pattern": {f".*.*(q|k){number}": 8 for number in range(40)}}, "too complex, alone or with the others"),
        ({"rank_pattern": {"q{99999999999}": 8}}, "but that is no pattern: the repetition number is too large"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"target_modules": [1]}, "target_modules must be a list of strings"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform must be a list of integers"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
    ],
)
def test_refusals(changes, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "keys",
    [
        [f"model.layers.{layer}.mlp.{name}_proj" for layer in range(128) for name in ("gate", "up", "down")],
        [rf".*layers\.{layer}\.[a-z_]*\.q_proj" for layer in range(32)],
        [r"layers\.(0|1|2|3|4|5)\..*", "(q|k|v)_proj", r".*\.[0-9]+\..*_proj"],
    ],
)
def test_patterns_that_are_simple_enough(keys, tmp_path):
    assert len(read(tmp_path, rank_pattern=dict.fromkeys(keys, 3)).ranks) == len(keys)


def test_a_config_that_is_too_large_is_not_read(tmp_path):
    path = write(tmp_path)
    os.truncate(tmp_path / "adapter_config.json", 1 << 40)
    with pytest.raises(
        ValueError, match=r"adapter_config.json' must have at most 1,048,576 bytes, got 1,099,511,627,776"
    ):
        read_lora_config(path)


def test_later_settings_without_an_effect(tmp_path):
    later = {"use_later_invention": False, "another": None, "list": [], "object": {}, "qalora_group_size": 16}
    assert read(tmp_path, **later, init_lora_weights="gaussian", peft_version="0.21.2").rank == 4


def test_no_adapter(tmp_path):
    with pytest.raises(ValueError, match=r"no folder of a LoRA adapter: adapter_config.json cannot be read \(No such"):
        read_lora_config(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="no folder of a LoRA adapter"):
        read_lora_config(write(tmp_path) + "/adapter_config.json")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "adapter_config.json").symlink_to("gone")
    with pytest.raises(
        ValueError, match=r"cannot be read \('.*adapter_config\.json' is a link to a missing file, 'gone'\)"
    ):
        read_lora_config(str(tmp_path / "link"))
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_lora_config(str(tmp_path))
