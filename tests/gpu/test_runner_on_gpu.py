"""The runner on a real GPU: nothing waits, graphs change nothing, the tokens are the CPU's."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from gpu_runners import LLAMA, make_runner, play
from meta_runner import every_kind_of_step
from runner_driver import RunnerDriver, relative_error

from tercet.model_executor.runner import host_kv
from tercet.model_executor.step import ForwardMode, KVCopies, StepInputs
from tercet.model_executor.weights import loader
from tercet.srt.model_files.short_convolutions import ShortConvolutions

pytestmark = pytest.mark.gpu

QWEN = dataclasses.replace(
    LLAMA, architecture="Qwen3ForCausalLM", qk_norm="heads", head_dim=128, sliding_windows=(None, 300, None)
)
LFM = dataclasses.replace(
    LLAMA, architecture="Lfm2ForCausalLM", qk_norm="heads", convolutions=ShortConvolutions((0, 2), LLAMA.hidden_size, 3)
)
CONFIGS = pytest.mark.parametrize("config", [LLAMA, QWEN, LFM], ids=["llama", "qwen", "lfm"])


@pytest.fixture(autouse=True)
def visible_attention(monkeypatch):
    """Random weights so large that attention is far from uniform."""
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.1)


@contextmanager
def waiting_is_an_error():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@CONFIGS
@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_no_launch_waits(config, disable_cuda_graph):
    runner = make_runner(config, disable_cuda_graph=disable_cuda_graph)
    for _ in range(3):
        results = []
        with waiting_is_an_error():
            for step in every_kind_of_step():
                results.append((runner.launch(step), step.num_sampled))
                results[-1][0].sample()
        for result, count in results:
            assert len(result.wait().tokens) == count


@CONFIGS
@pytest.mark.parametrize("page_size", [None, 1])
def test_graphs_change_no_token_and_no_logit(config, page_size):
    options = {"page_size": page_size}
    drivers = [RunnerDriver(make_runner(config, disable_cuda_graph=disabled, **options)) for disabled in (False, True)]
    assert drivers[0].runner.num_bytes.graphs >= 0 and drivers[1].runner.num_bytes.graphs == 0
    tokens = [play(driver) for driver in drivers]
    assert tokens[0] == tokens[1]
    for graphed, plain in zip(drivers[0].logits, drivers[1].logits, strict=True):
        assert torch.equal(graphed, plain)


@CONFIGS
@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_dependent_launches_change_no_token_and_no_logit(config, disable_cuda_graph):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("dependent launches need compute capability 9.0")
    fused = {"fuse_small_steps": True, "disable_cuda_graph": disable_cuda_graph, "dtype": "bfloat16"}
    drivers = [RunnerDriver(make_runner(config, dependent_launch=dependent, **fused)) for dependent in (False, True)]
    for _ in range(5):  # a kernel that starts too early does not always read too early
        tokens = [play(driver) for driver in drivers]
        assert tokens[0] == tokens[1]
        for plain, dependent in zip(drivers[0].logits, drivers[1].logits, strict=True):
            assert torch.equal(plain, dependent)


@pytest.fixture
def weights_of_a_cpu(monkeypatch):
    """The random weights of every device are those of a CPU. A seed gives other numbers on a GPU."""
    draw = loader._dummy

    def drawn_on_a_cpu(config, dtypes, device, *rest):
        return {name: tensor.to(device) for name, tensor in draw(config, dtypes, torch.device("cpu"), *rest).items()}

    monkeypatch.setattr(loader, "_dummy", drawn_on_a_cpu)


@CONFIGS
@pytest.mark.usefixtures("weights_of_a_cpu")
def test_logits_are_the_cpus(config):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 4099, 400)
    on_gpu = RunnerDriver(make_runner(config, dtype="float32", max_running_requests=4))
    on_cpu = RunnerDriver(make_runner(config, device="cpu", dtype="float32", max_running_requests=4))
    chunks = [100, 1, 250]
    found, expected = (driver.logits_along(1, ids, chunks) for driver in (on_gpu, on_cpu))
    assert found.keys() == expected.keys() and len(found) > 50
    for position, logits in expected.items():
        assert relative_error(found[position].cpu(), logits) < 1e-3, position


@pytest.mark.usefixtures("weights_of_a_cpu")
def test_graphs_read_new_weights(monkeypatch):
    runner = make_runner(LLAMA, max_running_requests=4)
    monkeypatch.setattr(loader, "_DUMMY_STD", 0.05)
    runner.weights.update(LLAMA)
    fresh = make_runner(LLAMA, max_running_requests=4)
    found, expected = (RunnerDriver(one).logits_along(1, range(3, 40), [30]) for one in (runner, fresh))
    assert found.keys() == expected.keys() and len(found) == 8
    assert all(torch.equal(found[position], logits) for position, logits in expected.items())


def test_pages_come_back_from_host_memory(monkeypatch):
    """All pages of the pool, in more batches than the device has memory for. Nothing waits for them."""
    monkeypatch.setattr(host_kv, "_BATCH_BYTES", 1 << 20)
    runner = make_runner(LLAMA, enable_hierarchical_cache=True, hicache_size=0.05)
    pool, rng, none = runner.kv_pool, np.random.default_rng(0), np.empty(0, np.int32)
    buffers = [buffer.view(torch.int16) for buffer in (*pool.k_buffer, *pool.v_buffer)]
    for buffer in buffers:
        buffer.random_()
    before = [buffer.clone() for buffer in buffers]
    num_pages, num_host = pool.size // pool.page_size, runner.host_kv.memory.nbytes // pool.page_bytes
    pages = rng.permutation(num_pages).astype(np.int32) + 1
    host = np.sort(rng.permutation(num_host)[:num_pages]).astype(np.int32)
    steps = []
    with waiting_is_an_error():
        for copies in (KVCopies(pages, host, none, none), KVCopies(none, none, host, pages)):
            steps.append(runner.launch(StepInputs(ForwardMode.DECODE, none, none, none, kv_copies=copies)))
            steps[-1].sample()
            if len(steps) == 1:
                for buffer in buffers:
                    buffer[pool.page_size :].zero_()
    for step in steps:
        assert len(step.wait().tokens) == 0
    for found, expected in zip(buffers, before, strict=True):
        assert torch.equal(found, expected)


def test_many_steps_may_be_launched_before_a_token_is_read():
    runner = make_runner(LLAMA)
    driver = RunnerDriver(runner)
    rows = list(range(1, 21))
    driver.extend({row: [row, row + 1] for row in rows}, new_rows=[driver.add(row) for row in rows])
    steps = []
    for _ in range(100):
        slots = np.concatenate([driver._grow(row, 1) for row in rows]).astype(np.int32)
        lens = np.array([driver.lens[row] for row in rows], np.int32)
        steps.append(StepInputs(ForwardMode.DECODE, np.array(rows, np.int32), lens, slots))
    with waiting_is_an_error():
        results = []
        for step in steps:
            results.append(runner.launch(step))
            results[-1].sample()
    tokens = np.stack([result.wait().tokens for result in results])
    assert tokens.min() >= 0 and tokens[-1].tolist() == runner.future_tokens[1:21].tolist()
    again = RunnerDriver(make_runner(LLAMA))
    again.extend({row: [row, row + 1] for row in rows}, new_rows=[again.add(row) for row in rows])
    assert tokens.tolist() == [again.decode(rows).tolist() for _ in range(100)]
