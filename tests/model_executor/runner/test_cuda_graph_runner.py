"""Decode steps from recorded graphs: the same tokens as without, padding that touches nobody, room for the work."""

from __future__ import annotations

import dataclasses
import logging
import weakref

import numpy as np
import pytest
import torch
from fake_accelerator import FakeAccelerator, RecordableAttention, use_fake
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_driver import RunnerDriver
from toy_runner import TOY, make_toy_runner

from tercet.model_executor.device.memory import Memory
from tercet.model_executor.runner import load
from tercet.model_executor.runner.cuda_graph_runner import batch_sizes, max_work_lens
from tercet.model_executor.runner.warmup import warmup_steps
from tercet.model_executor.step import ForwardMode, StepInputs
from tercet.srt.sampling_params import SamplingParams


@pytest.fixture
def make_runner(monkeypatch):
    """A runner that believes to be on a GPU."""

    def make(accelerator=None, config=TOY, **options):
        accelerator = accelerator or FakeAccelerator(lag=3)
        use_fake(monkeypatch, accelerator)
        runner = make_toy_runner(config, **({"max_running_requests": 11, "max_total_tokens": 512} | options))
        runner.fake = accelerator
        return runner

    return make


def test_the_memory_for_the_pool_is_what_is_left_beside_a_model(make_runner, monkeypatch):
    """The model that is measured has tables as large as those of the model that serves, and is freed before it."""
    made, seen = [], []
    build, accelerator = load._RunnerBuilder._build, FakeAccelerator(lag=3)
    free = accelerator.memory()

    def note(what):
        seen.append((what, [model() is not None for model in made]))

    def noted_build(builder, pool_tokens):
        note("build")
        runner = build(builder, pool_tokens)
        made.append(weakref.ref(runner.model))
        return runner

    monkeypatch.setattr(load._RunnerBuilder, "_build", noted_build)
    accelerator.memory = lambda: note("memory") or free
    make_runner(accelerator, cuda_graph_max_bs=1)
    before_loading, *others = seen
    assert before_loading == ("memory", [])
    assert others[:4] == [("build", []), ("memory", [True]), ("memory", [True]), ("build", [False])]


def test_a_start_says_why_it_takes_long(make_runner, caplog):
    caplog.set_level(logging.INFO)
    make_runner(cuda_graph_max_bs=1)
    assert "a first start compiles kernels" in caplog.text


def test_batch_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert batch_sizes(160) == [1, 2, 4, *range(8, 129, 8), 144, 160]
    for largest in range(1, 400):
        sizes = batch_sizes(largest)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    # Padding is never more than half of a small batch, and an eighth of a large one.
    sizes = np.array(batch_sizes(512))
    for count in range(1, 513):
        size = sizes[sizes >= count][0]
        assert size - count < (max(2, size / 2) if size <= 16 else 16)


