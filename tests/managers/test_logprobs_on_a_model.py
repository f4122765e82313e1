"""The scheduler's log probabilities on a tiny model: those of one whole forward pass, however they are computed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from cpu_models import CONFIG, make_cpu_runner
from fake_accelerator import FakeAccelerator, use_fake
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_driver import RunnerDriver
from runners import make_runner
from scheduler_rig import Heard, Rig

from tercet.model_executor import cpu_extension
from tercet.srt.logprobs import LogprobOptions, Logprobs, NewLogprobs

VOCAB = CONFIG.vocab_size
WISH = LogprobOptions(logprob_start_len=0, top_logprobs_num=5, token_ids_logprob=[300, 7])
needs_kernels = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")


@functools.cache
def runner_of(backend: str):
    if backend == "cpu":
        return make_cpu_runner(max_running_requests=8, max_total_tokens=800)
    return make_runner(CONFIG, dtype="float32", attention_backend=backend, max_running_requests=8, max_total_tokens=800)


def reference(ids: list[int]) -> torch.Tensor:
    """log softmax behind every token, float64 [len(ids), vocab]: each beginning is a prompt of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tercet.model_executor.runner.load.make_accelerator", lambda device: None)
        return _reference(ids)


def _reference(ids: list[int]) -> torch.Tensor:
    runner = make_runner(
        CONFIG, dtype="float32", attention_backend="torch", max_running_requests=len(ids), max_total_tokens=4000
    )
    driver = RunnerDriver(runner)
    rows = range(1, len(ids) + 1)
    driver.extend({row: ids[:row] for row in rows}, new_rows=[driver.add(row) for row in rows])
    return driver.logits[0].double().log_softmax(-1)


def rig_of(backend: str, **options: object) -> Rig:
    """A rig on a model. A block of logits is small, so that a prompt needs several."""
    runner = runner_of(backend)
    runner._logprobs._block_rows = 7
    return Rig(
        make_runner=lambda: runner,
        vocab_size=VOCAB,
        pool_size=800,
        context_len=320,
        **{"max_prefill_tokens": 200} | options,
    )


def run(rig: Rig, prompt: list[int], wish: LogprobOptions, rid: str = "r", **sampling: object) -> Heard:
    rig.add(rid, prompt, logprobs=wish, temperature=0.8, max_new_tokens=6, **sampling)
    rig.run()
    return rig.heard[rid]


def arrays(found: Logprobs, wish: LogprobOptions) -> tuple[np.ndarray, ...]:
    n = len(found)
    return (
        np.frombuffer(found.own, np.float32),
        np.frombuffer(found.top, np.float32).reshape(n, wish.top_logprobs_num),
        np.frombuffer(found.top_ids, np.int32).reshape(n, wish.top_logprobs_num).copy(),
        np.frombuffer(found.asked, np.float32).reshape(n, len(wish.token_ids_logprob)),
    )


def check(heard: Heard, prompt: list[int], wish: LogprobOptions, expected: torch.Tensor) -> None:
    """`expected`: the reference for prompt and output."""
    got = NewLogprobs.joined(heard.logprobs)
    ids = [*prompt, *heard.ids]
    start = wish.input_start(len(prompt))
    for found, first, last in (
        (got.input, min(start + 1, len(prompt)), len(prompt)),
        (got.output, len(prompt), len(ids)),
    ):
        own, top, top_ids, asked = arrays(found, wish)
        assert len(own) == last - first
        for line, place in enumerate(range(first, last)):
            row = expected[place - 1]
            assert abs(own[line] - row[ids[place]]) < 1e-4
            np.testing.assert_allclose(top[line], row[top_ids[line]], atol=1e-4)
            np.testing.assert_allclose(top[line], row.topk(wish.top_logprobs_num).values, atol=1e-4)
            np.testing.assert_allclose(asked[line], row[wish.token_ids_logprob], atol=1e-4)


