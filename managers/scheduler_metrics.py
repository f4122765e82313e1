"""The scheduler's counters, and its log lines for operators and tools."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..srt.io_struct import AbortFinish, SchedulerState
from ..srt.speculation_state import SpeculationState
from .kv_cache_manager import KVCacheManager
from .req import Req
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)


class SchedulerMetrics:
    """Counters since the start, and the throughput over the last `decode_log_interval` steps.

    The throughput of an idle engine is 0. Until the first interval of a busy engine has ended, it is that so far.
    """

    def __init__(self, decode_log_interval: int, clock: Callable[[], float]) -> None:
        """`clock`: seconds from any start."""
        self.num_finished = 0
        self.num_aborted = 0
        self._interval = decode_log_interval
        self._gen_throughput: float | None = None
        """Of the last interval; None if none has ended since the engine was idle."""
        self._cached_tokens = 0
        self._prompt_tokens = 0
        self._num_steps = 0
        self._num_verifications = self._num_drafts = self._num_accepted_drafts = 0
        """See SpeculationState."""
        self._speculation_before = SpeculationState()
        """Its counts when the interval began."""
        self.generated_tokens = 0
        self._tokens_before = 0
        """Those that were generated before the interval."""
        self._interval_s = 0.0
        """Seconds of work in the interval, up to `_busy_since`."""
        self._busy_since: float | None = None
        """When `_interval_s` was last updated; None while the engine is idle."""
        self._clock = clock

    @property
    def cache_hit_rate(self) -> float:
        return self._cached_tokens / max(self._prompt_tokens, 1)

    def on_arrival(self, req: Req) -> None:
        req.arrived_s = self._clock()

    def on_launch(self, batch: ScheduleBatch, kv: KVCacheManager, queues: RequestQueues) -> None:
        if self._busy_since is None:
            self._busy_since = self._clock()
        if batch.num_prompt_tokens:
            self._on_extend(batch, kv, queues)
        if batch.reqs:
            self._num_steps += 1
            if self._num_steps % self._interval == 0:
                self._end_interval(kv, queues)

    def on_result(self, num_tokens: int) -> None:
        """The outputs of all requests have grown by so many tokens. What a step returned beside them is dropped."""
        self.generated_tokens += num_tokens

    def on_verified(self, num_drafts: int, num_accepted: int) -> None:
        """A step has verified the drafts of one request. `num_accepted`: see SpeculationState."""
        self._num_verifications += 1
        self._num_drafts += num_drafts
        self._num_accepted_drafts += num_accepted

    @property
    def speculation(self) -> SpeculationState:
        return SpeculationState(
            num_verifications=self._num_verifications,
            num_drafts=self._num_drafts,
            num_accepted_drafts=self._num_accepted_drafts,
        )

    def on_idle(self) -> None:
        """Nothing runs from now until the next launch."""
        if self._busy_since is not None:
            self._interval_s += self._clock() - self._busy_since
            self._busy_since = None
            self._gen_throughput = None

    @property
    def gen_throughput(self) -> float:
        """Generated tokens per second."""
        if self._busy_since is None:
            return 0.0
        return self._throughput_at(self._clock()) if self._gen_throughput is None else self._gen_throughput

    def on_finish(self, req: Req) -> None:
        self.num_finished += 1
        self.num_aborted += isinstance(req.finish, AbortFinish)

    def state(
        self,
        kv: KVCacheManager,
        queues: RequestQueues,
        *,
        new_token_ratio: float,
        num_retractions: int,
        num_kv_repairs: int,
        is_paused: bool,
        speculates: bool,
    ) -> SchedulerState:
        return SchedulerState(
            num_running=len(queues.holders()),
            num_waiting=len(queues.waiting),
            num_free_tokens=kv.allocator.num_free,
            num_evictable_tokens=kv.cache.evictable_size,
            num_protected_tokens=kv.cache.protected_size,
            num_private_tokens=kv.num_private(queues.holders()),
            max_total_num_tokens=kv.allocator.size,
            last_gen_throughput=self.gen_throughput,
            cache_hit_rate=self.cache_hit_rate,
            num_retractions=num_retractions,
            num_aborted=self.num_aborted,
            num_finished=self.num_finished,
            num_kv_repairs=num_kv_repairs,
            new_token_ratio=new_token_ratio,
            num_waiting_uncached_tokens=_uncached_tokens(queues),
            num_retained_tokens=kv.cache.retained_size,
            num_saved_states=kv.cache.num_states,
            is_paused=is_paused,
            tiers=None if kv.tiers is None else kv.tiers.state(),
            speculation=self.speculation if speculates else None,
        )

    def _on_extend(self, batch: ScheduleBatch, kv: KVCacheManager, queues: RequestQueues) -> None:
        new_rows = {new.row for new in batch.inputs.new_rows}
        admitted = [req for req in batch.reqs if req.row in new_rows]
        # The others were counted at an earlier admission: by this engine, or by a dead one, which gave them output.
        first_admitted = [req for req in admitted if not req.num_retractions and not req.output_ids]
        cached = sum(req.cached_tokens or 0 for req in first_admitted)
        self._cached_tokens += cached
        self._prompt_tokens += sum(len(req.prompt_ids) for req in first_admitted)
        now = self._clock()
        for req in admitted:
            if req.queue_time_s is None:
                req.queue_time_s = now - req.arrived_s
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
                "#running-req: %d, #queue-req: %d",
                len(admitted),
                batch.num_prompt_tokens,
                cached,
                kv.num_used / kv.allocator.size,
                len(queues.running),
                len(queues.waiting),
            )

    def _throughput_at(self, now: float) -> float:
        """Of the interval that has not ended."""
        assert self._busy_since is not None
        num_tokens = self.generated_tokens - self._tokens_before
        return num_tokens / max(self._interval_s + now - self._busy_since, 1e-9)

    def _end_interval(self, kv: KVCacheManager, queues: RequestQueues) -> None:
        now = self._clock()
        generates = self.generated_tokens > self._tokens_before
        self._gen_throughput = self._throughput_at(now)
        self._busy_since = now
        self._interval_s = 0.0
        self._tokens_before = self.generated_tokens
        speculation = self.speculation
        drafts, self._speculation_before = speculation.since(self._speculation_before), speculation
        if not generates:  # for example, a server of embeddings
            return
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, gen throughput (token/s): %.2f, "
            "#queue-req: %d%s",
            len(queues.running),
            kv.num_used,
            kv.num_used / kv.allocator.size,
            self._gen_throughput,
            len(queues.waiting),
            f", accept len: {drafts.accept_length:.2f}" if drafts.num_verifications else "",
        )


def _uncached_tokens(queues: RequestQueues) -> int:
    """Tokens of prompts that are still to be computed."""
    waiting = sum(req.num_tokens - req.matched_len for req in queues.waiting)
    return waiting + sum(req.num_tokens - req.kv_len for req in queues.unfinished)
