"""The sampler on kernels chooses the tokens that the sampler in plain torch does, of every kind of request at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tercet.model_executor.sampling.newest_tokens import NewestTokens
from tercet.model_executor.sampling.sampler import Sampler
from tercet.model_executor.step import INVALID_TOKEN, NewRow
from tercet.srt.sampling_params import SamplingParams

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {},
    {"temperature": 0.6, "min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1.0, "top_p": 0.9},
    {"top_k": 3},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.7},
    {"top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.02, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {"5": 3.0}},
)
VOCAB_SIZE = 120


def make_samplers(kinds):
    samplers = [Sampler(len(kinds), VOCAB_SIZE, "cpu", use_kernels=use_kernels) for use_kernels in (False, True)]
    for sampler in samplers:
        for index, kind in enumerate(kinds):
            none, prompt = np.empty(0, np.int32), np.array([3, 9, 5], np.int32)
            sampler.set_row(NewRow(index + 1, SamplingParams(**kind), 11 * index, prompt, none, ()))
    return samplers


def chosen_and_stored(sampler, logits, rows, lens):
    """The tokens, and the newest token of each row after them."""
    newest = NewestTokens(torch.full((len(KINDS) + 1,), 7), torch.from_numpy(rows.astype(np.int64)))
    tokens = sampler.sample(logits, rows, lens, None, newest)
    return tokens.tolist(), newest.tokens[1:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_torch_samplers(dtype):
    samplers = make_samplers(KINDS)
    rng = torch.Generator().manual_seed(4)
    for step in range(2):
        logits = (torch.randn(len(KINDS), VOCAB_SIZE, generator=rng) * 2).to(dtype)
        order = torch.randperm(len(KINDS), generator=rng).numpy()
        rows, lens = (order + 1).astype(np.int32), np.full(len(KINDS), 3 + step, np.int32)
        plain, kernels = (chosen_and_stored(sampler, logits[order], rows, lens) for sampler in samplers)
        assert plain == kernels


def test_greedy_alone_and_broken_rows():
    samplers = make_samplers(KINDS)
    logits = torch.randn(len(KINDS), VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    logits[1::2, 7] = torch.nan
    logits[4] = -torch.inf
    rows = np.arange(1, len(KINDS) + 1, dtype=np.int32)
    for chosen in (slice(0, 2), slice(None)):
        n = len(rows[chosen])
        lens = np.full(n, 3, np.int32)
        plain, kernels = (chosen_and_stored(sampler, logits[chosen], rows[chosen], lens) for sampler in samplers)
        assert plain == kernels
        tokens, newest = kernels
        assert newest == [max(token, 0) for token in tokens] + [7] * (len(KINDS) - n)
        assert [token == INVALID_TOKEN for token in tokens] == [i % 2 == 1 or i == 4 for i in range(n)]