PROMPT = np.random.default_rng(3).integers(0, VOCAB, 75).tolist()


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernels)])
@settings(max_examples=10, deadline=None)
@given(
    start=st.integers(-1, len(PROMPT)),
    num_cached=st.sampled_from([0, 30, 74]),
    chunk=st.sampled_from([1, 16, 33, 200]),
    sampling=st.sampled_from([{}, {"repetition_penalty": 1.7, "logit_bias": {"9": 5.0}}, {"top_k": 2}]),
)
def test_any_start_chunk_and_cached_prefix_gives_the_reference(backend, start, num_cached, chunk, sampling) -> None:
    rig = rig_of(backend, chunked_prefill_size=chunk)
    if num_cached:
        rig.add("before", PROMPT[: num_cached + 1], max_new_tokens=1)
        rig.run()
    wish = LogprobOptions(logprob_start_len=start, top_logprobs_num=5, token_ids_logprob=[300, 7])
    heard = run(rig, PROMPT, wish, **sampling)
    reusable = start if 0 <= start < len(PROMPT) - 1 else len(PROMPT) - 1
    assert heard.last.counts.cached_tokens == min(num_cached + 1 if num_cached else 0, reusable)
    check(heard, PROMPT, wish, reference([*PROMPT, *heard.ids]))


@needs_kernels
def test_cached_prefixes_chunks_and_neighbours_change_no_bit() -> None:
    alone = NewLogprobs.joined(run(rig_of("cpu"), PROMPT, WISH).logprobs)
    for start, chunk in ((0, 200), (0, 11), (40, 200), (40, 3)):
        rig = rig_of("cpu", chunked_prefill_size=chunk, mixed=True)
        rig.add("before", PROMPT[:60], temperature=0.8, max_new_tokens=40)  # its decode steps join later chunks
        for _ in range(30):
            rig.turn()
        wish = LogprobOptions(logprob_start_len=start, top_logprobs_num=5, token_ids_logprob=[300, 7])
        rig.add("beside", PROMPT[:20], temperature=0.8, max_new_tokens=6, logprobs=LogprobOptions(top_logprobs_num=1))
        heard = run(rig, PROMPT, wish)
        got = NewLogprobs.joined(heard.logprobs)
        assert got.output == alone.output
        for mine, its in zip(arrays(got.input, WISH), arrays(alone.input, WISH), strict=True):
            assert np.array_equal(mine, its[start:])


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernels)])
def test_prompts_of_one_step_want_different_things(backend) -> None:
    rig = rig_of(backend)
    wishes = {"a": WISH, "b": None, "c": LogprobOptions(logprob_start_len=9, top_logprobs_num=2), "d": LogprobOptions()}
    prompts = {name: PROMPT[place * 9 : place * 9 + 30] for place, name in enumerate(wishes)}
    for name, wish in wishes.items():
        rig.add(name, prompts[name], logprobs=wish, temperature=0.8, max_new_tokens=5)
    rig.turn()
    assert len(rig.scheduler.queues.running) == len(wishes)
    rig.run()
    for name, wish in wishes.items():
        if wish is not None:
            check(rig.heard[name], prompts[name], wish, reference([*prompts[name], *rig.heard[name].ids]))
    assert rig.heard["b"].logprobs == []


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gpu_whose_copies_are_late(overlap, monkeypatch) -> None:
    """Results of a step arrive while later steps run, and decode steps are replayed from graphs."""
    accelerator = FakeAccelerator(lag=4)
    use_fake(monkeypatch, accelerator)
    runner = make_runner(CONFIG, dtype="float32", max_running_requests=4, max_total_tokens=800)
    prompts = {name: PROMPT[place : place + 30] for place, name in enumerate("abc")}
    rig = Rig(
        make_runner=lambda: runner,
        vocab_size=VOCAB,
        pool_size=800,
        context_len=320,
        chunked_prefill_size=16,
        overlap=overlap,
    )
    for name, prompt in prompts.items():
        rig.add(name, prompt, logprobs=None if name == "b" else WISH, temperature=0.8, max_new_tokens=12)
    rig.run()
    assert accelerator.num_replays > 0 and rig.heard["b"].logprobs == []
    for name in "ac":
        check(rig.heard[name], prompts[name], WISH, reference([*prompts[name], *rig.heard[name].ids]))


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernels)])
def test_those_who_do_not_ask_get_none_and_start_no_computation(backend, monkeypatch) -> None:
    rig = rig_of(backend)
    run(rig, PROMPT, WISH, "asks")  # its row has a new owner afterwards
    logprobs = rig.runner._logprobs
    monkeypatch.setattr(logprobs, "_method", None)
    monkeypatch.setattr(logprobs, "of_prompts", None)
    rig.add("does not", PROMPT[:9])
    rig.run()
    assert rig.heard["does not"].logprobs == [] and len(rig.heard["does not"].ids) == 8
