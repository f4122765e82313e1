"""Decides what the next step computes: parts of prompts, or the next tokens of the running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .kv_cache_manager import KVCacheManager
from .prefill_adder import Extend, PrefillAdder
from .req import Req, Stage
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch, build_copies, build_decode, build_extend
from .schedule_policy import NewTokenRatio, SchedulePolicy, expected_growth, retraction_order

DECODES_PER_EXTEND = 3
"""Decode steps that follow an extend step for which running requests had to wait. A step has a cost however few tokens
it computes, so an endless run of small prompts must not get most of the steps."""

Proposer = Callable[[Req, int], Sequence[int]]
"""Proposes drafts for a request: guesses of the tokens after its newest one, at most as many as the second argument.
With overlap, the host may not know the newest token yet."""


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """The limits of a step, in prompt tokens, and the settings of the planner."""

    max_prefill_tokens: int
    """Of all requests in one step. So it also bounds how long a running request waits between two tokens."""
    chunked_prefill_size: int
    """Of one request in one step."""
    enable_mixed_chunk: bool = False
    schedule_policy: str = "lpm"
    schedule_conservativeness: float = 1.0
    admission_watermark: float = 0.0
    """The share of the KV pool that an admission leaves free, unless nothing runs."""
    preemption_threshold: int | None = None
    """A waiting request preempts running ones that are less urgent by more than this. None: there are no priorities."""
    random_seed: int = 0
    """Of the policy `random`."""


class Planner:
    """Plans the next step. `plan` moves requests between the queues and allocates KV, but launches and ends nothing."""

    def __init__(
        self,
        limits: PlanLimits,
        kv: KVCacheManager,
        queues: RequestQueues,
        propose: Proposer | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        """`propose`: proposes the drafts of decode steps; None: every decode step has one token for each request.
        `clock`: that of `Req.arrived_s`."""
        self.ratio = NewTokenRatio(limits.schedule_conservativeness)
        self.num_retractions = 0
        self.kv = kv
        self.queues = queues
        self._limits = limits
        self._policy = SchedulePolicy(limits.schedule_policy, kv, clock, limits.random_seed)
        self._watermark = int(limits.admission_watermark * kv.allocator.size)
        self._propose = propose
        self._unshared: list[Req] = []
        self._num_decodes_due = 0

    def plan(self) -> ScheduleBatch | None:
        """The next step. None: nothing can run before the step in flight is processed."""
        self._share_last_extends()
        if self._limits.preemption_threshold is not None and not self._num_decodes_due:
            self._preempt(self._limits.preemption_threshold)
        decodes = [req for req in self.queues.running if not req.awaits_results and req.pending_abort is None]
        if not (decodes and self._num_decodes_due):
            batch = self._plan_extend(decodes)
            if batch is not None:
                return batch
        return self._plan_decode(decodes) or build_copies(self.kv)

    def _share_last_extends(self) -> None:
        """Put the prompt KV of the last step into the prefix cache. The step may be in flight, but later steps run
        after it."""
        for req in self._unshared:
            if req.row:
                self.kv.share(req)
        self._unshared = []

    # Priorities

    def _preempt(self, threshold: int) -> None:
        """Retracts running requests for the most urgent waiting one, if it needs that and it is enough.

        The least urgent goes first, and of equal ones the newest. While a prompt is in chunks nothing is preempted: a
        long candidate could not start beside it.
        """
        queues = self.queues
        candidate = next((req for req in queues.waiting if req.pending_abort is None), None)
        if candidate is None or candidate.num_steps_in_flight or queues.chunked is not None:
            return
        victims = [
            req
            for req in queues.running
            if req.urgency < candidate.urgency - threshold and req.pending_abort is None and not req.awaits_results
        ]
        if not victims:
            return
        victims.sort(key=lambda req: req.place, reverse=True)
        preempted = self._enough_for(candidate, victims)
        for req in preempted:
            self._retract(req)
        if preempted:
            queues.send_back(preempted)

    def _enough_for(self, candidate: Req, victims: list[Req]) -> list[Req]:
        """The first of `victims` whose rows and KV let the candidate start. None of them if all are not enough.

        KV that several requests share is counted for each of them. If that was too much, the next plan takes more.
        """
        kv, running = self.kv, self.queues.running
        match = kv.match(candidate)
        with kv.locked(match):
            free = kv.num_available - self.ratio.reserved_by(running) - self._watermark
        missing = candidate.num_tokens - len(match.slots) + expected_growth(candidate) + kv.page_size - free
        num_rows = kv.req_to_token_pool.num_free
        for count, victim in enumerate(victims):
            if missing < 0 and count + num_rows > 0:
                return victims[:count]
            missing -= victim.kv_len + self.ratio.reserved_by([victim])
        return victims if missing < 0 or len(victims) == len(running) else []

    # Extend

    def _plan_extend(self, decodes: list[Req]) -> ScheduleBatch | None:
        """None if no prompt can proceed, because none waits or memory is short. Decodes that join bring no drafts."""
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
            expected=self.ratio.reserved_by(queues.running) + self._watermark,
            chunked=chunked,
            engine_empty=not queues.running and chunked is None,
        )
        if adder.num_left < 0:
            return []
        goes_on = chunked is not None and chunked.pending_abort is None
        if goes_on and not adder.continue_chunk(others_wait=bool(queues.waiting)):
            return []  # its next chunk needs memory, which other prompts must not take
        ordered = self._policy.order(queues.waiting)
        adder.admit(req for req in ordered if req.is_admissible and not self.kv.awaits_storage(req))
        return adder.extends

    # Decode

    def _plan_decode(self, decodes: list[Req]) -> ScheduleBatch | None:
        decodes = self._make_room_for(decodes)
        if not decodes:
            return None
        self._num_decodes_due = max(self._num_decodes_due - 1, 0)
        self.ratio.on_decode()
        drafts = self._drafts(decodes)
        return build_decode(self.kv, decodes) if drafts is None else build_extend(self.kv, [], decodes, drafts)

    def _drafts(self, decodes: list[Req]) -> list[Sequence[int]] | None:
        """The drafts of each request. None if there is no draft, or no room for all: drafts retract nobody."""
        if self._propose is None:
            return None
        # A grammar's mask is for one position, so its request gets no drafts.
        drafts = [self._propose(req, req.max_kv_len - req.kv_len - 1) if req.grammar is None else [] for req in decodes]
        num_new = np.array([1 + len(ids) for ids in drafts], dtype=np.int32)
        if not any(drafts) or self.kv.decode_shortfall(decodes, num_new) > 0:
            return None
        return drafts

    def _make_room_for(self, decodes: list[Req]) -> list[Req]:
        """The requests of `decodes` that get their next slot. As few as possible are retracted; at least one stays."""
        if not decodes or self.kv.decode_shortfall(decodes) <= 0:
            return decodes
        if len(decodes) < len(self.queues.running):
            return []  # some requests may end with the step in flight and release their KV: wait for that
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
