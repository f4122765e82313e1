"""Embeddings through the scheduler: the same bits in any schedule, with and without cached prefixes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from cpu_models import CONFIG, make_cpu_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from runners import make_runner
from scheduler_rig import Heard, Rig

from tercet.managers.req_pooling import ReqPooling
from tercet.model_executor import cpu_extension
from tercet.srt.io_struct import AbortFinish


def embedding(heard: Heard) -> np.ndarray:
    assert heard.last is not None and heard.ids == []
    return np.frombuffer(heard.last.embedding, np.float32)


def expected(prompt: list[int], pooling: str) -> list[float]:
    """FakeRunner's hidden state of a token is the token, its position and 1."""
    states = np.array([[token, place, 1] for place, token in enumerate(prompt)], np.float64)
    return (states[-1] if pooling == "last" else states.mean(0)).astype(np.float32).tolist()


poolings = st.sampled_from(["last", "mean", None])


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 24), st.lists(st.integers(0, 96), min_size=1, max_size=12), poolings),
        min_size=1,
        max_size=6,
    ),
    page=st.sampled_from([1, 4]),
    pool=st.sampled_from([64, 256]),
    chunk=st.sampled_from([4, 8, 64]),
    overlap=st.booleans(),
    mixed=st.booleans(),
)
def test_every_schedule_gives_the_same(requests, page, pool, chunk, overlap, mixed) -> None:
    rig = Rig(
        page_size=page,
        pool_size=pool,
        chunked_prefill_size=chunk,
        max_prefill_tokens=64,
        max_running=4,
        overlap=overlap,
        mixed=mixed,
        conservativeness=0.1,
    )
    for number, (common, own, pooling) in enumerate(requests):
        max_new = 12 if pooling is None else 0
        rig.add(str(number), [*range(common), *own], pooling=pooling, max_new_tokens=max_new)
    rig.run()
    for number, (common, own, pooling) in enumerate(requests):
        heard = rig.heard[str(number)]
        if pooling is None:
            assert heard.last is not None and heard.last.embedding is None and len(heard.ids) == 12
        else:
            assert embedding(heard).tolist() == expected([*range(common), *own], pooling)


@pytest.mark.parametrize(("pooling", "cached"), [("last", 29), ("mean", 0)])
def test_a_prefix_is_taken_from_the_cache_up_to_the_first_token_that_is_pooled(pooling, cached) -> None:
    rig = Rig()
    prompt = list(range(1, 31))
    rig.add("first", prompt)
    rig.run()
    rig.add("second", prompt, pooling=pooling, max_new_tokens=0)
    rig.run()
    assert rig.heard["second"].last.counts.cached_tokens == cached
    assert embedding(rig.heard["second"]).tolist() == expected(prompt, pooling)


def test_a_prompt_that_is_retracted_between_two_chunks_goes_on_where_it_was() -> None:
    one = ReqPooling("mean", 10)
    first = one.plan(5, 0, 4)
    assert (first.start, first.length, one.reusable_len) == (5, 4, 4)
    again = one.plan(0, 0, 10)  # after the retraction, without a cache: from the start
    assert (again.start, again.length, one.reusable_len) == (4, 6, 10)
    assert one.plan(0, 0, 10) is None


def test_an_aborted_request_has_no_embedding() -> None:
    rig = Rig(chunked_prefill_size=8, max_prefill_tokens=8)
    rig.add("a", list(range(20)), pooling="mean", max_new_tokens=0)
    rig.turn()
    rig.abort("a")
    rig.run()
    assert isinstance(rig.heard["a"].finish, AbortFinish) and rig.heard["a"].last.embedding is None


@functools.cache
def runner_of(backend: str):
    if backend == "cpu":
        return make_cpu_runner(max_running_requests=8, max_total_tokens=800)
    return make_runner(CONFIG, dtype="float32", attention_backend=backend, max_running_requests=8, max_total_tokens=800)


PROMPTS = [[(7 * number + 3 * place) % CONFIG.vocab_size for place in range(20 + 30 * number)] for number in range(4)]


def vectors(backend: str, pooling: str, order: list[int], chunk: int, *, together: bool) -> dict[int, np.ndarray]:
    rig = Rig(
        make_runner=lambda: runner_of(backend),
        vocab_size=CONFIG.vocab_size,
        pool_size=800,
        context_len=320,
        max_prefill_tokens=300,
        chunked_prefill_size=chunk,
    )
    for number in order:
        rig.add(str(number), PROMPTS[number], pooling=pooling, max_new_tokens=0)
        if not together:
            rig.run()
    rig.run()
    return {number: embedding(rig.heard[str(number)]) for number in order}


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_same_embedding_alone_in_a_batch_in_chunks_and_cached(backend, pooling) -> None:
    if backend == "cpu" and cpu_extension.load() is None:
        pytest.skip("no build of csrc/cpu for this processor")
    alone = vectors(backend, pooling, [0, 1, 2, 3], 300, together=False)
    for order, chunk, together in (([3, 0, 1, 2], 300, True), ([0, 1, 2, 3], 16, True), ([3, 2, 1, 0], 16, False)):
        again = vectors(backend, pooling, order, chunk, together=together)
        for number, vector in alone.items():
            assert vector.shape == (CONFIG.hidden_size,)
            if backend == "cpu":
                assert vector.tobytes() == again[number].tobytes()
            else:
                np.testing.assert_allclose(vector, again[number], atol=1e-5)
