"""LoRA adapters on Triton layers: launched, and from graphs that were recorded without any adapter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fake_accelerator import FakeAccelerator, use_fake
from lora_adapters import save_for_config
from runner_driver import RunnerDriver, relative_error
from runners import make_runner

from tercet.model_executor.kernels.lora import lora_hidden_bytes, lora_row_counts
from tercet.model_executor.layers.lora_layers import LoraSize
from tercet.model_executor.runner.adapters import few_rows_bytes
from tercet.model_executor.runner.warmup import low_tile_tokens, warmup_steps
from tercet.srt.model_files.model_config import ModelConfig

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=99,
    context_len=96,
    qk_norm=True,
    tie_word_embeddings=True,
    load_format="dummy",
)
ADAPTERS = {1: 1, 2: 0, 3: 2, 4: 2, 5: 1}


@pytest.fixture
def make_driver(monkeypatch, tmp_path):
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)
    # The largest prefill is left out: interpreted, it takes longer than all the rest.
    monkeypatch.setattr("tercet.model_executor.runner.load.warmup_steps", lambda *sizes: warmup_steps(*sizes)[1:])

    def make(backend, lora=LoraSize(3, 4), **options):  # noqa: B008 (a constant)
        options = {"max_running_requests": 6, "max_total_tokens": 400, "max_prefill_tokens": 6} | options
        driver = RunnerDriver(make_runner(CONFIG, lora, dtype="float32", attention_backend=backend, **options))
        if lora is not None:
            for slot, rank in ((1, 4), (2, 3)):
                driver.runner.load_adapter(slot, save_for_config(tmp_path / str(slot), CONFIG, rank=rank, seed=slot))
        return driver

    return make


def play(driver, adapters=ADAPTERS):
    """Prefill, chunk, mixed step and decodes; the tokens, and the logits of every step."""
    rng = np.random.default_rng(5)
    ids = {row: rng.integers(0, 99, length) for row, length in {1: 7, 2: 1, 3: 4, 4: 10, 5: 2}.items()}
    new = [driver.add(row, adapter=adapters[row]) for row in ids]
    tokens = [driver.extend({1: ids[1], 2: ids[2], 4: ids[4][:6]}, sampled=[True, True, False], new_rows=new)]
    tokens.append(driver.extend({2: None, 4: ids[4][6:], 3: ids[3], 1: None, 5: ids[5]}))
    for rows in ([5, 1, 3], [1, 2, 3, 4, 5], [4]):
        tokens.append(driver.decode(rows))
    return [step.tolist() for step in tokens], driver.logits


def test_tokens_and_logits_are_the_torch_paths(make_driver, monkeypatch):
    expected, expected_logits = play(make_driver("torch"))
    launched, launched_logits = play(make_driver("triton"))
    plain, plain_logits = play(make_driver("triton", lora=None), dict.fromkeys(ADAPTERS, 0))
    accelerator = FakeAccelerator(lag=3)
    use_fake(monkeypatch, accelerator, attention=None)
    replayed, replayed_logits = play(make_driver("triton", cuda_graph_max_bs=3))
    assert accelerator.num_replays == 2 and len(accelerator.recorded) == 3
    assert expected == launched == replayed != plain
    for want, launch, replay in zip(expected_logits, launched_logits, replayed_logits, strict=True):
        assert relative_error(launch, want) < 1e-4 and relative_error(replay, want) < 1e-4
    assert launched_logits[0][1].equal(plain_logits[0][1]), "row 2 has no adapter"


def test_fused_kernels_are_refused(make_driver):
    with pytest.raises(ValueError, match="--fuse-small-steps has no kernels for LoRA adapters"):
        make_driver("triton", fuse_small_steps=True)


def test_warm_up_steps_are_as_large_as_each_kernel_of_adapters_needs(make_driver):
    settings = dataclasses.replace(make_driver("triton").runner.settings, lora=LoraSize(1, 4))
    one, many = lora_row_counts(settings.dtype, settings.device)
    assert one == 1 and low_tile_tokens(settings, CONFIG) == [many - 1]
    assert low_tile_tokens(dataclasses.replace(settings, lora=None), CONFIG) == []


def test_memory_is_kept_for_steps_of_few_tokens(make_driver, monkeypatch):
    settings = make_driver("triton").runner.settings
    most = lora_row_counts(settings.dtype, settings.device)[1] - 1
    widest = lora_hidden_bytes(most, 64, 3 * 4, settings.dtype, settings.device)
    assert 0 < few_rows_bytes(settings, CONFIG) <= widest
    for changes in ({"lora": None}, {"attention_backend": "torch"}):
        assert few_rows_bytes(dataclasses.replace(settings, **changes), CONFIG) == 0
    accelerator = FakeAccelerator(lag=3)
    use_fake(monkeypatch, accelerator, attention=None)
    monkeypatch.setattr("tercet.model_executor.runner.load.few_rows_bytes", lambda *_: accelerator.memory().available)
    with pytest.raises(ValueError, match="--max-total-tokens 400 needs"):
        make_driver("triton", disable_cuda_graph=True)
