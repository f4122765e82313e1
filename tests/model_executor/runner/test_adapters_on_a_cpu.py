"""LoRA adapters on the compiled operations of a CPU: no bit of a row depends on the batch or on a recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from lora_adapters import save_for_config
from runner_driver import RunnerDriver, relative_error

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.model_executor.step import FROM_DEVICE, decode_step, encode_step

pytestmark = [
    pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor"),
    pytest.mark.timeout(300),
]
SIZE = LoraSize(3, 8)
ROWS = range(1, 13)
ADAPTERS = {row: (0, 1, 3)[row % 3] for row in ROWS}
"""of each row; slot 2 is empty"""


@pytest.fixture(params=VARIANTS, ids=lambda variant: "-".join(str(part) for part in variant if part))
def make_driver(request, monkeypatch, tmp_path):
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)

    def make(lora=SIZE, **options):
        driver = RunnerDriver(make_cpu_runner(request.param, max_running_requests=20, lora=lora, **options))
        if lora is not None:
            config = driver.runner.config
            for slot, rank in ((1, 8), (3, 3)):
                driver.runner.load_adapter(slot, save_for_config(tmp_path / str(slot), config, rank=rank, seed=slot))
        return driver

    return make


def play(driver, rows, adapters=ADAPTERS):
    """Prompts in chunks beside decodes and drafts, then decode steps. Returns the logits of each row's choices."""
    rng = np.random.default_rng(0)
    ids = {row: rng.integers(0, 301, 90) for row in ROWS}
    found = {row: [] for row in rows}

    def note(order, counts=None):
        logits = iter(driver.logits[-1])
        for row in order:
            found[row] += [next(logits) for _ in range(1 if counts is None else counts[row])]

    new = [driver.add(row, adapter=adapters[row]) for row in rows]
    driver.extend({row: ids[row][: 3 + row * 5] for row in rows}, new_rows=new)
    note(rows)
    chunks = {row: ids[row][3 + row * 5 :][: 1 + row % 4] for row in rows}
    driver.extend(chunks, sampled=[row % 2 == 0 for row in rows])
    note([row for row in rows if row % 2 == 0])
    drafts = {row: np.append(FROM_DEVICE, ids[row][: row % 3]) for row in rows}
    for row in rows:
        driver.runner.future_tokens[row] = int(ids[row][80])
    driver.extend(drafts, num_drafts=[len(tokens) - 1 for tokens in drafts.values()])
    note(rows, {row: len(tokens) for row, tokens in drafts.items()})
    for place in (81, 82):
        driver.decode(rows, [int(ids[row][place]) for row in rows])
        note(rows)
    return found


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for row, logits in found.items():
        assert len(logits) == len(expected[row]) and all(map(torch.equal, logits, expected[row])), row


def test_a_batch_changes_no_bit(make_driver):
    found = play(make_driver(), list(ROWS))
    alone = {row: play(make_driver(), [row])[row] for row in (3, 4, 5)}
    assert_same_bits({row: found[row] for row in alone}, alone)
    plain = play(make_driver(lora=None), list(ROWS), dict.fromkeys(ROWS, 0))
    without = [row for row in ROWS if not ADAPTERS[row]]
    assert_same_bits({row: found[row] for row in without}, {row: plain[row] for row in without})
    for row in set(ROWS).difference(without):
        assert all(relative_error(*pair) > 0.01 for pair in zip(found[row], plain[row], strict=True)), row


def test_recorded_steps_have_the_bits_of_launched_ones(make_driver):
    driver = make_driver()
    assert driver.runner._recorded is not None
    assert_same_bits(play(driver, list(ROWS)), play(make_driver(disable_cuda_graph=True), list(ROWS)))


@pytest.mark.parametrize("make_driver", VARIANTS[:2], indirect=True, ids=["float32", "bfloat16"])
def test_an_empty_slot_computes_the_model(make_driver, tmp_path):
    plain = play(make_driver(), list(ROWS), dict.fromkeys(ROWS, 0))
    driver = make_driver()
    for slot in (1, 3):
        driver.runner.unload_adapter(slot)
    with pytest.raises(ValueError, match="the rank is 9, but --max-lora-rank is 8"):
        driver.runner.load_adapter(2, save_for_config(tmp_path / "nine", driver.runner.config, rank=9))
    assert_same_bits(play(driver, list(ROWS), {row: row % 4 for row in ROWS}), plain)


@pytest.mark.parametrize("make_driver", VARIANTS[:1], indirect=True, ids=["float32"])
def test_a_slot_gets_another_adapter(make_driver, tmp_path):
    expected = play(make_driver(), list(ROWS))
    driver = make_driver()
    path = save_for_config(tmp_path / "first", driver.runner.config, rank=7, seed=5)
    first = driver.runner.load_adapter(1, path)
    assert first == driver.runner.load_adapter(3, path)
    for slot in (1, 3):
        assert driver.runner.load_adapter(slot, str(tmp_path / str(slot))) != first
    assert_same_bits(play(driver, list(ROWS)), expected)


@pytest.mark.parametrize("make_driver", VARIANTS[:1], indirect=True, ids=["float32"])
def test_a_weight_update_keeps_adapters(make_driver):
    driver = make_driver()
    expected = play(make_driver(), list(ROWS))
    driver.runner.weights.update(replace(CONFIG, model_path="elsewhere"))  # random weights depend on the seed alone
    assert_same_bits(play(driver, list(ROWS)), expected)


def test_a_model_whose_rows_are_no_whole_words(monkeypatch, tmp_path):
    """Its linear layers are torch's, but its adapters are multiplied by the compiled operation."""
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)
    config = replace(CONFIG, intermediate_size=33)
    logits = []
    for backend in ("cpu", "torch"):
        driver = RunnerDriver(
            make_cpu_runner(config=config, dtype="bfloat16", attention_backend=backend, lora=SIZE, max_total_tokens=900)
        )
        assert not driver.runner.model.compiled
        driver.runner.load_adapter(1, save_for_config(tmp_path, config, rank=3))
        logits.append(driver.logits_along(1, np.arange(30), [20], adapter=1))
    for position, found in logits[0].items():
        assert relative_error(found, logits[1][position]) < 0.05


def test_the_next_owner_of_a_row_has_its_own_adapter():
    driver = RunnerDriver(make_cpu_runner(lora=SIZE))
    rows = driver.runner.adapters.rows
    rows.set_rows([driver.add(1, adapter=2), driver.add(2, adapter=3)])
    rows.set_rows([driver.add(1)])
    assert rows.of_rows(torch.tensor([2, 1])).slots.tolist() == [3, 0]


def test_a_step_for_another_process_names_the_adapter(monkeypatch):
    driver = RunnerDriver(make_cpu_runner(lora=SIZE))
    steps = []
    monkeypatch.setattr(driver, "_run", steps.append)
    driver.extend({1: [5]}, new_rows=[driver.add(1, adapter=2)])
    assert decode_step(encode_step(steps[0])).new_rows[0].adapter == 2
