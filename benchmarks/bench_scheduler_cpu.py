"""Measure the processor time that the scheduler needs for a step, by phase. No model is loaded.

    tercet bench scheduler-cpu --num-running 256
    tercet bench scheduler-cpu --cases plain,logprobs --cost smollm2-135m-2-cores --page-size 32

The scheduler and its links are those of `tercet serve`. The device computes nothing, and its tokens are random. A new
request is sent whenever one ends, so nobody waits, except in the case `waiting`. Prompts share nothing. Only the
processor time of the scheduler's thread counts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from ..managers.engine_view import StepLog
from ..managers.kv_event_publisher import KVEventPublisher
from ..managers.kv_tiers import KVTiers
from ..managers.schedule_policy import MAX_SORTED
from ..managers.schedule_recorder import ScheduleRecorder, SchedulerEnds
from ..managers.scheduler_io import SchedulerIO
from ..managers.scheduler_process import build_scheduler
from ..srt.io_struct import GenerateReq, ToDetokenizer, ToScheduler, ToTokenizer
from ..srt.ipc import Receiver, RunDir, Sender
from ..srt.kv_events import KVEventsConfig
from ..srt.logprobs import LogprobOptions
from ..srt.model_files.model_config import ModelConfig
from ..srt.request_options import RequestOptions
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.step_journal import open_journal
from ..srt.text.tokenizer import load_tokenizer
from .argument_types import benchmark_parser, lengths, names, positive
from .engine_args import add_engine_arguments
from .metrics_cpu import metrics_ms
from .offline_workloads import Span
from .results import Result, add_results_arguments, finish, number
from .scheduler_cpu import (
    RECORDER_CALLS,
    NullDevice,
    Phase,
    PhaseTimer,
    TimedInbox,
    TimedOutbox,
    TimedScheduler,
    Turn,
    tell_planner,
)
from .scheduler_cpu_tiers import make_tiers, saved
from .simulator.arguments import engine_of
from .simulator.cost import PROFILES, DeviceProfile, load_profile
from .simulator.simulation import device_settings

_DEFAULT_COST = "llama-3.1-8b-h100-estimate"
_STOP_STRINGS = ["\n\nUser:", "\n\nSystem:"]
_FIGURES = ("p50", "p99", "mean")


@dataclasses.dataclass(frozen=True)
class Case:
    """What the requests ask for, and what is switched on in the server."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    needs_tokenizer: bool = False
    is_observed: bool = False
    num_waiting: int = 0
    """Requests that wait for memory, while rows are free."""
    has_tiers: bool = False
    """Whether host memory has the KV of all prompts."""
    has_events: bool = False
    """Whether KV events are published, to a reader that has subscribed."""


