"""Requests and the books of their KV, without a scheduler around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.kv_tiers import KVTiers
from tercet.managers.req import Req
from tercet.managers.text_stream import StopChecker
from tercet.mem_cache.allocator import make_allocator
from tercet.mem_cache.chunk_cache import ChunkCache
from tercet.mem_cache.kv_files import KVFiles
from tercet.mem_cache.kv_storage import KVStorage
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.req_to_token_pool import ReqToTokenPool
from tercet.srt.io_struct import pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make_kv(
    page_size: int, pool_size: int = 8192, *, num_rows: int = 64, eviction: str = "lru", radix: bool = True
) -> KVCacheManager:
    allocator = make_allocator(pool_size, page_size)
    cache = RadixCache(allocator, page_size, eviction) if radix else ChunkCache(page_size)
    return KVCacheManager(ReqToTokenPool(num_rows, 1024), allocator, cache)


def make_tiers(
    page_size: int,
    block_pages: int,
    memory: np.ndarray,
    folder: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    max_bytes: int = 1 << 30,
) -> KVTiers:
    """The tiers of a runner whose host memory is `memory`: uint8 [num_blocks, block_bytes]."""
    storage = None if folder is None else KVStorage(KVFiles(folder, max_bytes), memory, clock)
    return KVTiers(
        page_size=page_size,
        block_len=page_size * block_pages,
        num_blocks=len(memory),
        block_bytes=memory.shape[1],
        identity=b"fake",
        storage=storage,
        clock=clock,
    )


def make_req(
    prompt: Sequence[int],
    arrival: int = 0,
    *,
    output: Sequence[int] = (),
    salt: str = "",
    eos_ids: frozenset[int] = frozenset(),
    stop_checker: StopChecker | None = None,
    stream_interval: int = 1,
    prediction: Sequence[int] = (),
    **sampling: object,
) -> Req:
    params = SamplingParams(**{"max_new_tokens": 1, "sampling_seed": 0, **sampling})
    req = Req(
        f"r{arrival}",
        i32(*prompt),
        RequestOptions(sampling=params, cache_salt=salt, prediction=pack_ids(prediction)),
        arrival=arrival,
        eos_ids=eos_ids,
        stop_checker=stop_checker,
        stream_interval=stream_interval,
    )
    req.output_ids += output
    return req


def admit(kv: KVCacheManager, req: Req) -> None:
    kv.admit(req, kv.match(req))


def extend(kv: KVCacheManager, req: Req, end: int) -> np.ndarray:
    """The slots of the request's positions [kv_len, end)."""
    slots = kv.extend([req], i32(end))
    assert slots is not None
    return slots


def put_into_cache(kv: KVCacheManager, prompt: Sequence[int], salt: str = "") -> None:
    """As if a request with this prompt had run and ended."""
    req = make_req(prompt, salt=salt)
    admit(kv, req)
    extend(kv, req, len(prompt))
    kv.release(req)
