"""Logits equal those of transformers, however the tokens are brought in."""

from __future__ import annotations

import numpy as np
import pytest
import runners
import torch
from mxfp4_models import save_mxfp4
from runner_driver import RunnerDriver, relative_error
from tiny_configs import CONFIGS
from tiny_models import make_model, reference_logits, save
from transformers_parity import assert_greedy_tokens_equal, assert_logits_equal

from tercet.srt.model_files.load_config import load_model_config


def make_runner(folder, **options):
    options = {"dtype": "float32", "max_total_tokens": 400, "max_running_requests": 6} | options
    return runners.make_runner(load_model_config(folder), **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_for_chunks_and_decodes(name, tmp_path):
    model = make_model(name)
    # Mistral in many small shards, the others in one file
    options = {"max_shard_size": "60KB"} if name.startswith("mistral") else {}
    driver = RunnerDriver(make_runner(save(model, tmp_path, **options)))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(options)
    ids = np.random.default_rng(1).integers(0, 131, 50)
    assert_logits_equal(driver, model, ids)


@pytest.mark.parametrize(
    "name", ["llama", "mistral_window", "qwen2_upper_window", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"]
)
def test_a_batch_of_all_kinds_changes_no_row(name, tmp_path):
    """Requests of very different lengths: prefills, later chunks and decodes mixed in one step, then decodes only."""
    model = make_model(name)
    driver = RunnerDriver(make_runner(save(model, tmp_path)))
    rng = np.random.default_rng(2)
    ids = {row: rng.integers(0, 131, length) for row, length in {1: 60, 2: 3, 3: 40, 4: 1, 5: 90}.items()}
    more = {row: rng.integers(0, 131, 6) for row in ids}
    expected = {row: reference_logits(model, [*ids[row], *more[row]]) for row in ids}

    def check(row, index):
        assert relative_error(driver.logits[-1][index], expected[row][driver.lens[row] - 1]) < 1e-4, row

    new = [driver.add(row) for row in ids]
    driver.extend({1: ids[1][:20], 2: ids[2], 5: ids[5][:33]}, sampled=[False, True, False], new_rows=new)
    check(2, 0)
    assert driver.logits[-1].shape[0] == 1
    # row 2 decodes (its token forced, and read on the device) between a chunk, a fresh prompt and a one-token prompt
    driver.runner.future_tokens[2] = int(more[2][0])
    driver.extend({5: ids[5][33:], 2: None, 3: ids[3], 4: ids[4], 1: ids[1][20:]})
    for index, row in enumerate((5, 2, 3, 4, 1)):
        check(row, index)
    order = [4, 2, 5, 1, 3]
    done = {row: 1 if row == 2 else 0 for row in ids}
    for _ in range(5):
        driver.decode(order, [int(more[row][done[row]]) for row in order])
        for index, row in enumerate(order):
            done[row] += 1
            check(row, index)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_experts_of_4_bits(backend, tmp_path):
    model = save_mxfp4(tmp_path)
    driver = RunnerDriver(make_runner(tmp_path, attention_backend=backend))
    ids = np.random.default_rng(1).integers(0, 131, 50)
    assert_logits_equal(driver, model, ids)
    assert_greedy_tokens_equal(driver, model, ids[:9])


def test_a_chunk_that_samples_nobody_returns_nothing(tmp_path):
    driver = RunnerDriver(make_runner(save(make_model("llama"), tmp_path)))
    new = [driver.add(1)]
    assert driver.extend({1: [5, 6, 7]}, sampled=[False], new_rows=new).shape == (0,)
    assert driver.logits == []


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_half_precisions_run_on_a_cpu(dtype, tolerance, tmp_path):
    model = make_model("qwen3")
    driver = RunnerDriver(make_runner(save(model, tmp_path), dtype=dtype))
    ids = np.random.default_rng(3).integers(0, 131, 40)
    expected = reference_logits(model, ids.tolist())
    found = driver.logits_along(1, ids, [15, 10])
    errors = [relative_error(logits, expected[position]) for position, logits in found.items()]
    assert max(errors) < tolerance
    assert (
        str(driver.runner.settings.dtype) == f"torch.{dtype}"
        and driver.runner.kv_pool.dtype == driver.runner.settings.dtype
    )


@pytest.mark.parametrize("name", ["qwen3_moe_all", "mixtral", "gpt_oss"])
def test_experts_in_bfloat16(name, tmp_path):
    """Rounding may change the choice of an expert. So the median of the positions counts, and not the largest error."""
    model = make_model(name).bfloat16()
    driver = RunnerDriver(make_runner(save(model, tmp_path), dtype="bfloat16"))
    ids = np.random.default_rng(3).integers(0, 131, 40)
    expected = reference_logits(model.float(), ids.tolist())
    found = driver.logits_along(1, ids, [15])
    errors = [relative_error(logits, expected[position]) for position, logits in found.items()]
    assert len(errors) == 26 and np.median(errors) < 0.05


def test_greedy_tokens_equal_generate(tmp_path):
    """The tokens stay on the device from step to step."""
    model = make_model("llama_31_tied")
    driver = RunnerDriver(make_runner(save(model, tmp_path)))
    ids = np.random.default_rng(4).integers(3, 131, 12)
    generated = model.generate(torch.tensor([ids.tolist()]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    tokens = [driver.extend({3: ids}, new_rows=[driver.add(3)])[0]]
    tokens += [driver.decode([3])[0] for _ in range(19)]
    assert tokens == generated[0, 12:].tolist()
