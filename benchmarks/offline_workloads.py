"""Token ids at random, for engines that are driven without a server."""

from __future__ import annotations

import random
from typing import NamedTuple

from .workloads import Request

_MOST_ID = 10_000


class Span(NamedTuple):
    """A length drawn uniformly from [low, high]."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """ "512" or "100-1024". Raises ValueError."""
        low, _, high = text.partition("-")
        span = cls(int(low), int(high or low))
        if not 1 <= span.low <= span.high:
            raise ValueError(f"a length must be N or LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}")
        return span


def random_requests(num_prompts: int, inputs: Span, outputs: Span, seed: int, vocab_size: int) -> list[Request]:
    """Prompts of ids in [0, 10000], or below the vocabulary's size.

    Drawn from Python's generator in the order that is usual for this workload (each prompt's length, then its ids; all
    output lengths at the end), so that a seed gives the numbers that others published: seed 0, 256 prompts, 100-1024
    in and out are 142,827 tokens in and 133,966 out.
    """
    rng = random.Random(seed)
    most = min(_MOST_ID, vocab_size - 1)
    prompts = [[rng.randint(0, most) for _ in range(rng.randint(*inputs))] for _ in range(num_prompts)]
    return [Request(ids, len(ids), rng.randint(*outputs)) for ids in prompts]


def shared_prefix_requests(
    num_groups: int, per_group: int, shared_len: int, own_len: int, output_len: int, seed: int, vocab_size: int
) -> list[Request]:
    """Groups of prompts that begin alike, shuffled."""
    rng = random.Random(seed)
    most = min(_MOST_ID, vocab_size - 1)

    def ids(count: int) -> list[int]:
        return [rng.randint(0, most) for _ in range(count)]

    requests = []
    for _ in range(num_groups):
        shared = ids(shared_len)
        requests += [Request(shared + ids(own_len), shared_len + own_len, output_len) for _ in range(per_group)]
    rng.shuffle(requests)
    return requests


def ids_of(request: Request) -> list[int]:
    assert isinstance(request.prompt, list)
    return request.prompt
