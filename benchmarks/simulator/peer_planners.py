"""The rules by which SGLang and vLLM fill a step, as planners for simulations.

Only the choice of the tokens of a step follows the peer. The memory rules, the prefix cache, the policies of the queue
and the retraction are Tercet's, so a difference between two planners comes from that choice. Two prompts of one step do
not share what they have in common. `--max-itl-ms` has no effect on them, because the peers have no such bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from ...managers.kv_cache_manager import KVCacheManager
from ...managers.planner import PlanLimits, Planner
from ...managers.prefill_adder import Extend, PrefillAdder
from ...managers.req import Req
from ...managers.request_queues import RequestQueues
from ...managers.schedule_batch import ScheduleBatch


class InOrderAdder(PrefillAdder):
    """Takes the unfinished prompt and then the waiting ones in their order, until the step is full. The last one is cut
    to what is left, so at most one prompt is unfinished at a time."""

    def fill(self, waiting: Iterable[Req], *, due: Req | None = None) -> list[Extend]:
        for req in list(self._unfinished):
            self._go_on(req, self._tokens_left)
        if not self._unfinished:
            for req in waiting:
                if self._chunk is not None or not self._admit_next(req):
                    break
        return self.extends

    def _admit_next(self, req: Req) -> bool:
        """Whether the step had room for at least a page of the prompt."""
        if not self._kv.req_to_token_pool.num_free or self._tokens_left < self._page:
            return False
        match = self._kv.match(req)
        with self._kv.locked(match):
            if not self._fits(req, req.num_tokens - len(match.slots)):
                return False
            self._kv.admit(req, match)
        self._reserve(req)
        self._take(req, self._cut(req, min(self._tokens_left, self._chunk_size)))
        return True


class PrefillFirst(Planner):
    """SGLang's rule: a step has prompts for as long as there is one that can go on. Otherwise it decodes.

    `chunked_prefill_size` bounds all prompt tokens of a step. With `enable_mixed_chunk`, decodes take part in steps of
    prompts, and their tokens count. Source: `get_next_batch_to_run` of SGLang 0.5.
    """

    adder_type = InOrderAdder

    def __init__(
        self, limits: PlanLimits, kv: KVCacheManager, queues: RequestQueues, *, clock: Callable[[], float]
    ) -> None:
        max_tokens = min(limits.max_prefill_tokens, limits.chunked_prefill_size)
        limits = dataclasses.replace(
            limits, max_prefill_tokens=max_tokens, chunked_prefill_size=max_tokens, max_itl_s=None
        )
        super().__init__(limits, kv, queues, clock=clock)

    def _decodes_after(self, batch: ScheduleBatch) -> int:
        return 0


class DecodeFirst(Planner):
    """vLLM's rule: every step has the next token of every running request. Prompts get the rest of a fixed number of
    tokens, `max_prefill_tokens`. Source: `Scheduler.schedule` of vLLM 0.11 (V1)."""

    adder_type = InOrderAdder

    def __init__(
        self, limits: PlanLimits, kv: KVCacheManager, queues: RequestQueues, *, clock: Callable[[], float]
    ) -> None:
        limits = dataclasses.replace(
            limits, chunked_prefill_size=limits.max_prefill_tokens, enable_mixed_chunk=True, max_itl_s=None
        )
        super().__init__(limits, kv, queues, clock=clock)


TERCET = "tercet"
PLANNERS: dict[str, type[Planner] | None] = {TERCET: None, "sglang-rule": PrefillFirst, "vllm-rule": DecodeFirst}
"""None: the planner of the settings."""
