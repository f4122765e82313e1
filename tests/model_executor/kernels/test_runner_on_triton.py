"""A whole model on the Triton backend: chunks, decodes and both in one step, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from tiny_models import make_model, reference_logits, save
from transformers_parity import assert_soft_caps_come_first

from tercet.srt.model_files.load_config import load_model_config


@pytest.mark.parametrize(
    ("name", "fuse_small_steps"),
    [
        ("llama", False),
        ("qwen2_upper_window", False),
        ("qwen2_upper_window", True),
        ("qwen3_moe", False),
        ("qwen3_moe", True),
        ("smollm3_window", False),
        ("smollm3_window", True),
        ("olmo2_scaled", False),
        ("olmo3", False),
        ("olmoe", False),
        ("granitemoe", False),
        ("granitemoe_biases", True),
        ("granitemoeshared", True),
        ("granitemoehybrid", False),
        ("lfm3", False),
        ("lfm3", True),
        ("granitemoeshared_biases", False),
        ("qwen2_moe", False),
        ("qwen2_moe_all", True),
        ("olmoe_normalized", True),
        ("granite", False),
        ("granite_biases", True),
        ("olmo2", True),
        ("glm4", False),
        ("glm4_yarn", True),
        ("glm4_moe", False),
        ("glm4_moe_sparse", True),
        ("dots1", False),
        ("dots1_window", True),
        ("seed_oss", True),
        ("ernie4_5_biases", True),
        ("ernie4_5_moe", True),
        ("ernie4_5_moe_sparse", False),
        ("seed_oss_out", False),
        ("exaone4", False),
        ("exaone4_types", True),
        ("arcee", True),
        ("arcee_biases", False),
        ("ministral3", True),
        ("ministral3_window", False),
        ("hunyuan_v1_dense", True),
        ("hunyuan_v1_dense_tied", False),
        ("deepseek_v2_groups", False),
        ("deepseek_v3", False),
        ("glm4_moe_lite", False),
        ("youtu_yarn", False),
        ("minicpm3", False),
        ("lfm2_bias", True),
        ("lfm2_moe", False),
        ("qwen3_5", False),
        ("qwen3_5_moe", False),
        ("qwen3_next", False),
        ("qwen3_5_attention", True),
        ("gemma2_scores", False),
        ("gemma2", True),
        ("gemma3_scaled", False),
        ("gemma3", True),
        ("gemma4", True),
        ("gemma4_heads", False),
        ("gemma4_sharing", False),
        ("gemma4_sharing", True),
        ("gpt_oss", False),
        ("gpt_oss", True),
    ],
)
def test_logits_equal_transformers(name, fuse_small_steps, tmp_path, monkeypatch):
    # A GPU has no oneDNN, for which a CPU packs weights.
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)
    monkeypatch.setattr("tercet.model_executor.layers.latent_attention.can_pack", lambda weight: False)
    model = make_model(name)
    config = load_model_config(save(model, tmp_path))
    runner = make_runner(
        config, dtype="float32", max_total_tokens=200, max_running_requests=3, attention_backend="triton",
        fuse_small_steps=fuse_small_steps,
    )  # fmt: skip
    assert runner.attention.name == "triton"
    driver = RunnerDriver(runner)
    rng = np.random.default_rng(1)
    ids = {row: rng.integers(0, 131, length) for row, length in {1: 12, 2: 40, 3: 6}.items()}
    expected = {row: reference_logits(model, tokens.tolist()) for row, tokens in ids.items()}

    def check(order):
        for index, row in enumerate(order):
            assert relative_error(driver.logits[-1][index], expected[row][driver.lens[row] - 1]) < 1e-4, row

    # 33 tokens: experts have other tiles than for 32. Then the second split of a request, and less than a KV tile.
    driver.extend({2: ids[2][:23], 1: ids[1][:10]}, new_rows=[driver.add(2), driver.add(1)])
    check([2, 1])
    driver.runner.future_tokens[1] = int(ids[1][10])
    driver.extend({1: None, 3: ids[3][:5], 2: ids[2][23:39]}, new_rows=[driver.add(3)])
    check([1, 3, 2])
    driver.decode([3, 1, 2], [int(ids[row][driver.lens[row]]) for row in (3, 1, 2)])
    check([3, 1, 2])


def test_soft_caps_of_logits_come_before_what_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)
    assert_soft_caps_come_first("triton", tmp_path)


@pytest.mark.parametrize("fuse_small_steps", [False, True])
def test_pages_of_whole_kv_tiles_change_no_bit(fuse_small_steps, tmp_path, monkeypatch):
    """Attention then finds a tile with one look-up, as on a GPU with the default page size."""
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)
    config = load_model_config(save(make_model("qwen2_upper_window"), tmp_path))
    logits = []
    for page_size in (1, 32):
        runner = make_runner(
            config, dtype="bfloat16", max_total_tokens=320, max_running_requests=2, attention_backend="triton",
            page_size=page_size, fuse_small_steps=fuse_small_steps,
        )  # fmt: skip
        tiles = runner.attention._decode_tile, runner.attention._extend_tile
        assert [tile.paged for tile in tiles] == [page_size > 1] * 2
        driver = RunnerDriver(runner)
        ids = np.random.default_rng(1).integers(0, 131, 60)
        driver.extend({1: ids[:41], 2: ids[:9]}, new_rows=[driver.add(1), driver.add(2)])
        driver.extend({2: None, 1: ids[41:]})
        driver.decode([1, 2])
        logits.append(torch.cat(driver.logits))
    assert logits[0].isfinite().all() and torch.equal(*logits)
