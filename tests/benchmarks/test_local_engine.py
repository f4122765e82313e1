from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_models import tiny_flags
from runner_driver import RunnerDriver
from runners import make_runner
from tiny_convolution_configs import CONVOLUTION_CONFIGS
from tiny_latent_configs import LATENT_CONFIGS

from tercet.benchmarks.local_engine import DirectBatch, TimedEngine
from tercet.srt.server_args import ServerArgs


def make_engine(folder: Path, **settings: Any) -> TimedEngine:
    defaults = {"max_total_tokens": 400, "max_running_requests": 4, "page_size": 1}
    return TimedEngine(
        ServerArgs(
            model_path=tiny_flags(folder)[1],
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            **{**defaults, **settings},
        )
    )


@pytest.mark.parametrize("page_size", [1, 32])
def test_a_direct_batch_fills_the_pool_of_latent_attention(page_size: int, tmp_path: Path) -> None:
    """Values are parts of keys, whether the pool stores them or not."""
    LATENT_CONFIGS["youtu"]().save_pretrained(tmp_path)
    settings = {"model_path": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    made = TimedEngine(ServerArgs(**settings, max_total_tokens=512, max_running_requests=4, page_size=page_size))
    with DirectBatch.of(made, 2, 20, 3) as batch:
        assert batch.decode(3) > 0
        pool = made.runner.kv_pool
        k, v = pool.get_kv(0, torch.from_numpy(batch._table[batch.rows[0], :19].astype(np.int64)))
        assert k.any() and torch.equal(v, k[..., :64])


def test_a_direct_batch_fills_what_convolutions_read(tmp_path: Path) -> None:
    CONVOLUTION_CONFIGS["lfm2"]().save_pretrained(tmp_path)
    settings = {"model_path": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    made = TimedEngine(ServerArgs(**settings, max_total_tokens=512, max_running_requests=4))
    with DirectBatch.of(made, 2, 20, 3) as batch:
        assert batch.decode(3) > 0
        pool, slots = made.runner.kv_pool, torch.from_numpy(batch._table[batch.rows[0], :19].astype(np.int64))
        assert len(pool.k_buffer) == 1 and len(pool.conv_buffer) == 3
        assert all(tensor.all() for tensor in (*pool.get_kv(0, slots), *(stored[slots] for stored in pool.conv_buffer)))


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> TimedEngine:
    return make_engine(tmp_path, page_size=getattr(request, "param", 1))


@pytest.mark.parametrize("engine", [1, 16], indirect=True)
def test_a_direct_batch_computes_what_the_runner_does(engine: TimedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    random_ids = engine.random_ids
    monkeypatch.setattr(engine, "random_ids", lambda *args: given.append(random_ids(*args)) or given[-1])
    with DirectBatch.of(engine, 2, 20, 3) as batch:
        assert batch.prefill() > 0
        assert batch.decode(3) > 0
        tokens = np.stack(batch.tokens[1:])
    prompts = given[-1].reshape(2, 20)
    runner = make_runner(
        engine.model_config, max_running_requests=2, dtype="float32", max_total_tokens=100, random_seed=0
    )
    driver = RunnerDriver(runner)
    driver.extend({1: prompts[0], 2: prompts[1]}, new_rows=[driver.add(1), driver.add(2)])
    expected = np.stack([driver.decode([1, 2]) for _ in range(3)])
    np.testing.assert_array_equal(tokens, expected)


def test_everything_is_given_back(engine: TimedEngine) -> None:
    kv = engine.scheduler.kv
    with DirectBatch.of(engine, 4, 50, 2) as batch:
        assert kv.allocator.num_free < 400 - 4 * 50
        batch.decode(2)
    kv.audit([])
    assert kv.allocator.num_free == 400
    assert engine.run_decode(3, 10, 4).step_s > 0
    kv.audit([])


def test_the_cached_context_is_random_and_not_zero(engine: TimedEngine) -> None:
    with DirectBatch.of(engine, 1, 30, 0):
        slots = torch.from_numpy(engine.scheduler.kv.req_to_token_pool.req_to_token[1, :29].astype(np.int64))
        for layer in range(engine.model_config.num_layers):
            for kept in engine.runner.kv_pool.get_kv(layer, slots):
                assert kept.std() > 0.5


@pytest.mark.parametrize(
    ("batch_size", "num_tokens", "message"),
    [
        (5, 10, "batch 5 is more than --max-running-requests 4"),
        (1, 257, "257 tokens are more than the context of 256"),
        (4, 101, r"4 x 101 tokens are more than the KV pool's 400"),
    ],
)
def test_what_does_not_fit_is_refused(engine: TimedEngine, batch_size: int, num_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.check_room(batch_size, num_tokens)


def test_the_window_is_around_the_timed_steps_only(engine: TimedEngine) -> None:
    launched = []
    launch = engine.runner.launch
    engine.runner.launch = lambda step: launched.append(step.mode.value) or launch(step)  # type: ignore[method-assign]

    class Window:
        def __enter__(self) -> None:
            launched.append("open")

        def __exit__(self, *_: object) -> None:
            launched.append("close")

    engine.run_decode(2, 10, 5, Window)
    inside = launched[launched.index("open") + 1 : launched.index("close")]
    assert inside == ["decode"] * 5


def test_requests_that_decode_while_others_are_prefilled_do_not_end_too_soon(tmp_path: Path) -> None:
    """Each prompt takes a step, and three decode steps follow each, so the first request is nine tokens ahead."""
    engine = make_engine(tmp_path, max_prefill_tokens=20, chunked_prefill_size=20)
    time = engine.run_decode(4, 20, 4)
    assert time.step_s > 0 and 20 + 8 < time.context_len < 20 + 9 + 8 + 4
    engine.scheduler.kv.audit([])


def test_a_request_that_ends_is_told_and_costs_nothing_else(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_prefill_tokens=20, chunked_prefill_size=20)
    with pytest.raises(ValueError, match="request 0 ended before the last timed step"):
        engine.run_decode(4, 20, 70)
    assert not engine.has_unfinished()
    engine.scheduler.kv.audit([])
    assert engine.run_decode(4, 20, 4).step_s > 0


@pytest.mark.parametrize("engine", [16], indirect=True)
def test_room_is_counted_in_whole_pages(engine: TimedEngine) -> None:
    engine.check_room(4, 96)
    with pytest.raises(ValueError, match=r"4 x 97 tokens in pages of 16 are more than the KV pool's 400"):
        engine.check_room(4, 97)
