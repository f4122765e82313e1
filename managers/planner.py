"""Decides what the next step computes: which prompts, how much of them, or a token for everyone who runs."""

from __future__ import annotations

from dataclasses import dataclass

from .kv_cache_manager import KVCacheManager
from .req import Req
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch, build_decode, build_extend
from .schedule_policy import (
    CLIP_MAX_NEW_TOKENS,
    Extend,
    NewTokenRatio,
    PrefillAdder,
    make_policy,
    retraction_order,
)


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """What a step may hold. Tokens are prompt tokens."""

    max_prefill_tokens: int
    """Of all requests in one step; also the most that running requests wait for between two of their tokens."""
    chunked_prefill_size: int
    """Of one request in one step."""
    enable_mixed_chunk: bool = False
    schedule_policy: str = "lpm"
    schedule_conservativeness: float = 1.0


class Planner:
    """`plan` moves requests between the queues and takes KV for them; it launches nothing and finishes nobody."""

    def __init__(self, limits: PlanLimits, kv: KVCacheManager, queues: RequestQueues) -> None:
        self.ratio = NewTokenRatio(limits.schedule_conservativeness)
        self.num_retractions = 0
        self._limits = limits
        self._kv = kv
        self._queues = queues
        self._policy = make_policy(limits.schedule_policy, kv)
        self._unshared: list[Req] = []
        self._prefilled_since_decode = 0

    def plan(self) -> ScheduleBatch | None:
        """The next step; None when there is nothing to do before another result is home."""
        self._share_last_extends()
        decodes = [req for req in self._queues.running if not req.ends_in_flight and req.pending_abort is None]
        if not self._decode_is_due(decodes):
            batch = self._plan_extend(decodes)
            if batch is not None:
                return batch
        return self._plan_decode(decodes)

    def _share_last_extends(self) -> None:
        """What the last step computed of prompts is open to others from here on; the step may still be in flight,
        but every later one runs after it."""
        for req in self._unshared:
            if req.row:
                self._kv.share(req)
        self._unshared = []

    # Extend

    def _decode_is_due(self, decodes: list[Req]) -> bool:
        if self._limits.enable_mixed_chunk or not decodes:
            return False
        return self._prefilled_since_decode >= self._limits.max_prefill_tokens

    def _plan_extend(self, decodes: list[Req]) -> ScheduleBatch | None:
        queues = self._queues
        joining = decodes if self._limits.enable_mixed_chunk else []
        if queues.chunked is None and not (queues.waiting and self._kv.req_to_token_pool.num_free):
            return None
        if joining and self._kv.decode_shortfall(joining) > 0:
            return None  # a plain decode step retracts
        extends = self._admit(joining)
        if not extends:
            return None
        batch = build_extend(self._kv, extends, joining)
        for extend in extends:
            queues.start(extend.req, whole=extend.is_last_chunk)
        self._unshared = [extend.req for extend in extends]
        self._prefilled_since_decode = 0 if joining else self._prefilled_since_decode + batch.num_prompt_tokens
        return batch

    def _admit(self, joining: list[Req]) -> list[Extend]:
        queues = self._queues
        chunked = queues.chunked
        adder = PrefillAdder(
            self._kv,
            max_tokens=max(self._limits.max_prefill_tokens - len(joining), self._kv.page_size),
            chunk_size=self._limits.chunked_prefill_size,
            reserved=self._reserved(joining),
            engine_empty=not queues.running and chunked is None,
        )
        if chunked is not None and not adder.continue_chunk(chunked, others_wait=bool(queues.waiting)):
            return []  # its next chunk waits for memory, and nobody may take it away
        candidates = [req for req in queues.waiting if req.pending_abort is None and req.in_flight == 0]
        for req in self._policy.order(candidates):
            if not adder.try_admit(req):
                break
        if adder.extends:
            self._count_passed_over(adder.extends)
        return adder.extends

    def _reserved(self, joining: list[Req]) -> float:
        """Tokens that those who hold memory will need on top of it."""
        reserved = self.ratio.reserved_by(self._queues.running)
        chunked = self._queues.chunked
        if chunked is not None:
            reserved += min(chunked.num_new_left, CLIP_MAX_NEW_TOKENS) + chunked.num_tokens - chunked.kv_len
        return reserved + len(joining) * self._kv.page_size

    def _count_passed_over(self, extends: list[Extend]) -> None:
        latest = max(extend.req.arrival for extend in extends)
        admitted = {id(extend.req) for extend in extends}
        for req in self._queues.waiting:
            if req.arrival < latest and id(req) not in admitted:
                req.passed_over += 1

    # Decode

    def _plan_decode(self, decodes: list[Req]) -> ScheduleBatch | None:
        decodes = self._make_room_for(decodes)
        if not decodes:
            return None
        self._prefilled_since_decode = 0
        self.ratio.on_decode()
        return build_decode(self._kv, decodes)

    def _make_room_for(self, decodes: list[Req]) -> list[Req]:
        """Those of `decodes` that get their next slot. Others are retracted, as few as possible; one always stays."""
        if not decodes or self._kv.decode_shortfall(decodes) <= 0:
            return decodes
        if len(decodes) < len(self._queues.running):
            return []  # some end with the step in flight, and give back what they hold: wait for that
        kept = retraction_order(decodes)
        while self._kv.decode_shortfall(kept) > 0:
            if len(kept) > 1:
                self._retract(kept.pop(0))
            else:
                # Alone, a request fits: ReqFactory accepts none that is longer than the pool.
                assert self._queues.chunked is not None
                self._retract(self._queues.chunked)
        self.ratio.on_retract(kept)
        return kept

    def _retract(self, req: Req) -> None:
        """Back to the queue with its output. Its KV stays in the cache until somebody needs the room."""
        self._kv.release(req)
        self._queues.send_back([req])
        req.num_retractions += 1
        self.num_retractions += 1
