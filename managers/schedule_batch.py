"""One step as the scheduler sees it: which requests take part, and the host arrays that the runner gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..model_executor.step import FROM_DEVICE, ForwardMode, Int32Array, StepInputs
from .kv_cache_manager import KVCacheManager
from .prefill_adder import Extend
from .req import Req, Stage


@dataclass(slots=True)
class ScheduleBatch:
    """A planned step. Built when its slots are allocated; from then on it must be launched."""

    inputs: StepInputs
    reqs: list[Req]
    """[B] everyone in the step."""
    sampled: list[Req]
    """Those that get a token, in the order in which the runner returns them."""
    num_prompt_tokens: int
    num_decodes: int


def build_decode(kv: KVCacheManager, reqs: list[Req]) -> ScheduleBatch:
    """A decode step for requests that have room (`kv.decode_shortfall`)."""
    rows = np.fromiter((req.row for req in reqs), np.int32, len(reqs))
    kv_lens = np.fromiter((req.kv_len for req in reqs), np.int32, len(reqs))
    slots = kv.decode(rows, kv_lens)
    for req in reqs:
        req.kv_len += 1
    inputs = StepInputs(
        mode=ForwardMode.DECODE,
        rows=rows,
        seq_lens=kv_lens + 1,
        out_cache_loc=slots,
        table_updates=kv.req_to_token_pool.take_updates(),
    )
    return ScheduleBatch(inputs, reqs, reqs, num_prompt_tokens=0, num_decodes=len(reqs))


def build_extend(kv: KVCacheManager, extends: Sequence[Extend], decodes: Sequence[Req]) -> ScheduleBatch:
    """An extend step; `decodes` join it with one token each (mixed chunk). The room was checked."""
    reqs = [extend.req for extend in extends] + list(decodes)
    starts = _int32([extend.start for extend in extends] + [req.kv_len for req in decodes])
    ends = _int32([extend.end for extend in extends] + [req.kv_len + 1 for req in decodes])
    first_time = [extend.req.stage is Stage.WAITING for extend in extends]
    slots = kv.extend(reqs, ends)
    assert slots is not None, "an extend step was planned without room"
    ids = [extend.req.token_ids()[extend.start : extend.end] for extend in extends]
    ids.append(np.full(len(decodes), FROM_DEVICE, np.int32))
    sampled = [extend.is_last_chunk for extend in extends] + [True] * len(decodes)
    inputs = StepInputs(
        mode=ForwardMode.EXTEND,
        rows=_int32([req.row for req in reqs]),
        seq_lens=ends,
        out_cache_loc=slots,
        extend_lens=ends - starts,
        input_ids=np.concatenate(ids),
        sampled=np.array(sampled, dtype=np.bool_),
        table_updates=kv.req_to_token_pool.take_updates(),
        new_rows=[extend.req.as_new_row() for extend, new in zip(extends, first_time, strict=True) if new],
    )
    return ScheduleBatch(
        inputs,
        reqs,
        [req for req, wanted in zip(reqs, sampled, strict=True) if wanted],
        num_prompt_tokens=inputs.num_tokens - len(decodes),
        num_decodes=len(decodes),
    )


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
