"""The scheduler: decides each step of the model, and accounts for every request and every KV slot.

    waiting --admit--> extending --last chunk--> decoding --> finished
       ^                   |                        |
       '-----retract-------'------------------------'          (anything --> aborted)

A turn of the loop has four parts: receive, plan step N, launch it, process the results of step N-1. With overlap the
device works on N while the host processes N-1 and plans N+1; without, N is processed at once. The two differ in nothing
else: the newest token of each request stays on the device, so only a proposer of drafts needs it for a plan. Only the
choice of the tokens of N waits for the results of N-1, and only if a request in N has a grammar.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from ..model_executor.step import LaunchedStep, Runner
from ..srt.adapters import LoadAdapterReq, UnloadAdapterReq
from ..srt.errors import TercetError
from ..srt.grammar_spec import GrammarSpec
from ..srt.io_struct import (
    AbortFinish,
    AbortReq,
    BrokenMessage,
    EngineView,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    RetainReq,
    SchedulerState,
    StateReply,
    StateReq,
    ToScheduler,
    ViewReply,
    ViewReq,
    unpack_ids,
)
from ..srt.pause_messages import ContinueReq, PauseReq
from ..srt.profile_messages import StartProfileReq, StopProfileReq
from ..srt.step_journal import NO_JOURNAL, NoJournal, StepJournal
from ..srt.weight_messages import UpdateWeightsReq
from .adapters import Adapters
from .batch_result import ResultProcessor
from .engine_view import StepLog, view_engine
from .grammar_loader import GrammarLoader
from .idle_audit import IdleAudit
from .idle_work import IdleWork
from .kv_event_publisher import KVEventPublisher
from .kv_tiers import KVTiers
from .pause import Pause
from .planner import Planner
from .profiling import Profiling, StartTrace
from .queue_limits import QueueLimits
from .req import Req
from .req_factory import ReqFactory
from .schedule_batch import ScheduleBatch, build_copies
from .scheduler_io import SchedulerIO
from .scheduler_metrics import SchedulerMetrics
from .timeouts import Timeouts
from .token_masks import fill_masks, masked_indices
from .touch_ahead import TouchAhead
from .weight_updates import LoadWeights, WeightUpdates

logger = logging.getLogger(__name__)


class InFlight(NamedTuple):
    """A launched step whose tokens are not processed yet."""

    batch: ScheduleBatch
    step: LaunchedStep
    masked: list[int]
    """Indices in `batch.sampled` of requests that need a token mask. If there are any, the step is not sampled yet."""


class Scheduler:
    """Continuous batching on one runner. `run` is the loop, and `turn` is its body."""

    def __init__(
        self,
        planner: Planner,
        runner: Runner,
        io: SchedulerIO,
        req_factory: ReqFactory,
        metrics: SchedulerMetrics,
        grammars: GrammarLoader,
        timeouts: Timeouts,
        adapters: Adapters,
        *,
        enable_overlap: bool,
        clock: Callable[[], float],
        journal: StepJournal | NoJournal = NO_JOURNAL,
        max_queue_time_s: float | None = None,
        kv_events: KVEventPublisher | None = None,
        start_trace: StartTrace,
        load_weights: LoadWeights | None = None,
        touch_ahead: TouchAhead | None = None,
        step_log: StepLog | None = None,
    ) -> None:
        """`planner`: its queues and its KV are those of the scheduler. `clock`: seconds from any start; the
        clock of `io` and `metrics`, too. `max_queue_time_s`: see QueueLimits. `start_trace`: starts the recording of a
        profile. `load_weights`: loads other weights into `runner`. `step_log`: measures the steps; None: by `clock`."""
        self.queues = planner.queues
        self.kv = planner.kv
        self._profiling = Profiling(runner, io, start_trace)
        self._io = io
        self._req_factory = req_factory
        self._metrics = metrics
        self._grammars = grammars
        self._timeouts = timeouts
        self.adapters = adapters
        self._enable_overlap = enable_overlap
        self._journal = journal
        self._kv_events = kv_events
        self.planner = planner
        self._results = ResultProcessor(self.kv, self.queues, io, metrics)
        self._idle_work = IdleWork(IdleAudit(self.kv, clock), touch_ahead, self.kv.tiers)
        self._step_log = step_log or StepLog(clock)
        self._queue_limits = QueueLimits(max_queue_time_s, self.kv, self.queues, clock)
        self._pause = Pause(planner, timeouts, self._queue_limits, io)
        self._weights = WeightUpdates(load_weights, self.kv, self.queues, io)

    def run(self, should_stop: Callable[[], bool]) -> None:
        in_flight: InFlight | None = None
        while not should_stop():
            in_flight = self.turn(in_flight)
        self._profiling.close()
        if self.kv.tiers is not None:
            self._close_tiers(self.kv.tiers, in_flight)

    def turn(self, in_flight: InFlight | None) -> InFlight | None:
        """Runs one turn. Takes the step that is in flight, and returns the step that is in flight afterwards."""
        idle = in_flight is None and (self._pause.is_on or not (self.queues.is_busy or self.kv.has_copies))
        # Paused requests are no idle engine: its work is not done beside them.
        for message in self._io.receive(may_sleep=idle and (self.queues.is_busy or not self._idle_work.is_due)):
            self._handle(message)
        if self._grammars.is_waiting:
            self._collect_grammars(may_wait=in_flight is None and self.queues.num_constrained == len(self.queues))
        if self._timeouts.is_armed:
            for req, reason in self._timeouts.take_late():
                self._results.abort(req, reason)
        batch = None if self._pause.is_on else self.planner.plan()
        launched = self._launch(batch) if batch is not None else None
        if in_flight is not None:
            self._process(in_flight)
        if launched is not None and launched.masked:
            self._sample_masked(launched)
        if launched is not None and not self._enable_overlap:
            self._process(launched)
            launched = None
        has_worked = batch is not None or in_flight is not None
        if has_worked and launched is None:
            self._journal.end()
        self._results.finish_aborted()
        if self.adapters.is_unloading:
            self.adapters.finish_unloads(() if launched is None else launched.batch.reqs)
        if self._pause.is_beginning:
            self._pause.complete()
            self._metrics.on_idle()
        if self._kv_events is not None:
            self._kv_events.flush()
        self._io.flush(self.state)
        self._watch_idle(has_worked=has_worked, is_idle=launched is None and not self.queues.is_busy)
        return launched

    def state(self) -> SchedulerState:
        return self._metrics.state(
            self.kv,
            self.queues,
            new_token_ratio=self.planner.ratio.value,
            num_retractions=self.planner.num_retractions,
            num_kv_repairs=self._idle_work.num_kv_repairs,
            is_paused=self._pause.is_on,
            speculates=self.planner.has_drafts,
        )

    def check_grammar(self, spec: GrammarSpec) -> None:
        """Compile a grammar in the caller's thread, and keep it. Raises InvalidRequest. For engines of one thread."""
        self._grammars.load(spec)

    def _handle(self, message: ToScheduler | BrokenMessage) -> None:
        match message:
            case GenerateReq():
                self._start(message)
            case AbortReq():
                for req in self._named(message.rid):
                    self._results.abort(req, AbortFinish("aborted by the client"))
            case RetainReq():
                self.kv.retain(unpack_ids(message.token_ids), message.seconds, message.options)
                self._idle_work.restart()
            case FlushCacheReq():
                num_busy = len(self.queues.holders() if self._pause.is_on else self.queues)
                if num_busy == 0:
                    self.kv.flush()
                    self._idle_work.restart()
                self._io.reply(FlushCacheReply(message.call_id, num_busy))
            case PauseReq():
                self._pause.begin(message)
            case ContinueReq():
                self._pause.end(message)
            case StartProfileReq() | StopProfileReq():
                self._profiling.handle(message)
            case UpdateWeightsReq():
                self._weights.update(message, is_paused=self._pause.is_on and not self._pause.is_beginning)
                self._idle_work.restart()
            case LoadAdapterReq():
                self.adapters.load(message)
            case UnloadAdapterReq():
                self.adapters.unload(message)
            case StateReq():
                self._io.reply(StateReply(message.call_id, self.state()))
            case ViewReq():
                self._io.reply(ViewReply(message.call_id, self._view(message.after_step)))
            case BrokenMessage():
                self._fail_named(message)

    def _view(self, after_step: int) -> EngineView:
        generated = self._metrics.generated_tokens
        return view_engine(self.state(), generated, self._step_log, after_step, self.queues, self.kv.cache)

    def _start(self, message: GenerateReq) -> None:
        try:
            req = self._req_factory.make(message)
            self._queue_limits.on_arrival(req)
            if message.resumed is None:  # a resumed request was accepted before
                self._queue_limits.check_wait(req)
                self._make_place_for(req)
            grammar = req.options.grammar
            if grammar is not None:
                self._grammars.attach(req, grammar)
        except Exception as error:
            if not isinstance(error, TercetError):
                logger.exception("Could not create request %s", message.rid)
                error = TercetError("the scheduler could not create this request")
            self._io.refuse(message.rid, error, len(message.input_ids) // 4)
        else:
            self.queues.add(req)
            self._metrics.on_arrival(req)
            self._timeouts.on_arrival(req, message.waited_s)
            if req.finish is not None:
                self._results.finish(req, req.finish)

    def _collect_grammars(self, *, may_wait: bool) -> None:
        for req, error in self._grammars.collect(may_wait=may_wait):
            self._fail(req, error)

    def _make_place_for(self, req: Req) -> None:
        """Raises QueueFull if the waiting queue is full, unless a waiting request gets that error instead."""
        refusal = self._queue_limits.make_room(req)
        if refusal is None:
            return
        refused, error = refusal
        if refused is req:
            raise error
        self._results.finish(refused, AbortFinish.of(error))

    def _fail_named(self, message: BrokenMessage) -> None:
        error = TercetError(message.reason)
        for rid in message.rids:
            req = self.queues.find(rid)
            if req is None:
                self._io.refuse(rid, error)
            else:
                self._fail(req, error)

    def _named(self, rid: str | None) -> list[Req]:
        """The live request of this id, if any. For None: all live requests."""
        if rid is None:
            return self.queues.live()
        req = self.queues.find(rid)
        return [] if req is None else [req]

    def _launch(self, batch: ScheduleBatch) -> InFlight:
        self._journal.begin(
            batch.reqs,
            batch.num_prompt_tokens,
            self.queues.unfinished,
            batch.num_drafts,
            had_several_tokens=self._results.take_several_tokens(),
        )
        self._step_log.on_launch()
        step = self._profiling.runner.launch(batch.inputs)
        masked = masked_indices(batch.sampled) if self.queues.num_constrained else []
        if not masked:
            step.sample()
        for req in batch.reqs:
            req.num_steps_in_flight += 1
        if batch.num_prompt_tokens:
            self._timeouts.on_launch(batch.reqs)
        self._metrics.on_launch(batch, self.kv, self.queues)
        if batch.num_prompt_tokens:
            self._queue_limits.on_extend(batch)
        return InFlight(batch, step, masked)

    def _sample_masked(self, launched: InFlight) -> None:
        """Sample a step with grammars. All tokens before it are processed, and the forward pass may still run."""
        masks = fill_masks(launched.batch, launched.masked, self._grammars.num_words, self._fail)
        launched.step.sample(masks)

    def _fail(self, req: Req, error: TercetError) -> None:
        self._results.abort(req, AbortFinish.of(error))

    def _process(self, in_flight: InFlight) -> None:
        output = in_flight.step.wait()
        if in_flight.batch.inputs.kv_copies is not None:
            self.kv.on_copied()
        self.planner.on_result(in_flight.batch, self._step_log.on_result(in_flight.batch))
        self._results.process(in_flight.batch, output)

    def _watch_idle(self, *, has_worked: bool, is_idle: bool) -> None:
        """Both may be true: a turn can begin and end a request."""
        if has_worked or not is_idle:
            self._idle_work.restart()
        if is_idle:
            self.planner.ratio.on_idle()
            self._metrics.on_idle()
            self._idle_work.on_idle_turn()
        elif not has_worked:
            self.kv.wait_for_storage()

    def _close_tiers(self, tiers: KVTiers, in_flight: InFlight | None) -> None:
        """Writes the KV of the requests that have ended, at the end of the scheduler."""
        if in_flight is not None:
            self._process(in_flight)
        batch = build_copies(self.kv)
        if batch is not None:
            self._process(self._launch(batch))
        tiers.close()
