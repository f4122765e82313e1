"""The whole runner on Triton, launched and from graphs, gives the torch path's logits and tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import runners
import torch
from fake_accelerator import FakeAccelerator, use_fake
from meta_runner import launch_all, make_meta_runner
from runner_driver import RunnerDriver, relative_error
from saved_prefixes import logits_of_continued_prefixes
from triton.runtime import interpreter

from tercet.model_executor.kernels.rotary import rotary
from tercet.model_executor.layers import triton_layers
from tercet.model_executor.layers.kinds import TorchLayers, layers_for
from tercet.model_executor.layers.triton_layers import TritonLayers
from tercet.model_executor.runner.warmup import warmup_steps
from tercet.srt.model_files.delta_net_config import DeltaNetConfig
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import Llama3Scaling, RopeConfig
from tercet.srt.model_files.short_convolutions import ShortConvolutions

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=40,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=99,
    context_len=96,
    tie_word_embeddings=True,
    rope=RopeConfig(10000.0, Llama3Scaling(8.0, 1.0, 4.0, 32)),
)
QWEN = dataclasses.replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    num_layers=2,
    qk_norm="heads",
    num_heads=6,
    sliding_windows=(None, 4),
    rope=RopeConfig(5000.0),
)
LFM = dataclasses.replace(
    QWEN,
    architecture="Lfm2ForCausalLM",
    sliding_windows=(),
    convolutions=ShortConvolutions((0,), QWEN.hidden_size, 3),
)
QWEN35 = dataclasses.replace(
    QWEN,
    architecture="Qwen3_5ForCausalLM",
    sliding_windows=(),
    attention_gates="components",
    delta_net=DeltaNetConfig((0,), 1, 2, 8, 8, 3),
)
CONFIGS = pytest.mark.parametrize("config", [LLAMA, QWEN, LFM, QWEN35], ids=["llama", "qwen", "lfm", "qwen3.5"])


@pytest.fixture(autouse=True)
def short_warmup(monkeypatch):
    """The largest prefill is left out: interpreted, it takes longer than all the rest."""
    monkeypatch.setattr("tercet.model_executor.runner.load.warmup_steps", lambda *sizes: warmup_steps(*sizes)[1:])


def make_runner(config, backend, **options):
    return runners.make_runner(
        config,
        dtype="float32",
        max_running_requests=6,
        max_total_tokens=400,
        attention_backend=backend,
        max_prefill_tokens=6,
        **options,
    )


def play(driver):
    """Prefill, chunk, mixed step and decodes; the tokens, and the logits of every step."""
    rng = np.random.default_rng(5)
    ids = {row: rng.integers(0, 99, length) for row, length in {1: 7, 2: 1, 3: 4, 4: 10, 5: 2}.items()}
    new = [driver.add(row) for row in ids]
    tokens = [driver.extend({1: ids[1], 2: ids[2], 4: ids[4][:6]}, sampled=[True, True, False], new_rows=new)]
    tokens.append(driver.extend({2: None, 4: ids[4][6:], 3: ids[3], 1: None, 5: ids[5]}))
    for rows in ([5, 1, 3], [1, 2, 3, 4, 5], [4]):
        tokens.append(driver.decode(rows))
    return [step.tolist() for step in tokens], driver.logits


def test_layers_are_chosen_by_the_backend():
    assert type(layers_for("triton", torch.float32)) is TritonLayers
    assert type(layers_for("torch", torch.float32)) is TorchLayers


@CONFIGS
def test_tokens_and_logits_are_the_torch_paths(config, monkeypatch):
    # weights large enough that attention is far from uniform
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)
    config = dataclasses.replace(config, load_format="dummy")
    expected, expected_logits = play(RunnerDriver(make_runner(config, "torch")))
    launched, launched_logits = play(RunnerDriver(make_runner(config, "triton")))
    accelerator = FakeAccelerator(lag=3)
    use_fake(monkeypatch, accelerator, attention=None)
    runner = make_runner(config, "triton", cuda_graph_max_bs=3)
    replayed, replayed_logits = play(RunnerDriver(runner))
    assert accelerator.num_replays == 2 and len(accelerator.recorded) == 3
    assert expected == launched == replayed
    for want, launch, replay in zip(expected_logits, launched_logits, replayed_logits, strict=True):
        assert relative_error(launch, want) < 1e-4 and relative_error(replay, want) < 1e-4


def test_requests_continue_saved_prefixes(monkeypatch):
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)
    config = dataclasses.replace(QWEN35, load_format="dummy")
    continued, whole = logits_of_continued_prefixes(make_runner(config, "triton", max_saved_states=2))
    use_fake(monkeypatch, FakeAccelerator(lag=3), attention=None)
    runner = make_runner(config, "triton", cuda_graph_max_bs=3, max_saved_states=2)
    replayed, _ = logits_of_continued_prefixes(runner)
    assert relative_error(continued, whole) < 1e-4 and relative_error(replayed, whole) < 1e-4


def test_an_fp8_pool_computes_with_rounded_keys_and_values(monkeypatch):
    """The twin has a float32 pool, and rounds what it stores there."""
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.3)
    fp8 = RunnerDriver(make_runner(LLAMA, "triton", kv_cache_dtype="fp8_e4m3"))
    assert fp8.runner.kv_pool.k_buffer[0].dtype == torch.float8_e4m3fn
    assert fp8.runner.num_bytes.kv_pool == 400 * 2 * LLAMA.num_layers * LLAMA.num_kv_heads * LLAMA.head_dim
    tokens, logits = play(fp8)
    exact = play(RunnerDriver(make_runner(LLAMA, "triton")))[1]

    def rotary_and_round(qkv, num_heads, num_kv_heads, *cos_sin, slots, k_buffer, v_buffer, **options):
        rotary(qkv, num_heads, num_kv_heads, *cos_sin, slots=slots, k_buffer=k_buffer, v_buffer=v_buffer, **options)
        for buffer in (k_buffer, v_buffer):
            buffer[slots] = buffer[slots].to(torch.float8_e4m3fn).float()

    monkeypatch.setattr(triton_layers, "rotary", rotary_and_round)
    rounded_tokens, rounded_logits = play(RunnerDriver(make_runner(LLAMA, "triton")))
    assert tokens == rounded_tokens
    for found, want, unrounded in zip(logits, rounded_logits, exact, strict=True):
        assert relative_error(found, want) < 1e-5 < relative_error(found, unrounded)


def test_a_replay_follows_the_lengths_it_is_given(monkeypatch):
    """One graph for every length: rows of 1 and of 33 tokens, of one unit of work and of two."""
    accelerator = FakeAccelerator()
    use_fake(monkeypatch, accelerator, attention=None)
    drivers = [
        RunnerDriver(make_runner(LLAMA, "triton", disable_cuda_graph=disabled, cuda_graph_max_bs=2))
        for disabled in (False, True)
    ]
    for driver in drivers:
        ids = {1: [3], 2: list(range(33))}
        driver.extend(ids, new_rows=[driver.add(row) for row in ids])
    for rows in ([1, 2], [1], [2], [2, 1]):
        tokens = [driver.decode(rows).tolist() for driver in drivers]
        assert tokens[0] == tokens[1]
        assert torch.allclose(drivers[0].logits[-1], drivers[1].logits[-1], rtol=1e-4, atol=1e-5)
    assert accelerator.num_replays == 4


@CONFIGS
def test_a_launch_on_triton_waits_for_nothing(config, monkeypatch):
    """The wrappers of kernels, too, look at no value; the kernels themselves are not run."""
    launches = []
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: launches.append(self))
    runner, accelerator = make_meta_runner(monkeypatch, config, attention=None, attention_backend="triton")
    assert runner.attention.name == "triton"
    launch_all(runner, accelerator, with_masks=True)
    assert launches and accelerator.num_replays == 3
