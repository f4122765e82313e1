"""Requests with LoRA adapters on a runner, against models whose weights have the adapters merged in."""

from __future__ import annotations

import numpy as np
import pytest
from lora_adapters import merged, save_adapter
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from tiny_models import CONFIGS, make_model, reference_logits, save

from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.srt.model_files.load_config import load_model_config

SIZE = LoraSize(3, 6)
KINDS = [
    "llama", "llama_biases", "qwen2_tied", "qwen3", "phi3", "phi3_partial", "smollm3", "gemma3", "gemma3_scaled",
    "gemma3_images", "gpt_oss", "qwen3_moe", "mixtral", "mistral_window",
]  # fmt: skip


def make_driver(folder, **options):
    options = {"dtype": "float32", "max_total_tokens": 600, "max_running_requests": 6, "lora": SIZE} | options
    return RunnerDriver(make_runner(load_model_config(folder), **options))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_merged_weights(name, backend, tmp_path):
    model = make_model(name)
    driver = make_driver(save(model, tmp_path / "model"), attention_backend=backend)
    attention_only = {"targets": ("q_proj", "v_proj", "qkv_proj")}
    adapters = [
        save_adapter(tmp_path / "all", model, rank=4, seed=1),
        save_adapter(tmp_path / "some", model, rank=6, seed=2, use_rslora=True, **attention_only),
    ]
    for slot, path in enumerate(adapters, start=1):
        driver.runner.load_adapter(slot, path)
    models = {0: model, 1: merged(model, tmp_path / "all"), 2: merged(model, tmp_path / "some")}
    rng = np.random.default_rng(1)
    ids = {row: rng.integers(0, 131, 41) for row in range(1, 6)}  # long enough for the factors of phi3_partial
    adapter_of = {1: 1, 2: 0, 3: 2, 4: 1, 5: 2}
    expected = {row: reference_logits(models[adapter_of[row]], tokens.tolist()) for row, tokens in ids.items()}

    def check(order):
        for index, row in enumerate(order):
            found = driver.logits[-1][index]
            assert relative_error(found, expected[row][driver.lens[row] - 1]) < 1e-4, row
            assert int(found.argmax()) == int(expected[row][driver.lens[row] - 1].argmax())

    new = [driver.add(row, adapter=adapter_of[row]) for row in ids]
    driver.extend({2: ids[2][:19], 1: ids[1][:20], 3: ids[3][:5], 4: ids[4][:29]}, new_rows=new)
    check([2, 1, 3, 4])
    driver.runner.future_tokens[1] = int(ids[1][20])
    driver.extend({1: None, 5: ids[5][:7], 3: ids[3][5:13], 2: ids[2][19:39]}, sampled=[True, True, False, True])
    check([1, 5, 2])
    driver.decode([3, 5, 1, 2, 4], [int(ids[row][driver.lens[row]]) for row in (3, 5, 1, 2, 4)])
    check([3, 5, 1, 2, 4])


def test_the_families_of_adapters_are_all_families():
    def kind(name):
        return CONFIGS[name]().model_type

    assert {kind(name) for name in KINDS} == {kind(name) for name in CONFIGS}
