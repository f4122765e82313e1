"""Processes a finished step: each request appends its tokens, may end and release its KV, and sends its output."""

from __future__ import annotations

import logging

from ..model_executor.step import StepOutput
from ..srt.errors import InvalidLogits, TercetError
from ..srt.io_struct import AbortFinish, FinishReason
from .kv_cache_manager import KVCacheManager
from .req import Req, Stage
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch
from .scheduler_io import SchedulerIO
from .scheduler_metrics import SchedulerMetrics

logger = logging.getLogger(__name__)


class ResultProcessor:
    """Processes results of steps. Only this class ends requests."""

    def __init__(self, kv: KVCacheManager, queues: RequestQueues, io: SchedulerIO, metrics: SchedulerMetrics) -> None:
        self._kv = kv
        self._queues = queues
        self._io = io
        self._metrics = metrics
        self._aborted: list[Req] = []

    def process(self, batch: ScheduleBatch, output: StepOutput) -> None:
        """`output`: of the rows in `batch.sampled`.

        The finish test, in order: pending abort, invalid logits, stop string, stop token or EOS, length.
        """
        for req in batch.reqs:
            req.in_flight -= 1
        for req, tokens in zip(batch.sampled, output.rows(), strict=True):
            if tokens[-1] < 0:
                self._on_invalid_logits(req)
                continue
            # It ended while these tokens were being computed, or `finish_aborted` will end it.
            if req.stage is Stage.FINISHED or req.pending_abort is not None:
                continue
            try:
                finish = req.accept(tokens)
            except Exception:
                # The stop checker of one request must not take its neighbours down.
                logger.exception("Could not check the stop strings of request %s", req.rid)
                finish = AbortFinish.of(TercetError("the stop strings of this request could not be checked"))
            if finish is not None:
                self.finish(req, finish)
            elif req.has_news:
                self._io.put(req.take_news())
        self._metrics.on_result(batch)

    def _on_invalid_logits(self, req: Req) -> None:
        """Ends the request, unless it has ended while this step was in flight. What it computed leaves the cache,
        whatever its end was and wherever it waits."""
        if req.stage is not Stage.FINISHED:
            invalid = InvalidLogits("the model's logits for this request are not finite")
            self.finish(req, req.pending_abort or AbortFinish.of(invalid))
        self._kv.discard(req)

    def finish(self, req: Req, reason: FinishReason) -> None:
        """The request ends now, wherever it is; its KV goes to the cache."""
        req.finish = reason
        if req.row:
            self._kv.release(req)
        self._queues.finish(req)
        self._io.put(req.take_news())
        self._metrics.on_finish(req)

    def abort(self, req: Req, reason: AbortFinish) -> None:
        """The request takes part in no further step, and ends when no step in flight has it."""
        if req.pending_abort is None:
            req.pending_abort = reason
            self._aborted.append(req)

    def finish_aborted(self) -> None:
        still_in_flight = []
        for req in self._aborted:
            if req.in_flight:
                still_in_flight.append(req)
            elif req.stage is not Stage.FINISHED:
                assert req.pending_abort is not None
                self.finish(req, req.pending_abort)
        self._aborted = still_in_flight