@given(st.data(), st.integers(1, 40), st.integers(1, 300), st.integers(2, 200), st.integers(1, 70))
def test_requests_that_share_nothing_always_fit(data, size, pool_tokens, context_len, split):
    room = max_work_lens(size, pool_tokens, context_len)
    assert room.shape == (size,) and room.dtype == np.int32 and room.min() >= 1 and room.max() <= context_len

    def work(lens):
        return int((-(-np.asarray(lens) // split)).sum())

    left, lens = pool_tokens, []
    for _ in range(data.draw(st.integers(1, size))):
        if left == 0:
            break
        lens.append(data.draw(st.integers(1, min(left, context_len))))
        left -= lens[-1]
    padding = size - len(lens)
    # Where a split is a small part of the context, as on any GPU; else a few steps may run without their graph.
    if 4 * split <= context_len:
        assert work(lens) + padding <= work(room)


def play(driver, seed, num_steps=14):
    """Random prefills and decodes; the tokens, by step."""
    rng = np.random.default_rng(seed)
    sampling = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=9, repetition_penalty=1.2))
    tokens = []
    for _ in range(num_steps):
        idle = [row for row in range(1, driver.runner.settings.max_running_requests + 1) if row not in driver.lens]
        if idle and rng.random() < 0.4:
            rows = rng.permutation(idle)[: rng.integers(1, 4)].tolist()
            prompts = {row: rng.integers(0, 99, rng.integers(1, 20)) for row in rows}
            new = [driver.add(row, sampling[rng.integers(2)]) for row in rows]
            tokens.append(driver.extend(prompts, new_rows=new).tolist())
        elif driver.lens:
            rows = rng.permutation(sorted(driver.lens))[: rng.integers(1, len(driver.lens) + 1)].tolist()
            tokens.append(driver.decode(rows).tolist())
    return tokens


def state(runner, table):
    """All that a step leaves behind, but for the dummy slot."""
    buffers = [*runner.kv_pool.k_buffer, *runner.kv_pool.v_buffer]
    return [runner.future_tokens, torch.from_numpy(table), *(buffer[1:] for buffer in buffers)]


@pytest.mark.parametrize("window", [None, 5])
def test_tokens_are_those_of_a_run_without_graphs(window, make_runner):
    config = dataclasses.replace(TOY, sliding_windows=(None, window))
    for seed in range(6):
        tokens, states = [], []
        for disabled in (False, True):
            runner = make_runner(config=config, disable_cuda_graph=disabled)
            driver = RunnerDriver(runner, seed)
            tokens.append(play(driver, seed))
            assert (runner.fake.num_replays > 0) is not disabled
            states.append(state(runner, driver.table))
            # What the device knows of a row's slots is what the host does, and the dummy's row is untouched.
            for row, length in driver.lens.items():
                assert runner.table.tensor[row, :length].tolist() == driver.table[row, :length].tolist()
            assert not runner.table.tensor[0].any()
        assert tokens[0] == tokens[1]
        for graphed, plain in zip(*states, strict=True):
            assert torch.equal(graphed.nan_to_num(-1), plain.nan_to_num(-1)), "graphs change no bit"


def test_every_batch_size_has_its_graph_and_padding_touches_nobody(make_runner):
    runner = make_runner(max_running_requests=20, max_total_tokens=800)
    driver = RunnerDriver(runner)
    rng = np.random.default_rng(1)
    driver.extend(
        {row: rng.integers(0, 99, row) for row in range(1, 21)}, new_rows=[driver.add(r) for r in range(1, 21)]
    )
    assert runner.fake.num_replays == 0
    for count in range(1, 21):
        rows = rng.permutation(np.arange(1, 21))[:count].tolist()
        kept = [tensor.clone() for tensor in (*state(runner, driver.table), runner.table.tensor)]
        before = driver.table.copy()
        driver.decode(rows)
        written = np.nonzero(driver.table != before)
        assert len(written[0]) == count and set(written[0].tolist()) == set(rows)
        slots = torch.from_numpy(driver.table[written]).long()
        future, _, *buffers, table = (*state(runner, driver.table), runner.table.tensor)
        others = [row for row in range(21) if row not in rows]
        assert torch.equal(future[others], kept[0][others])
        assert torch.equal(table[others], kept[-1][others])
        for buffer, old in zip(buffers, kept[2:-1], strict=True):
            untouched = torch.ones(len(buffer), dtype=torch.bool)
            untouched[slots - 1] = False
            assert torch.equal(buffer[untouched].nan_to_num(-1), old[untouched].nan_to_num(-1))
            assert buffer[slots - 1].isfinite().all()
    assert runner.fake.num_replays == 20


def test_steps_that_no_graph_holds_run_without(make_runner):
    runner = make_runner(cuda_graph_max_bs=3, max_total_tokens=128)
    driver = RunnerDriver(runner)
    driver.extend({row: [row, 5] for row in range(1, 6)}, new_rows=[driver.add(row) for row in range(1, 6)])
    driver.decode([1, 2, 3, 4])
    assert runner.fake.num_replays == 0
    driver.decode([3, 1])
    assert runner.fake.num_replays == 1
    assert runner._recorded.max_rows == 3


def test_more_work_than_a_graph_has_room_for_is_launched_as_large(make_runner):
    """Long requests that share their prefixes can be more work than the pool has tokens; padding counts, too."""
    runner = make_runner(max_total_tokens=32, context_length=32, max_running_requests=8)
    # twice the pool in 2 requests of the context's length, and 6 of one token: 2 * 4 + 6 units
    assert runner._recorded._room[8] == 14
    runner.table.tensor.fill_(1)
    for lens, replays in (([16] * 5, 1), ([17, 17, 17, 16, 8], 0), ([17, 17, 17, 8], 1), ([32] * 8, 0)):
        count = len(lens)  # units: 10 and 3 of padding; 12 and 3; 10 at size 4, whose room that is; 32
        before = runner.fake.num_replays
        rows, slots = np.arange(1, count + 1, dtype=np.int32), np.ones(count, np.int32)
        runner.launch(StepInputs(ForwardMode.DECODE, rows, np.array(lens, np.int32), slots)).sample()
        assert runner.fake.num_replays - before == replays, lens


def test_a_backend_that_cannot_be_recorded_runs_without(monkeypatch):
    class Unrecordable(RecordableAttention):
        def num_splits(self, seq_lens):
            return None

    use_fake(monkeypatch, FakeAccelerator(), Unrecordable)
    runner = make_toy_runner(max_total_tokens=64)
    assert runner._recorded is None and runner.num_bytes.graphs == 0
    driver = RunnerDriver(runner)
    driver.extend({1: [1, 2]}, new_rows=[driver.add(1)])
    driver.decode([1])


def test_memory_is_left_for_steps_and_graphs(make_runner):
    accelerator = FakeAccelerator(memory=Memory(total=1 << 30, available=1 << 29))
    runner = make_runner(accelerator, max_total_tokens=None, max_running_requests=8)
    per_token = 2 * 2 * 2 * 8 * 4
    steps = decodes = 1 << 20  # what the stand-in says that any work takes
    edits = 8 * 99 * 4 * 3 + runner.sampler._sampling.edit_bytes(8)
    reserve = steps + decodes + edits + 4 * (8 << 20)
    assert runner.max_total_num_tokens == ((1 << 29) - reserve - int((1 << 30) * 0.02)) // per_token
    without = make_runner(accelerator, max_total_tokens=None, max_running_requests=8, disable_cuda_graph=True)
    assert without.max_total_num_tokens - runner.max_total_num_tokens == 4 * (8 << 20) // per_token


def test_the_step_before_may_still_be_running(make_runner):
    """Launched one after the other, read late: no pinned memory is overwritten, and nothing is waited for."""
    runner = make_runner(FakeAccelerator(lag=40))
    driver = RunnerDriver(runner)
    tokens = driver.extend({1: [1, 2], 2: [3]}, new_rows=[driver.add(1), driver.add(2)])
    waits = runner.fake.num_waits
    results, expected = [], []
    for _ in range(10):
        slots = np.concatenate([driver._grow(row, 1) for row in (1, 2)]).astype(np.int32)
        lens = np.array([driver.lens[1], driver.lens[2]], np.int32)
        results.append(runner.launch(StepInputs(ForwardMode.DECODE, np.array([1, 2], np.int32), lens, slots)))
        results[-1].sample()
        expected.append(runner.future_tokens[1:3].tolist())
    assert runner.fake.num_waits == waits
    assert [result.wait().tokens.tolist() for result in results] == expected
    assert len(tokens) == 2


@settings(max_examples=30)
@given(st.integers(1, 200), st.integers(1, 5000), st.integers(1, 3000))
def test_rehearsed_steps_are_steps(num_rows, context_len, max_prefill_tokens):
    for step in warmup_steps(num_rows, context_len, max_prefill_tokens):
        assert step.num_tokens == step.extend_lens.sum() == len(step.input_ids)
        assert (step.extend_lens >= 1).all() and step.seq_lens.max() <= context_len
        assert set(step.rows.tolist()) <= set(range(1, num_rows + 1))
        assert len(step.new_rows) == len(step.rows) and not step.out_cache_loc.any()
    most = warmup_steps(num_rows, context_len, max_prefill_tokens)[0]
    wanted = min(max_prefill_tokens, num_rows * context_len)
    assert wanted - len(most.rows) < most.num_tokens <= wanted
