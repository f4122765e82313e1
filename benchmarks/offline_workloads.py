"""Workloads of random token ids, for benchmarks without a server."""

from __future__ import annotations

import random
from typing import NamedTuple

from .workloads import Request

_MAX_ID = 10_000


class Span(NamedTuple):
    """A range of lengths. A length is drawn uniformly from [low, high]."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """Parses "512" or "100-1024". Raises ValueError."""
        low, _, high = text.partition("-")
        span = cls(int(low), int(high or low))
        if not 1 <= span.low <= span.high:
            raise ValueError(f"a length must be N or LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}")
        return span


def random_requests(num_prompts: int, inputs: Span, outputs: Span, seed: int, vocab_size: int) -> list[Request]:
    """Requests with random prompts of ids in [0, 10000] that are below the vocabulary size.

    Numbers are drawn from Python's generator in the usual order of this workload: each prompt's length and then its
    ids, and all output lengths at the end. So a seed gives the same token counts as published results: seed 0 with 256
    prompts and lengths of 100-1024 gives 142,827 input tokens and 133,966 output tokens.
    """
    rng = random.Random(seed)
    max_id = min(_MAX_ID, vocab_size - 1)
    prompts = [[rng.randint(0, max_id) for _ in range(rng.randint(*inputs))] for _ in range(num_prompts)]
    return [Request(ids, len(ids), rng.randint(*outputs)) for ids in prompts]


def shared_prefix_requests(
    num_groups: int, per_group: int, shared_len: int, own_len: int, output_len: int, seed: int, vocab_size: int
) -> list[Request]:
    """Requests in groups, shuffled. The prompts of a group share a prefix."""
    rng = random.Random(seed)
    max_id = min(_MAX_ID, vocab_size - 1)

    def ids(count: int) -> list[int]:
        return [rng.randint(0, max_id) for _ in range(count)]

    requests = []
    for _ in range(num_groups):
        shared = ids(shared_len)
        requests += [Request(shared + ids(own_len), shared_len + own_len, output_len) for _ in range(per_group)]
    rng.shuffle(requests)
    return requests


def ids_of(request: Request) -> list[int]:
    assert isinstance(request.prompt, list)
    return request.prompt