CASES = {
    "plain": Case(),
    "not-streamed": Case({"stream": False}),
    "stop-strings": Case(sampling={"stop": _STOP_STRINGS}, needs_tokenizer=True),
    "logprobs": Case({"logprobs": LogprobOptions(top_logprobs_num=5)}),
    "observed": Case(is_observed=True),
    "waiting": Case(num_waiting=MAX_SORTED),
    "tiers": Case(num_waiting=MAX_SORTED, has_tiers=True),
    "kv-events": Case(has_events=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases. Returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.cost)
        result = Result("scheduler-cpu", "Processor time of the scheduler", parser.prog, argv, None)
        for name in names("--cases", options.cases, CASES):
            server_args, config = _engine(parser, options, profile, CASES[name])
            turns = _run(CASES[name], server_args, config, profile, options)
            result.values[name] = _report(result, name, turns, profile)
            if CASES[name].is_observed:
                _add_metrics(result, result.values[name], turns, profile, options.num_running)
    except ValueError as error:
        parser.error(str(error))
    finish(result, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("scheduler-cpu", __doc__)
    parser.add_argument("--num-running", type=positive, default=256, help="running requests (default: %(default)s)")
    parser.add_argument("--num-steps", type=positive, default=1_000, help="steps to measure (default: %(default)s)")
    parser.add_argument(
        "--rounds",
        type=positive,
        default=5,
        help="runs of the same schedule. The least time of a step counts, because other processes use the same caches "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--input-len", type=lengths, default=Span(512, 512), help="tokens of a prompt, N or A-B (default: 512)"
    )
    parser.add_argument(
        "--output-len", type=lengths, default=Span(128, 1024), help="tokens of an answer, N or A-B (default: 128-1024)"
    )
    parser.add_argument(
        "--cases",
        metavar="A,B",
        default=",".join(CASES),
        help="plain: greedy and streamed; not-streamed; stop-strings; logprobs: five for each token; observed: with "
        "--record-schedule and --explain-schedule; waiting: while 128 requests wait for memory; tiers: as waiting, and "
        "host memory has all prompts; kv-events: with --kv-events-config and a reader (default: all)",
    )
    parser.add_argument(
        "--cost",
        metavar="NAME|FILE",
        default=_DEFAULT_COST,
        help=f"how long steps take on the device: a JSON file, or one of {', '.join(PROFILES)} (default: %(default)s)",
    )
    add_results_arguments(parser)
    add_engine_arguments(parser)
    return parser


def _engine(
    parser: argparse.ArgumentParser, given: argparse.Namespace, profile: DeviceProfile, case: Case
) -> tuple[ServerArgs, ModelConfig]:
    """The settings of the scheduler. By default, the KV pool has room for all requests. If requests shall wait, it has
    room for about `--num-running` of average length, and there are twice as many rows. Raises ValueError."""
    options = argparse.Namespace(**vars(given))
    if not hasattr(options, "max_running_requests"):
        options.max_running_requests = options.num_running * (2 if case.num_waiting else 1)
    if not hasattr(options, "max_total_tokens"):
        lens = (options.input_len, options.output_len)
        each = sum(span.low + span.high for span in lens) // 2 if case.num_waiting else sum(span.high for span in lens)
        options.max_total_tokens = options.num_running * (each + 64)
    server_args, config = engine_of(parser, options, profile, needs_only_shape=False)
    longest = options.input_len.high + options.output_len.high
    room = min(server_args.context_length or longest, server_args.max_total_tokens or longest)
    if longest > room:  # the scheduler would refuse it, and perhaps no step would ever run
        raise ValueError(f"--input-len and --output-len allow {longest} tokens, but a request has room for {room}")
    return server_args, config


def _run(
    case: Case, server_args: ServerArgs, config: ModelConfig, profile: DeviceProfile, options: argparse.Namespace
) -> list[Turn]:
    """The measured turns, each with the least time of all rounds. Raises ValueError."""
    rounds = [_round(case, server_args, config, profile, options) for _ in range(options.rounds)]
    turns = []
    for same in zip(*rounds, strict=True):
        assert len({turn.shape for turn in same}) == 1, "the rounds had different schedules"
        turns.append(min(same, key=lambda turn: sum(turn.spent_ns[1:])))
    return turns


def _round(
    case: Case, server_args: ServerArgs, config: ModelConfig, profile: DeviceProfile, options: argparse.Namespace
) -> list[Turn]:
    tiers = None
    if case.has_tiers:
        num_tokens = (options.num_running + case.num_waiting) * (options.input_len.high + options.output_len.high)
        tiers = make_tiers(device_settings(server_args).page_size, num_tokens)
    requests = saved(_requests(case, config.vocab_size, options.input_len, options.output_len), tiers)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tercet-cpu-")))
        if case.is_observed:
            server_args = dataclasses.replace(
                server_args, record_schedule=str(folder / "schedule"), explain_schedule=1.0
            )
        links = stack.enter_context(_Links.open())
        if case.has_events and server_args.disable_radix_cache:
            raise ValueError("--cases: kv-events needs the prefix cache")
        publisher = links.publisher(folder, stack) if case.has_events else None
        scheduler = _scheduler(case, server_args, config, profile, links, tiers, publisher, stack)
        gc.collect()
        if not gc.get_freeze_count():  # else the end would undo what the caller has frozen
            gc.freeze()  # as the process of a server does before its first request
            stack.callback(gc.unfreeze)
        waiting = scheduler.scheduler.queues.waiting
        links.send(requests, options.num_running + case.num_waiting)
        turns = scheduler.turns()
        num_ended = 0
        measured: list[Turn] = []
        while len(measured) < options.num_steps:
            turn = next(turns)
            if num_ended >= options.num_running // 2:  # all have begun, and half have been followed by others
                measured.append(turn)
            num_new = links.take_ended()
            num_ended += num_new
            links.send(requests, max(case.num_waiting - len(waiting), 0) if case.num_waiting else num_new)
    return measured


def _requests(case: Case, vocab_size: int, inputs: Span, outputs: Span) -> Iterator[GenerateReq]:
    rng = np.random.default_rng(1)
    for arrival in itertools.count():
        ids = rng.integers(vocab_size, size=rng.integers(*inputs, endpoint=True), dtype=np.int32)
        sampling = SamplingParams(
            max_new_tokens=int(rng.integers(*outputs, endpoint=True)),
            temperature=0.0,
            sampling_seed=arrival,
            **case.sampling,
        )
        request_options: dict[str, Any] = {"stream": True, **case.options, "sampling": sampling}
        yield GenerateReq(str(arrival), ids.tobytes(), RequestOptions(**request_options))


def _scheduler(
    case: Case,
    server_args: ServerArgs,
    config: ModelConfig,
    profile: DeviceProfile,
    links: _Links,
    tiers: KVTiers | None,
    publisher: KVEventPublisher | None,
    stack: contextlib.ExitStack,
) -> TimedScheduler:
    """Raises ValueError."""
    settings = device_settings(server_args)
    assert server_args.max_total_tokens is not None
    device = NullDevice(
        settings,
        max_total_num_tokens=server_args.max_total_tokens // settings.page_size * settings.page_size,
        vocab_size=config.vocab_size,
        excluded_ids=config.eos_token_ids,
        is_asynchronous=profile.is_asynchronous,
        timer=links.timer,
    )
    ends = SchedulerEnds(links.inbox, links.outbox, StepLog(time.monotonic))
    if server_args.record_schedule is not None:
        recorder = ScheduleRecorder(Path(server_args.record_schedule), server_args, config, device, time.monotonic)
        stack.callback(recorder.close)
        links.timer.wrap(recorder, RECORDER_CALLS, Phase.OBSERVE)
        ends = recorder.wrap(ends)
    tell_planner(ends.step_log, profile, links.timer)
    scheduler = build_scheduler(
        server_args,
        config,
        device,
        load_tokenizer(server_args.model_path, None) if case.needs_tokenizer else None,
        SchedulerIO(ends.inbox, ends.outbox, links.replies, time.monotonic),
        time.monotonic,
        step_log=ends.step_log,
        journal=open_journal(links.run_dir.journal, settings.max_running_requests),
        kv_events=publisher,
        tiers=tiers,
    )
    return TimedScheduler(scheduler, device)


class _Links:
    """Both ends of the scheduler's links. The ends of the scheduler are timed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: RunDir) -> None:
        self.timer = PhaseTimer()
        self._context = context
        self._router: zmq.Socket[bytes] | None = None
        """The reader of KV events."""
        inbox: Receiver[ToScheduler] = Receiver(context, run_dir.scheduler, ToScheduler)
        self._heard: Receiver[ToDetokenizer] = Receiver(context, run_dir.detokenizer, ToDetokenizer)
        self._nobody: Receiver[ToTokenizer] = Receiver(context, run_dir.tokenizer, ToTokenizer)
        self._requests: Sender[ToScheduler] = Sender(context, run_dir.scheduler)
        outputs: Sender[ToDetokenizer] = Sender(context, run_dir.detokenizer)
        self.run_dir = run_dir
        self.inbox = TimedInbox(inbox, self.timer)
        self.outbox = TimedOutbox(outputs, self.timer)
        self.replies: Sender[ToTokenizer] = Sender(context, run_dir.tokenizer)

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[_Links]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        run_dir = RunDir.create()
        try:
            yield cls(context, run_dir)
        finally:
            context.destroy(linger=0)
            run_dir.remove()

    def publisher(self, folder: Path, stack: contextlib.ExitStack) -> KVEventPublisher:
        """A publisher of KV events with a reader, as they are after the first minute."""
        times = iter([0.0])  # the first minute, in which all events are kept, is over before the first turn
        endpoint = f"ipc://{folder}/events"
        config = KVEventsConfig(publisher="zmq", endpoint=endpoint, replay_endpoint=f"ipc://{folder}/replay")
        publisher = KVEventPublisher(config, clock=lambda: next(times, time.time()))
        stack.callback(publisher.close)
        self._router = self._context.socket(zmq.SUB)
        self._router.setsockopt(zmq.SUBSCRIBE, b"")
        self._router.connect(endpoint)
        return publisher

    def send(self, requests: Iterator[GenerateReq], count: int) -> None:
        """Sends the next `count` requests."""
        for _ in range(count):
            self._requests.send(next(requests))
        self.inbox.num_sent += count

    def take_ended(self) -> int:
        """Reads all outputs. Returns the number of requests that have ended since the last call."""
        self._nobody.drain()
        self._heard.drain()
        while self._router is not None and self._router.poll(0):
            self._router.recv_multipart()
        num_ended, self.outbox.num_ended = self.outbox.num_ended, 0
        return num_ended


def _report(result: Result, name: str, turns: Sequence[Turn], profile: DeviceProfile) -> dict[str, Any]:
    """Adds the table of a case. Returns its values for programs."""
    kinds = {
        "decode": [turn for turn in turns if not turn.shape.is_extend],
        "extend": [turn for turn in turns if turn.shape.is_extend],
    }
    table = result.table(
        f"{name}: milliseconds of processor time per step",
        ["phase", *(f"{kind}, {figure}" for kind in kinds for figure in _FIGURES)],
    )
    spent_ms = {
        kind: np.array([turn.spent_ns for turn in some]).reshape(-1, len(Phase)) / 1e6 for kind, some in kinds.items()
    }
    phases = {phase.name.lower(): [phase] for phase in Phase if phase is not Phase.OUTSIDE}
    phases["total"] = [phase for phase in Phase if phase is not Phase.OUTSIDE]
    values: dict[str, Any] = {}
    for label, summed in phases.items():
        values[label] = {kind: _figures(ms[:, summed].sum(axis=1)) for kind, ms in spent_ms.items()}
        table.row(label, *(number(one) for figures in values[label].values() for one in figures.values()))
    device_ns = 1e9 * sum(profile.cost.seconds(turn.shape) for turn in turns)
    for what, phase in (("prefix cache", Phase.CACHE), ("observability", Phase.OBSERVE)):
        values[f"{phase.name.lower()}_share"] = share = sum(turn.spent_ns[phase] for turn in turns) / device_ns
        table.notes.append(f"{what}: {100 * share:.2f} % of the time of the device ({profile.name})")
    num_rows = _mean([turn.shape.num_rows for turn in kinds["decode"]])
    num_prompt_tokens = _mean([turn.shape.num_prompt_tokens for turn in kinds["extend"]])
    table.notes.append(
        f"{len(kinds['decode'])} decode steps of {num_rows:.0f} rows, and {len(kinds['extend'])} extend steps of "
        f"{num_prompt_tokens:.0f} prompt tokens, on average"
    )
    return values


def _add_metrics(
    result: Result, values: dict[str, Any], turns: Sequence[Turn], profile: DeviceProfile, num_running: int
) -> None:
    """Adds what `--enable-metrics` costs in the HTTP process."""
    values["metrics_ms"] = added_ms = metrics_ms(num_running)
    step_s = _mean([profile.cost.seconds(turn.shape) for turn in turns])
    values["metrics_share"] = share = added_ms / 1000 / step_s
    values["observability_share"] = all_share = values["observe_share"] + share
    result.tables[-1].notes += [
        f"HTTP process: counting {num_running} tokens takes {number(added_ms)} ms, {100 * share:.2f} % of such a step",
        f"observability, in both processes: {100 * all_share:.2f} % of the time of the device",
    ]


def _figures(ms: np.ndarray) -> dict[str, float | None]:
    if not len(ms):
        return dict.fromkeys(_FIGURES)
    return dict(zip(_FIGURES, [*np.percentile(ms, [50, 99]).tolist(), float(ms.mean())], strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


if __name__ == "__main__":
    sys.exit(main())
