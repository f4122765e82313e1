"""Decides what the next step computes: parts of prompts, or one token for each running request."""

from __future__ import annotations

from dataclasses import dataclass

from .kv_cache_manager import KVCacheManager
from .prefill_adder import Extend, PrefillAdder
from .req import Req, Stage
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch, build_decode, build_extend
from .schedule_policy import NewTokenRatio, make_policy, retraction_order

DECODES_PER_EXTEND = 3
"""Decode steps that follow an extend step for which running requests had to wait. A step has a cost however few tokens
it computes, so an endless run of small prompts must not get most of the steps."""


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """What a step may hold. Tokens are prompt tokens."""

    max_prefill_tokens: int
    """Of all requests in one step, and so the most that a running request waits for between two of its tokens."""
    chunked_prefill_size: int
    """Of one request in one step."""
    enable_mixed_chunk: bool = False
    schedule_policy: str = "lpm"
    schedule_conservativeness: float = 1.0


class Planner:
    """Plans the next step. `plan` moves requests between the queues and allocates KV, but launches and ends nothing."""

    def __init__(self, limits: PlanLimits, kv: KVCacheManager, queues: RequestQueues) -> None:
        self.ratio = NewTokenRatio(limits.schedule_conservativeness)
        self.num_retractions = 0
        self.kv = kv
        self.queues = queues
        self._limits = limits
        self._policy = make_policy(limits.schedule_policy, kv)
        self._unshared: list[Req] = []
        self._num_decodes_due = 0

    def plan(self) -> ScheduleBatch | None:
        """The next step. None: nothing can run before the step in flight is processed."""
        self._share_last_extends()
        decodes = [req for req in self.queues.running if not req.ends_in_flight and req.pending_abort is None]
        if not (decodes and self._num_decodes_due):
            batch = self._plan_extend(decodes)
            if batch is not None:
                return batch
        return self._plan_decode(decodes)

    def _share_last_extends(self) -> None:
        """Put the prompt KV of the last step into the prefix cache. The step may be in flight, but later steps run
        after it."""
        for req in self._unshared:
            if req.row:
                self.kv.share(req)
        self._unshared = []

    # Extend

    def _plan_extend(self, decodes: list[Req]) -> ScheduleBatch | None:
        """None if no prompt can proceed, because none waits or memory is short."""
        queues = self.queues
        if queues.chunked is None and not (queues.waiting and self.kv.req_to_token_pool.num_free):
            return None
        joining = decodes if self._limits.enable_mixed_chunk else []
        extends = self._admit(joining)
        if not extends:
            return None
        batch = build_extend(self.kv, extends, joining)
        admitted = [extend.req for extend in extends if extend.req.stage is Stage.WAITING]
        for extend in extends:
            queues.start(extend.req, whole=extend.is_last_chunk)
        self._policy.on_admitted(admitted, queues.waiting)
        self._unshared = [extend.req for extend in extends]
        if decodes and not joining:
            self._num_decodes_due = DECODES_PER_EXTEND
        return batch

    def _admit(self, joining: list[Req]) -> list[Extend]:
        queues = self.queues
        chunked = queues.chunked
        adder = PrefillAdder(
            self.kv,
            joining=joining,
            max_tokens=max(self._limits.max_prefill_tokens - len(joining), self.kv.page_size),
            chunk_size=self._limits.chunked_prefill_size,
            expected=self.ratio.reserved_by(queues.running),
            chunked=chunked,
            engine_empty=not queues.running and chunked is None,
        )
        if adder.num_left < 0:
            return []
        goes_on = chunked is not None and chunked.pending_abort is None
        if goes_on and not adder.continue_chunk(others_wait=bool(queues.waiting)):
            return []  # its next chunk needs memory, which other prompts must not take
        ordered = self._policy.order(queues.waiting)
        adder.admit(req for req in ordered if req.pending_abort is None and req.in_flight == 0)
        return adder.extends

    # Decode

    def _plan_decode(self, decodes: list[Req]) -> ScheduleBatch | None:
        decodes = self._make_room_for(decodes)
        if not decodes:
            return None
        self._num_decodes_due = max(self._num_decodes_due - 1, 0)
        self.ratio.on_decode()
        return build_decode(self.kv, decodes)

    def _make_room_for(self, decodes: list[Req]) -> list[Req]:
        """The requests of `decodes` that get their next slot. As few as possible are retracted; at least one stays."""
        if not decodes or self.kv.decode_shortfall(decodes) <= 0:
            return decodes
        if len(decodes) < len(self.queues.running):
            return []  # some requests end with the step in flight and release their KV: wait for that
        kept = retraction_order(decodes)
        retracted = []
        while self.kv.decode_shortfall(kept) > 0:
            # Alone, a request fits: ReqFactory accepts none that is longer than the pool.
            victim = kept.pop(0) if len(kept) > 1 else self.queues.chunked
            assert victim is not None and victim.row
            self._retract(victim)
            retracted.append(victim)
        self.queues.send_back(retracted)
        self.ratio.on_retract(kept)
        return kept

    def _retract(self, req: Req) -> None:
        """Release the KV of a request, which keeps its output. The cache keeps the KV until it is evicted."""
        self.kv.release(req)
        req.num_retractions += 1
        self.num_retractions += 1
