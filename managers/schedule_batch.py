"""A step in the scheduler: its requests, and the arrays that the runner gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np

from ..model_executor.step import (
    FROM_DEVICE,
    ForwardMode,
    HiddenRange,
    HiddenSum,
    Int32Array,
    KVCopies,
    PromptScore,
    StepInputs,
)
from .kv_cache_manager import KVCacheManager
from .prefill_adder import Extend
from .req import Req, Stage

_Plan = TypeVar("_Plan")
_Span: TypeAlias = tuple[Req, int, int, int]
"""A request in a step: its first index in the step, and its positions [start, end)."""


@dataclass(slots=True)
class ScheduleBatch:
    """A planned step. Its slots are allocated, so it must be launched."""

    inputs: StepInputs
    reqs: list[Req]
    """[B], all requests in the step."""
    sampled: list[Req]
    """The requests that get tokens, in the order in which the runner returns them. With drafts, all."""
    num_prompt_tokens: int
    """Prompt tokens in the step; 0 for a decode step."""
    num_decodes: int
    """Requests that decode."""
    sampled_lens: Int32Array
    """[len(sampled)], the length of each before its first new token."""
    scored: list[Req] = field(default_factory=list)
    """The request of each of `inputs.prompt_scores`."""
    pooled: list[Req] = field(default_factory=list)
    """The request of each of `inputs.hidden_sums`."""
    shown: list[Req] = field(default_factory=list)
    """The request of each of `inputs.hidden_states`."""

    @property
    def num_drafts(self) -> list[int] | None:
        """The number of drafts of each request. None: the step has no drafts."""
        if self.inputs.num_drafts is None:
            return None
        num_drafts: list[int] = self.inputs.num_drafts.tolist()
        return num_drafts

    def drafts_of(self, index: int) -> list[int]:
        """The drafts of `sampled[index]`."""
        if self.inputs.num_drafts is None:
            return []
        assert self.inputs.input_ids is not None
        end = self.inputs.starts[index + 1]
        drafts: list[int] = self.inputs.input_ids[end - self.inputs.num_drafts[index] : end].tolist()
        return drafts


def build_decode(kv: KVCacheManager, reqs: list[Req]) -> ScheduleBatch:
    """A decode step of one token for each request. They have room (`kv.has_room_for_decode`)."""
    rows = np.fromiter((req.row for req in reqs), np.int32, len(reqs))
    kv_lens = np.fromiter((req.kv_len for req in reqs), np.int32, len(reqs))
    if kv.states is not None:
        kv.states.save_decoding(reqs, kv_lens)
    slots = kv.decode(rows, kv_lens)
    for req in reqs:
        req.kv_len += 1
    inputs = StepInputs(
        mode=ForwardMode.DECODE,
        rows=rows,
        seq_lens=kv_lens + 1,
        out_cache_loc=slots,
        table_updates=kv.req_to_token_pool.take_updates(),
        state_copies=None if kv.states is None else kv.states.take_copies(),
        kv_copies=_take_copies(kv),
    )
    return ScheduleBatch(inputs, reqs, reqs, 0, num_decodes=len(reqs), sampled_lens=inputs.seq_lens)


def build_copies(kv: KVCacheManager) -> ScheduleBatch | None:
    """A step without requests, which only makes the copies of KV that wait for a step. None if none waits."""
    copies = _take_copies(kv)
    if copies is None:
        return None
    nothing = np.empty(0, np.int32)
    inputs = StepInputs(
        mode=ForwardMode.DECODE, rows=nothing, seq_lens=nothing, out_cache_loc=nothing, kv_copies=copies
    )
    return ScheduleBatch(inputs, [], [], num_prompt_tokens=0, num_decodes=0, sampled_lens=nothing)


def build_extend(
    kv: KVCacheManager,
    extends: Sequence[Extend],
    decodes: Sequence[Req],
    known: Sequence[Sequence[int]] | None = None,
    drafts: Sequence[Sequence[int]] = (),
) -> ScheduleBatch:
    """A step in extend form. The room was checked.

    An extend step that `decodes` join is a mixed step. Without `extends` it is a decode step with drafts or forced
    tokens, or one that returns hidden states. `known`: the known tokens of each decode, or FROM_DEVICE, which is its
    newest one; None: FROM_DEVICE for each. `drafts`: those of each after them; empty: none has any.
    """
    reqs = [extend.req for extend in extends] + list(decodes)
    new_ids = known or [(FROM_DEVICE,)] * len(decodes)
    num_drafts = _int32([len(ids) for ids in drafts]) if any(drafts) else None
    if num_drafts is not None:
        assert not extends, "a step with drafts has only decodes"
        new_ids = [[*ids, *more] for ids, more in zip(new_ids, drafts, strict=True)]
    decode_ends = [req.kv_len + len(ids) for req, ids in zip(decodes, new_ids, strict=True)]
    starts = _int32([extend.start for extend in extends] + [req.kv_len for req in decodes])
    ends = _int32([extend.end for extend in extends] + decode_ends)
    first_time = [extend.req.stage is Stage.WAITING for extend in extends]
    state_saves = None
    if kv.states is not None:
        kv.states.save_decoding(decodes, starts[len(extends) :])
        state_saves = kv.states.plan_saves(extends, len(reqs))
    slots = kv.extend(reqs, ends)
    assert slots is not None, "an extend step was planned without room"
    ids = [extend.req.token_ids()[extend.start : extend.end] for extend in extends]
    ids.append(_int32(list(chain.from_iterable(new_ids))))
    sampled = [extend.is_last_chunk for extend in extends] + [True] * len(decodes)
    lens = ends - starts
    spans = list(zip(reqs, (lens.cumsum() - lens).tolist(), starts.tolist(), ends.tolist(), strict=True))
    scored, scores = _planned(spans[: len(extends)], _prompt_score)
    pooled, sums = _planned(spans[: len(extends)], _hidden_sum)
    shown, ranges = _planned(spans, _hidden_range)
    inputs = StepInputs(
        mode=ForwardMode.EXTEND,
        rows=_int32([req.row for req in reqs]),
        seq_lens=ends,
        out_cache_loc=slots,
        extend_lens=lens,
        input_ids=np.concatenate(ids),
        sampled=np.array(sampled, dtype=np.bool_),
        num_drafts=num_drafts,
        table_updates=kv.req_to_token_pool.take_updates(),
        state_saves=state_saves,
        state_copies=None if kv.states is None else kv.states.take_copies(),
        kv_copies=_take_copies(kv),
        new_rows=[extend.req.as_new_row() for extend, new in zip(extends, first_time, strict=True) if new],
        prompt_scores=scores,
        hidden_sums=sums,
        hidden_states=ranges,
    )
    return ScheduleBatch(
        inputs,
        reqs,
        [req for req, wanted in zip(reqs, sampled, strict=True) if wanted],
        num_prompt_tokens=inputs.num_tokens - len(ids[-1]),
        num_decodes=len(decodes),
        sampled_lens=ends[inputs.sampled] if num_drafts is None else ends - num_drafts,
        scored=scored,
        pooled=pooled,
        shown=shown,
    )


def _planned(
    spans: Iterable[_Span], plan: Callable[[Req, int, int, int], _Plan | None]
) -> tuple[list[Req], list[_Plan]]:
    """The requests for which the step computes what `plan` returns, and these plans."""
    reqs, plans = [], []
    for span in spans:
        planned = plan(*span)
        if planned is not None:
            reqs.append(span[0])
            plans.append(planned)
    return reqs, plans


def _prompt_score(req: Req, first: int, start: int, end: int) -> PromptScore | None:
    return None if req.logprobs is None else req.logprobs.plan(req.row, first, start, end)


def _hidden_sum(req: Req, first: int, start: int, end: int) -> HiddenSum | None:
    return None if req.pooling is None else req.pooling.plan(first, start, end)


def _hidden_range(req: Req, first: int, start: int, end: int) -> HiddenRange | None:
    return None if req.hidden is None else req.hidden.plan(first, start, end)


def _take_copies(kv: KVCacheManager) -> KVCopies | None:
    return None if kv.tiers is None else kv.tiers.take_copies()


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
