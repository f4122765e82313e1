"""Host memory that has the KV of all prompts, for the benchmark of the scheduler's processor time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from ..managers.kv_tiers import KVTiers
from ..mem_cache.block_keys import BlockKeys
from ..srt.io_struct import GenerateReq

_BLOCK_LEN = 64
_BLOCK_BYTES = 1
"""The device copies nothing."""
_IDENTITY = b""


def make_tiers(page_size: int, num_tokens: int) -> KVTiers:
    """Tiers with host memory for `num_tokens`, and without files."""
    block_len = -(-_BLOCK_LEN // page_size) * page_size
    return KVTiers(
        page_size=page_size,
        block_len=block_len,
        num_blocks=num_tokens // block_len + 1,
        block_bytes=_BLOCK_BYTES,
        identity=_IDENTITY,
        storage=None,
        clock=time.monotonic,
    )


def saved(requests: Iterator[GenerateReq], tiers: KVTiers | None) -> Iterator[GenerateReq]:
    """The requests. Before each of them comes, host memory, if there is any, gets the KV of its prompt."""
    if tiers is None:
        yield from requests
        return
    for request in requests:
        keys = BlockKeys(_IDENTITY, "", tiers.counts.block_len)
        for key in reversed(keys.cover(np.frombuffer(request.input_ids, np.int32))):
            block = tiers.blocks.take()
            if block is not None:
                tiers.blocks.name(block, key)
                tiers.blocks.unpin(block)
        yield request
