"""A whole model on the compiled operations of a CPU: its logits have the same bits in any batch, chunk or prefix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from runner_driver import RunnerDriver, relative_error

from tercet.model_executor import cpu_extension
from tercet.srt.model_files.experts_config import ExpertsConfig

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")


@pytest.fixture(params=VARIANTS, ids=lambda variant: "-".join(str(part) for part in variant if part))
def make_driver(request, monkeypatch):
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)

    def make(**options):
        runner = make_cpu_runner(request.param, **options)
        assert (runner.kv_pool.k_buffer[0].dim() > 3) == (runner.settings.page_size > 1)
        return RunnerDriver(runner)

    return make


def test_batches_of_any_size(make_driver):
    driver = make_driver()
    rng = np.random.default_rng(1)
    prompts = {row: rng.integers(0, 301, 1 + row * 7 % 90) for row in range(1, 65)}
    alone = {}
    for row, ids in prompts.items():
        driver.extend({row: ids}, new_rows=[driver.add(row)])
        driver.decode([row], [5])
        alone[row] = driver.logits[-1][0]
    for size in (2, 3, 7, 8, 16, 31, 64):
        driver = make_driver()
        rows = rng.permutation(np.arange(1, 65))[:size].tolist()
        driver.extend({row: prompts[row] for row in rows}, new_rows=[driver.add(row) for row in rows])
        driver.decode(rows, [5] * size)
        for index, row in enumerate(rows):
            assert torch.equal(driver.logits[-1][index], alone[row]), (size, row)


def test_experts_in_batches_of_any_size(make_driver):
    """Tokens choose their experts alone, and an expert computes those of several requests at once."""
    experts = ExpertsConfig(num_experts=6, num_experts_per_token=3, intermediate_size=64, normalized=True)
    config = replace(CONFIG, architecture="Qwen3MoeForCausalLM", experts=experts)
    driver = make_driver(config=config)
    rng = np.random.default_rng(1)
    prompts = {row: rng.integers(0, 301, 1 + row * 7 % 30) for row in range(1, 17)}
    alone = {}
    for row, ids in prompts.items():
        driver.extend({row: ids}, new_rows=[driver.add(row)])
        driver.decode([row], [5])
        alone[row] = driver.logits[-1][0]
    for size in (2, 7, 16):
        driver = make_driver(config=config)
        rows = rng.permutation(np.arange(1, 17))[:size].tolist()
        driver.extend({row: prompts[row] for row in rows}, new_rows=[driver.add(row) for row in rows])
        driver.decode(rows, [5] * size)
        for index, row in enumerate(rows):
            assert torch.equal(driver.logits[-1][index], alone[row]), (size, row)


def test_chunks_of_any_size_and_prefixes_that_are_there(make_driver):
    driver = make_driver()
    ids = np.random.default_rng(2).integers(0, 301, 300)
    expected = driver.logits_along(1, ids, [300])[299]
    for row, chunks in enumerate(([299], [1, 299], [64, 64, 172], [100, 57, 143], [256, 1, 42]), start=2):
        found = driver.logits_along(row, ids, chunks)
        assert torch.equal(found[299], expected), chunks


@pytest.mark.parametrize("make_driver", VARIANTS[4:6], indirect=True, ids=["float32", "bfloat16"])
def test_panels_change_no_bit(make_driver):
    ids = np.random.default_rng(4).integers(0, 301, 300)
    expected = make_driver(page_size=1).logits_along(1, ids, [50, 230])
    found = make_driver().logits_along(1, ids, [50, 230])
    for position, logits in expected.items():
        assert torch.equal(found[position], logits), position


@pytest.mark.parametrize("make_driver", VARIANTS[:1], indirect=True, ids=["float32"])
def test_torch_says_the_same_but_for_rounding(make_driver):
    driver = make_driver()
    ids = np.random.default_rng(3).integers(0, 301, 90)
    found = driver.logits_along(1, ids, [80])
    reference = RunnerDriver(
        make_cpu_runner(max_running_requests=4, max_total_tokens=400, attention_backend="torch")
    ).logits_along(1, ids, [80])
    for position, logits in found.items():
        assert relative_error(logits, reference[position]) < 1e-4, position
