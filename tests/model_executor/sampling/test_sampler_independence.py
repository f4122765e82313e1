"""A request's tokens are its own: the same bits whatever the batch, the row, the order, or a retraction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import new_row

from tercet.model_executor.sampling import block_sampling, token_choice
from tercet.model_executor.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("each_cpu_choice")

VOCAB_SIZE = 1003
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
        "top_k": st.sampled_from([-1, 1, 2, 50, 700]),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 0.5),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "min_new_tokens": st.integers(0, 8),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1).map(str), st.floats(-5, 5), max_size=4),
    },
)
REQUESTS = st.lists(st.tuples(PARAMS, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=12)


def steps_of_logits(requests: int, steps: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[steps, requests, vocab]"""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(steps, requests, VOCAB_SIZE, generator=generator) * 3).to(dtype)


def place(sampler: Sampler, row: int, request: tuple[dict[str, Any], int], output: list[int]) -> None:
    params, seed = request
    sampler.set_row(new_row(row, seed, prompt=(5, 9, 5), output=tuple(output), stops=(0, 7), **params))


def generate_alone(request: tuple[dict[str, Any], int], logits: torch.Tensor) -> list[int]:
    sampler = Sampler(1, VOCAB_SIZE, "cpu")
    place(sampler, 1, request, [])
    one = np.ones(1, np.int32)
    return [int(sampler.sample(line[None], one, one * (3 + i))) for i, line in enumerate(logits)]


@settings(max_examples=60)
@given(
    requests=REQUESTS,
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_a_row_alone_and_in_any_batch(
    requests: list[tuple[dict[str, Any], int]], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    n, steps = len(requests), 3
    logits = steps_of_logits(n, steps, seed, dtype)
    rows = np.array(data.draw(st.permutations(range(1, 13)))[:n], np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sampling, "BLOCK_ELEMENTS", data.draw(st.sampled_from([1, 3000, 2**22])))
        patch.setattr(token_choice, "CPU_WIDTHS", data.draw(st.sampled_from([(), (3, 40), (256, 4096)])))
        sampler = Sampler(12, VOCAB_SIZE, "cpu")
    for row, request in zip(rows, requests, strict=True):
        place(sampler, int(row), request, [])
    together: list[list[int]] = [[] for _ in requests]
    for step in range(steps):
        order = np.array(data.draw(st.permutations(range(n))), np.int64)
        tokens = sampler.sample(logits[step, order], rows[order], np.full(n, 3 + step, np.int32))
        for i, token in zip(order, tokens.tolist(), strict=True):
            together[i].append(token)
    assert together == [generate_alone(request, logits[:, i]) for i, request in enumerate(requests)]


@settings(max_examples=40)
@given(request=REQUESTS.map(lambda requests: requests[0]), cut=st.integers(1, 5), seed=st.integers(0, 1000))
def test_a_retracted_request_continues_as_if_nothing_happened(
    request: tuple[dict[str, Any], int], cut: int, seed: int
) -> None:
    logits = steps_of_logits(1, 6, seed, torch.float32)[:, 0]
    expected = generate_alone(request, logits)
    sampler = Sampler(3, VOCAB_SIZE, "cpu")
    # Somebody else had the row in between, with every parameter set.
    other = {"temperature": 2.0, "top_k": 9, "repetition_penalty": 2.0, "logit_bias": {"3": 100.0}}
    place(sampler, 2, (other, 1), [4, 4, 4])
    two = np.full(1, 2, np.int32)
    sampler.sample(logits[:1], two, two)
    place(sampler, 2, request, expected[:cut])
    rest = [int(sampler.sample(logits[i, None], two, np.array([3 + i], np.int32))) for i in range(cut, 6)]
    assert rest == expected[cut:]


def test_seeds_and_positions_make_a_difference() -> None:
    flat = torch.zeros(50, VOCAB_SIZE)
    sampler = Sampler(50, VOCAB_SIZE, "cpu")
    for row in range(1, 51):
        sampler.set_row(new_row(row, seed=row))
    rows = np.arange(1, 51, dtype=np.int32)
    by_seed = sampler.sample(flat, rows, np.full(50, 8, np.int32)).tolist()
    by_position = sampler.sample(flat, np.ones(50, np.int32), np.arange(50, dtype=np.int32)).tolist()
    assert len(set(by_seed)) > 40
    assert len(set(by_position)) > 40
