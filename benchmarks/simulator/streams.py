"""Traffic of prompts that arrive beside running streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from .synthetic import Stream, TrafficSettings, random_prompts
from .traffic import SimRequest

_STREAM_PROMPT_LEN = 16


def beside_streams(settings: TrafficSettings, num_streams: int, stream_len: int) -> Iterator[SimRequest]:
    """Random prompts beside `num_streams` requests with short prompts and answers of `stream_len` tokens, which arrive
    first. `settings.num_requests` does not count these."""
    rng = np.random.default_rng([settings.seed, Stream.STREAMS])
    streams = (
        SimRequest(0.0, rng.integers(1, settings.vocab_size, _STREAM_PROMPT_LEN, dtype=np.int32), stream_len)
        for _ in range(num_streams)
    )
    return itertools.chain(streams, random_prompts(settings))
