"""The scheduler: decides each step of the model, and accounts for every request and every KV slot.

    waiting --admit--> extending --last chunk--> decoding --> finished
       ^                   |                        |
       '-----retract-------'------------------------'          (anything --> aborted)

A turn of the loop is a paragraph: receive, plan step N, launch it, process the results of step N-1. With overlap the
device works on N while the host processes N-1 and plans N+1; without, N is processed at once. The two differ in nothing
else: the newest token of each request stays on the device, so planning never needs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from ..model_executor.step import LaunchedStep, Runner
from ..srt.errors import TercetError
from ..srt.io_struct import (
    AbortFinish,
    AbortReq,
    BrokenMessage,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    SchedulerState,
    StateReply,
    StateReq,
    ToScheduler,
)
from .batch_result import ResultProcessor
from .idle_audit import IdleAudit
from .planner import Planner
from .req import Req
from .req_factory import ReqFactory
from .schedule_batch import ScheduleBatch
from .scheduler_io import SchedulerIO
from .scheduler_metrics import SchedulerMetrics

logger = logging.getLogger(__name__)


class InFlight(NamedTuple):
    """A launched step whose tokens are not processed yet."""

    batch: ScheduleBatch
    step: LaunchedStep


class Scheduler:
    """Continuous batching over one runner. `turn` is the body of the loop, `run` loops."""

    def __init__(
        self,
        planner: Planner,
        runner: Runner,
        io: SchedulerIO,
        req_factory: ReqFactory,
        metrics: SchedulerMetrics,
        *,
        enable_overlap: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`planner`: its queues and its KV are those of the scheduler. `clock`: seconds from any start."""
        self.queues = planner.queues
        self.kv = planner.kv
        self._runner = runner
        self._io = io
        self._req_factory = req_factory
        self._metrics = metrics
        self._enable_overlap = enable_overlap
        self._planner = planner
        self._results = ResultProcessor(self.kv, self.queues, io, metrics)
        self._idle_audit = IdleAudit(self.kv, clock)

    def run(self, should_stop: Callable[[], bool]) -> None:
        in_flight: InFlight | None = None
        while not should_stop():
            in_flight = self.turn(in_flight)

    def turn(self, in_flight: InFlight | None) -> InFlight | None:
        """One turn: takes the step that is in flight, returns the one that is now."""
        idle = in_flight is None and not self.queues.is_busy
        for message in self._io.receive(may_sleep=idle and not self._idle_audit.is_running):
            self._handle(message)
        batch = self._planner.plan()
        launched = self._launch(batch) if batch is not None else None
        if in_flight is not None:
            self._process(in_flight)
        if launched is not None and not self._enable_overlap:
            self._process(launched)
            launched = None
        self._results.finish_aborted()
        self._io.flush(self.state)
        has_worked = batch is not None or in_flight is not None
        self._watch_idle(has_worked=has_worked, is_idle=launched is None and not self.queues.is_busy)
        return launched

    def state(self) -> SchedulerState:
        return self._metrics.state(
            self.kv,
            self.queues,
            new_token_ratio=self._planner.ratio.value,
            num_retractions=self._planner.num_retractions,
            num_kv_repairs=self._idle_audit.num_repairs,
        )

    def _handle(self, message: ToScheduler | BrokenMessage) -> None:
        match message:
            case GenerateReq():
                self._start(message)
            case AbortReq():
                for req in self._named(message.rid):
                    self._results.abort(req, AbortFinish("aborted by the client"))
            case FlushCacheReq():
                num_busy = len(self.queues)
                if num_busy == 0:
                    self.kv.flush()
                    self._idle_audit.restart()
                self._io.reply(FlushCacheReply(message.call_id, num_busy == 0, num_busy))
            case StateReq():
                self._io.reply(StateReply(message.call_id, self.state()))
            case BrokenMessage():
                self._fail_named(message)

    def _start(self, message: GenerateReq) -> None:
        try:
            req = self._req_factory.make(message, num_waiting=len(self.queues.waiting))
        except Exception as error:
            if not isinstance(error, TercetError):
                logger.exception("Could not create request %s", message.rid)
                error = TercetError("the scheduler could not create this request")
            self._io.refuse(message.rid, error, len(message.input_ids) // 4)
        else:
            self.queues.add(req)

    def _fail_named(self, message: BrokenMessage) -> None:
        error = TercetError(message.reason)
        for rid in message.rids:
            req = self.queues.find(rid)
            if req is None:
                self._io.refuse(rid, error)
            else:
                self._results.abort(req, AbortFinish.of(error))

    def _named(self, rid: str | None) -> list[Req]:
        """The live request of this id, if there is one; all live requests for None."""
        if rid is None:
            return self.queues.live()
        req = self.queues.find(rid)
        return [] if req is None else [req]

    def _launch(self, batch: ScheduleBatch) -> InFlight:
        step = self._runner.launch(batch.inputs)
        step.sample()
        for req in batch.reqs:
            req.in_flight += 1
        self._metrics.on_launch(batch, self.kv, self.queues)
        return InFlight(batch, step)

    def _process(self, in_flight: InFlight) -> None:
        self._results.process(in_flight.batch, in_flight.step.wait())

    def _watch_idle(self, *, has_worked: bool, is_idle: bool) -> None:
        """Both may be true: a turn can begin and end a request."""
        if has_worked or not is_idle:
            self._idle_audit.restart()
        if is_idle:
            self._planner.ratio.on_idle()
            self._metrics.on_idle()
            self._idle_audit.on_idle_turn()
