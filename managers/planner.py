"""Decides what the next step computes: parts of prompts, or the next tokens of the running requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from ..srt.settings.scheduler import MAX_VERIFIED_TOKENS
from .decode_tokens import draft_ids, known_ids
from .fair_policy import FairPolicy, make_policy
from .kv_cache_manager import KVCacheManager
from .prefill_adder import Extend, PrefillAdder, awaits_prefix
from .proposer import Proposer
from .req import Req, Stage
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch, build_copies, build_decode, build_extend
from .schedule_policy import NewTokenRatio, expected_growth, retraction_order
from .token_gap import DECODES_PER_EXTEND, TimeBudget, TokenGapBound

MAX_HELD_BACK = 3
"""Extend steps in a row in which shorter prompts may hold the oldest unfinished one back. Then it gets half a step."""


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """The limits of a step, in prompt tokens, and the settings of the planner."""

    max_prefill_tokens: int
    """Of all requests in one step. So it also bounds how long a running request waits between two tokens."""
    chunked_prefill_size: int
    """Of one request in one step."""
    enable_mixed_chunk: bool = False
    """Running requests decode in extend steps. Otherwise they do only with `max_itl_s`, if it is faster."""
    schedule_policy: str = "lpm"
    schedule_conservativeness: float = 1.0
    admission_watermark: float = 0.0
    """The share of the KV pool that an admission leaves free, unless nothing runs."""
    preemption_threshold: int | None = None
    """A waiting request preempts running ones that are less urgent by more than this. None: there are no priorities."""
    max_itl_s: float | Literal["auto"] | None = None
    """The most seconds between two tokens of a running request while prompts are computed. None: no bound."""
    joins_forced_tokens: bool = False
    """A request computes all forced tokens of its grammar in one step, an extend step. Otherwise one in each step."""
    random_seed: int = 0
    """Of the policy `random`."""
    tenant_weights: Mapping[str, float] | None = None
    """Of the policy `dlpm`. None: all tenants have the weight 1."""


class _Shortage(NamedTuple):
    """The last pass of admissions ended at the first waiting request, because there was no memory for it."""

    num_needed: int
    """Tokens that it needs beside its cached prefix."""
    num_changes: int
    """`WaitingQueue.num_changes` after that pass."""


class Planner:
    """Plans the next step. `plan` moves requests between the queues and allocates KV, but launches and ends nothing."""

    adder_type: ClassVar[type[PrefillAdder]] = PrefillAdder

    def __init__(
        self,
        limits: PlanLimits,
        kv: KVCacheManager,
        queues: RequestQueues,
        proposer: Proposer | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        """`proposer`: proposes the drafts of decode steps; None: every decode step has one token for each request.
        `clock`: that of `Req.arrived_s`."""
        self.ratio = NewTokenRatio(limits.schedule_conservativeness)
        self.num_retractions = 0
        self.kv = kv
        self.queues = queues
        self._limits = limits
        self._policy = make_policy(
            limits.schedule_policy,
            kv,
            clock,
            limits.random_seed,
            tenant_weights=limits.tenant_weights,
            max_prefill_tokens=limits.max_prefill_tokens,
        )
        if isinstance(self._policy, FairPolicy):
            queues.waiting = self._policy.waiting
            queues.on_end.append(self._policy.on_end)
        self._watermark = int(limits.admission_watermark * kv.allocator.size)
        self.gap = None if limits.max_itl_s is None else TokenGapBound(limits.max_itl_s)
        """The bound on token gaps, with the costs that it has learned. None: there is no bound."""
        self._proposer = proposer
        self._shortage: _Shortage | None = None
        self._unshared: list[Req] = []
        self._num_decodes_due = 0
        self._num_held_back = 0
        """Extend steps in a row in which the oldest unfinished prompt had less than half of the tokens."""
        self._count_startable()

    @property
    def has_drafts(self) -> bool:
        """Whether decode steps may have drafts."""
        return self._proposer is not None

    def plan(self) -> ScheduleBatch | None:
        """The next step. None: nothing can run before the step in flight is processed."""
        self._share_last_extends()
        decodes = self._ready()
        are_decodes_due = bool(decodes) and self._num_decodes_due > 0
        if not are_decodes_due:
            threshold = self._limits.preemption_threshold
            if threshold is not None and self._preempt(threshold):
                decodes = self._ready()
            batch = self._plan_extend(decodes)
            self._count_startable()
            if batch is not None:
                return batch
        return self._plan_decode(decodes) or build_copies(self.kv)

    def _count_startable(self) -> None:
        queues = self.queues
        queues.num_startable = 0 if queues.waiting else self.kv.req_to_token_pool.num_free

    def _ready(self) -> list[Req]:
        """The running requests that may take part in a step (see `Req.awaits_results`)."""
        running = self.queues.running
        if self._proposer is None:  # at most one token of each is in flight
            return [req for req in running if req.kv_len < req.max_kv_len and req.pending_abort is None]
        return [req for req in running if not req.awaits_results and req.pending_abort is None]

    def on_pause(self) -> None:
        """There will be no plan before generation continues."""
        self.queues.num_startable = 0

    def on_result(self, batch: ScheduleBatch, seconds: float) -> None:
        """The step of `batch` took so long."""
        inputs = batch.inputs
        if not batch.reqs:
            return
        has_drafts = inputs.num_drafts is not None
        # Forced tokens teach nothing about drafts.
        is_decode = inputs.extend_lens is None or (has_drafts and inputs.num_tokens == inputs.num_choices)
        if self._proposer is not None and is_decode:
            self._proposer.observe(len(batch.reqs), inputs.num_tokens, seconds)
        if self.gap is not None and not has_drafts:  # drafts teach nothing about prompts
            self.gap.observe(inputs, batch.num_decodes, seconds)

    def _share_last_extends(self) -> None:
        """Put the prompt KV of the last step into the prefix cache. The step may be in flight, but later steps run
        after it."""
        for req in self._unshared:
            if req.row:
                self.kv.share(req)
        self._unshared = []

    # Priorities

    def _preempt(self, threshold: int) -> bool:
        """Retracts running requests for the waiting one of the highest priority, if it needs their rows or KV and these
        suffice. Returns whether it did.

        The lowest priority goes first, and among equals the newest. While a prompt of at least the same priority is in
        chunks, nothing is preempted: a long candidate might not start beside it. A request that waits for its grammar,
        for files or for a prompt in chunks with its prefix is no candidate: the preempted ones would start again first.
        """
        queues, candidate = self.queues, self._first_ready()
        if candidate is None or any(req.urgency >= candidate.urgency for req in queues.unfinished):
            return False
        victims = [
            req
            for req in queues.holders()
            if req.urgency < candidate.urgency - threshold and req.pending_abort is None and not req.awaits_results
        ]
        if not victims or awaits_prefix(self.kv, candidate, self._going_on()):
            return False
        victims.sort(key=lambda req: req.place, reverse=True)
        preempted = self._enough_for(candidate, victims)
        for req in preempted:
            self._retract(req)
        if preempted:
            queues.send_back(preempted)
        return bool(preempted)

    def _first_ready(self) -> Req | None:
        """The waiting request that starts first if it has room. Others may wait for their grammars or for files."""
        ready = (req for req in self.queues.waiting if req.pending_abort is None and not req.awaits_grammar)
        return next((req for req in ready if not self.kv.awaits_storage(req)), None)

    def _enough_for(self, candidate: Req, victims: list[Req]) -> list[Req]:
        """The first of `victims` whose rows and KV let the candidate start. Empty if all together are not enough.

        If they are all requests with KV, they are enough: alone, every request fits.
        """
        kv, queues = self.kv, self.queues
        match = kv.match(candidate)
        with kv.locked(match):
            reserved = self.ratio.reserved_by(queues.running) + sum(map(self._left_of, queues.unfinished))
            joining = self._ready() if self._limits.enable_mixed_chunk or self.gap is not None else []
            free = kv.num_available - reserved - self._watermark - kv.decode_demand(joining)
            num_freed = list(kv.freed_by_release(victims))  # what the candidate would share with them is not freed
        missing = candidate.num_tokens - len(match.slots) + expected_growth(candidate) + kv.page_size - free
        num_rows, joins = kv.req_to_token_pool.num_free, set(joining)
        for count, victim in enumerate(victims):
            if missing < 0 and count + num_rows > 0:
                return victims[:count]
            missing -= num_freed[count]
            missing -= kv.decode_demand([victim]) if victim in joins else 0
            missing -= self._left_of(victim) if victim in queues.unfinished else self.ratio.reserved_by([victim])
        return victims if missing < 0 or len(victims) == len(queues.holders()) else []

    def _left_of(self, req: Req) -> int:
        """Tokens, in whole pages, that an unfinished prompt is expected to need beside its KV."""
        return self.kv.growth(req.kv_len, req.num_tokens) + expected_growth(req)

    # Extend

    def _plan_extend(self, decodes: list[Req]) -> ScheduleBatch | None:
        """None if no prompt can proceed, because none waits or memory is short. Decodes that join bring one token."""
        queues = self.queues
        if not queues.unfinished and not (queues.waiting and self.kv.req_to_token_pool.num_free):
            return None
        joins, time = self._limits.enable_mixed_chunk, None
        if self.gap is not None and (decodes or self._has_interrupted()):
            time = self.gap.budget(decodes, always_join=joins)
            joins = time.joins
        joining = decodes if joins else []
        extends = self._admit(joining, time)
        if not extends:
            return None
        batch = build_extend(self.kv, extends, joining)
        self._count_held_back(extends)
        admitted = [extend.req for extend in extends if extend.req.stage is Stage.WAITING]
        for extend in extends:
            queues.start(extend.req, whole=extend.is_last_chunk)
        self._policy.on_admitted(admitted, queues.waiting)
        self._unshared = [extend.req for extend in extends]
        if decodes and not joining:
            self._num_decodes_due = self._decodes_after(batch)
        return batch

    def _has_interrupted(self) -> bool:
        """Whether a request without its KV has output: its engine has died, or it was retracted. The gap between two of
        its tokens has begun."""
        return any(req.output_ids for req in self.queues.interrupted)

    def _decodes_after(self, batch: ScheduleBatch) -> int:
        if self.gap is None:
            return DECODES_PER_EXTEND
        return self.gap.decodes_due(batch.num_prompt_tokens, self._limits.max_prefill_tokens)

    def _make_adder(self, joining: list[Req], time: TimeBudget | None) -> PrefillAdder:
        queues = self.queues
        return self.adder_type(
            self.kv,
            joining=joining,
            max_tokens=max(self._limits.max_prefill_tokens - len(joining), self.kv.page_size),
            chunk_size=self._limits.chunked_prefill_size,
            expected=self.ratio.reserved_by(queues.running) + self._watermark,
            unfinished=self._going_on(),
            time=time,
            engine_empty=not queues.running and not queues.unfinished,
        )

    def _admit(self, joining: list[Req], time: TimeBudget | None) -> list[Extend]:
        queues, adder = self.queues, self._make_adder(joining, time)
        if adder.num_left < 0 or self._is_in_vain(adder):
            return []
        ordered = iter(self._policy.order(queues.waiting))
        first = list(islice(ordered, 1))
        ready = (req for req in chain(first, ordered) if req.is_admissible and not self.kv.awaits_storage(req))
        extends = adder.fill(ready, due=self._due())
        self._shortage = None
        if not extends and adder.refused is not None and adder.refused[0] in first:
            self._shortage = _Shortage(adder.refused[1], queues.waiting.num_changes)
        return extends

    def _is_in_vain(self, adder: PrefillAdder) -> bool:
        """Whether a pass would end as the last one did, at a first request without memory.

        Evictions and time may change the order of some policies meanwhile. They do not count as a change: the request
        keeps its turn until it fits or the queue changes.
        """
        queues, shortage = self.queues, self._shortage
        if shortage is None or queues.unfinished or not queues.running:
            return False
        return shortage.num_changes == queues.waiting.num_changes and not adder.has_memory_for(shortage.num_needed)

    def _going_on(self) -> list[Req]:
        """The unfinished prompts that continue."""
        return [req for req in self.queues.unfinished if req.pending_abort is None]

    def _oldest_unfinished(self) -> Req | None:
        return min(self._going_on(), key=lambda req: req.place, default=None)

    def _due(self) -> Req | None:
        """The unfinished prompt that may not be held back any longer, if any. Those of higher priority still go
        first, unless they cannot start, or wait for a prefix that an unfinished prompt computes."""
        oldest = self._oldest_unfinished() if self._num_held_back >= MAX_HELD_BACK else None
        if oldest is None:
            return None
        first = self._first_ready()
        if first is None or first.urgency <= oldest.urgency or awaits_prefix(self.kv, first, self._going_on()):
            return oldest
        return None

    def _count_held_back(self, extends: Sequence[Extend]) -> None:
        """Called before the requests of a planned step change their queues."""
        oldest = self._oldest_unfinished()
        own = sum(extend.end - extend.start for extend in extends if extend.req is oldest)
        was_due = own > 0 and self._num_held_back >= MAX_HELD_BACK
        is_held_back = oldest is not None and not was_due and 2 * own < sum(one.end - one.start for one in extends)
        self._num_held_back = self._num_held_back + 1 if is_held_back else 0

    # Decode

    def _plan_decode(self, decodes: list[Req]) -> ScheduleBatch | None:
        decodes = self._make_room_for(decodes)
        if not decodes:
            return None
        self._num_decodes_due = max(self._num_decodes_due - 1, 0)
        self.ratio.on_decode()
        if self._proposer is not None or (self._limits.joins_forced_tokens and self.queues.num_constrained):
            batch = self._plan_several(decodes)
            if batch is not None:
                return batch
        # Recorded decode steps return no hidden states.
        if not (self.queues.num_with_hidden and any(req.hidden is not None for req in decodes)):
            return build_decode(self.kv, decodes)
        return build_extend(self.kv, [], decodes)

    def _plan_several(self, decodes: list[Req]) -> ScheduleBatch | None:
        """A step that computes several tokens of a request: forced ones, drafts, or both.

        None if no request has any, or if there is no room: they never cause a retraction. If there is room only for the
        forced ones, drafts are left out.
        """
        limits = self._limits
        known = known_ids(decodes, limits.max_prefill_tokens if limits.joins_forced_tokens else len(decodes))
        most = max(limits.max_prefill_tokens, MAX_VERIFIED_TOKENS)
        for drafts in (draft_ids(decodes, known, self._proposer), [()] * len(decodes)):
            num_new = np.array([len(ids) + len(more) for ids, more in zip(known, drafts, strict=True)], np.int32)
            if num_new.max() == 1:
                return None
            if num_new.sum() <= most and self.kv.decode_shortfall(decodes, num_new) <= 0:
                return build_extend(self.kv, [], decodes, known, drafts)
        return None

    def _make_room_for(self, decodes: list[Req]) -> list[Req]:
        """The requests of `decodes` that get their next slot. As few as possible are retracted. At least one request
        with KV stays."""
        if not decodes or self.kv.has_room_for_decode(decodes):
            return decodes
        if len(decodes) < len(self.queues.running):
            return []  # some requests may end with the step in flight and release their KV: wait for that
        kept = list(decodes)
        retracted = []
        victims = iter(retraction_order(decodes, self.queues.unfinished))
        while self.kv.decode_shortfall(kept) > 0:
            # The last one is no victim. Alone, a request fits: ReqFactory accepts none that is longer than the pool.
            victim = next(victims)
            if victim.stage is Stage.DECODING:
                kept.remove(victim)
            self._retract(victim)
            retracted.append(victim)
        self.queues.send_back(retracted)
        self.ratio.on_retract(kept)
        return kept

    def retract_all(self) -> None:
        """Sends every request with KV back to the waiting queue. No step may be in flight."""
        holders = self.queues.holders()
        for req in holders:
            self._retract(req)
        self.queues.send_back(holders)

    def _retract(self, req: Req) -> None:
        """Release the KV of a request, which keeps its output. The cache keeps the KV until it is evicted."""
        self.kv.release(req)
        req.on_retract()
        self.num_retractions += 1
