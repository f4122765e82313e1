"""One run: the scheduler of the server, with its planner, KV manager and prefix cache, in simulated time."""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from ...managers.engine_view import StepLog
from ...managers.planner import Planner
from ...managers.schedule_batch import ScheduleBatch
from ...managers.scheduler import InFlight
from ...managers.scheduler_io import SchedulerIO
from ...managers.scheduler_process import build_scheduler
from ...managers.step_cost import StepShape
from ...managers.token_gap import TokenGapBound
from ...managers.token_out_reader import TokenOutReader
from ...managers.tool_call_retention import tool_call_retention_s
from ...srt.io_struct import (
    AbortReq,
    GenerateReq,
    RetainReq,
    StopFinish,
    ToDetokenizer,
    TokenOut,
    ToScheduler,
    ToTokenizer,
)
from ...srt.model_files.model_config import ModelConfig
from ...srt.request_options import RequestOptions
from ...srt.sampling_params import SamplingParams
from ...srt.server_args import ServerArgs
from .cost import DeviceProfile
from .device import DeviceSettings, SimClock, SimDevice, eos_id
from .optimum import PrefixTrace
from .scatter import Scatter
from .statistics import RunStatistics, Served
from .traffic import SimRequest, Traffic

_MAX_STALLED_TURNS = 64
_GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, sampling_seed=0)


@dataclass(slots=True)
class LiveRequest:
    """A request that has arrived and not ended."""

    request: SimRequest
    num_output_tokens: int
    recorded_ids: np.ndarray | None
    row: int = 0
    last_token_s: float = float("nan")
    was_admitted: bool = False
    first_token_s: float | None = None
    num_received: int = 0
    output_ids: list[int] | None = None
    """None: nobody needs them."""


@dataclass(frozen=True)
class HitRates:
    """Shares of prompt tokens that the cache had, over the first requests of a run."""

    num_requests: int
    found: float
    best: float
    """With Belady's rule in a cache of the size of the KV pool, which running requests would take no part of."""


class Simulation:
    """The run of one traffic with one set of settings. `run` may be called once."""

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        profile: DeviceProfile,
        traffic: Traffic,
        statistics: RunStatistics,
        num_traced: int = 0,
        planner_type: type[Planner] | None = None,
        *,
        scatter: Scatter | None = None,
        learned: TokenGapBound | None = None,
    ) -> None:
        """`server_args`: page size, context length and limits must be set. `num_traced`: requests for `hit_rates`.
        `planner_type`: None: the planner of the settings. `scatter`: of the times of steps. `learned`: the bound on
        token gaps with which the planner begins; it is changed. None: nothing is learned yet.

        Raises ValueError for settings that do not fit together.
        """
        settings = device_settings(server_args)
        assert server_args.max_total_tokens is not None
        self.clock = SimClock()
        self.statistics = statistics
        self.live: dict[int, LiveRequest] = {}
        self.max_live = 0
        self.cpu_s = 0.0
        self._traffic = traffic
        self._num_traced = num_traced
        self._num_admitted = 0
        self._num_traced_hits = 0
        self._trace = PrefixTrace(settings.page_size)
        self._aborts: list[tuple[float, int]] = []
        self._retained: list[RetainReq] = []
        """Of the answers that were tool calls, since the last turn."""
        self._honours_retention = server_args.honours_retention
        self._tool_call_retention_s = tool_call_retention_s(server_args)
        self.device = SimDevice(
            settings,
            max_total_num_tokens=server_args.max_total_tokens // settings.page_size * settings.page_size,
            vocab_size=model_config.vocab_size,
            profile=profile,
            clock=self.clock,
            requests=self.live,
            watcher=self,
            scatter=scatter,
        )
        self.scheduler = build_scheduler(
            server_args,
            dataclasses.replace(model_config, eos_token_ids=(eos_id(model_config.vocab_size),)),
            self.device,
            None,
            SchedulerIO(_Inbox(self, profile.wake_s), _Outputs(self), _Nobody(), self.clock),
            self.clock,
            compile_grammars_here=True,
            slot_of=lambda ref: 1,  # the device computes nothing
            planner_type=planner_type,
            step_log=_DeviceTimes(self.clock, self.device),
        )
        if learned is not None:
            self.scheduler.planner.gap = learned

    def run(self) -> None:
        """Runs until all requests have ended. Raises RuntimeError if the scheduler can never go on."""
        began = time.process_time()
        in_flight: InFlight | None = None
        num_stalled = 0
        while self.live or in_flight is not None or self.next_s is not None:
            before_s = self.clock.now_s
            in_flight = self.scheduler.turn(in_flight)
            is_stalled = in_flight is None and self.clock.now_s == before_s and bool(self.live)
            num_stalled = num_stalled + 1 if is_stalled else 0
            if num_stalled > _MAX_STALLED_TURNS:
                if self.next_s is None:
                    raise RuntimeError(f"the scheduler runs none of {len(self.live)} requests")
                self.clock.advance_to(self.next_s)
        self.cpu_s = time.process_time() - began

    @property
    def num_retractions(self) -> int:
        return self.scheduler.state().num_retractions

    def hit_rates(self) -> HitRates | None:
        """The hit rate of the first requests, and the best that any cache could reach on the same prompts in the same
        order. None if there is nothing to compare."""
        if not self._trace.num_prompt_tokens:
            return None
        total = self._trace.num_prompt_tokens
        best = self._trace.best_hits(self.device.max_total_num_tokens)
        return HitRates(min(self._num_admitted, self._num_traced), self._num_traced_hits / total, best / total)

    # The clients

    @property
    def next_s(self) -> float | None:
        """When the next message arrives; None: not before a request ends, or never."""
        if self._retained:
            return self.clock.now_s
        while self._aborts and self._aborts[0][1] not in self.live:
            heapq.heappop(self._aborts)  # its request has ended before its client would have left
        times = [
            at_s for at_s in (self._traffic.next_s, self._aborts[0][0] if self._aborts else None) if at_s is not None
        ]
        return min(times, default=None)

    def messages(self) -> Iterator[ToScheduler]:
        """The messages that have arrived by now."""
        now_s = self.clock.now_s
        retained, self._retained = self._retained, []
        yield from retained
        for request in self._traffic.take(now_s):
            keeps_ids = (
                request.session is not None or request.ends_in_tool_call or self._num_admitted < self._num_traced
            )
            self.live[request.number] = LiveRequest(
                request, request.num_output_tokens, request.recorded_ids, output_ids=[] if keeps_ids else None
            )
            if request.aborts_after_s is not None:
                heapq.heappush(self._aborts, (request.arrival_s + request.aborts_after_s, request.number))
            yield GenerateReq(str(request.number), request.prompt_ids.tobytes(), self.options_of(request))
        self.max_live = max(self.max_live, len(self.live))
        while self._aborts and self._aborts[0][0] <= now_s:
            _, number = heapq.heappop(self._aborts)
            if number in self.live:
                yield AbortReq(str(number))

    def options_of(self, request: SimRequest) -> RequestOptions:
        sampling = msgspec.structs.replace(
            _GREEDY,
            max_new_tokens=request.max_new_tokens or request.num_output_tokens,
            sampling_seed=request.number,
            stop_token_ids=None if request.stop_id is None else [request.stop_id],
        )
        if request.options is not None:
            options = msgspec.structs.replace(
                request.options, sampling=sampling, logprobs=None, pooling=None, return_hidden_states=False
            )
            if not self._honours_retention:
                options = msgspec.structs.replace(options, session_id="", retention_seconds=None)
            return options
        return RequestOptions(sampling=sampling, priority=request.priority, tenant=str(request.tenant))

    def on_output(self, out: TokenOut) -> None:
        """A client receives tokens, or the end of its request."""
        number = int(out.rid)
        live = self.live[number]
        now_s = self.clock.now_s
        if live.output_ids is not None:
            live.output_ids.extend(out.token_ids)
        live.num_received += len(out.token_ids)
        if live.first_token_s is None and out.token_ids:
            live.first_token_s = now_s
        if out.finish is None:
            return
        del self.live[number]
        request = live.request
        self.statistics.add(
            Served(
                request.tenant,
                len(request.prompt_ids),
                live.num_received,
                request.arrival_s,
                live.first_token_s,
                now_s,
                out.finish,
            )
        )
        output_ids = live.output_ids or []
        if request.ends_in_tool_call and self._tool_call_retention_s and isinstance(out.finish, StopFinish):
            ids = np.concatenate([request.prompt_ids, np.array(output_ids, dtype=np.int32)]).tobytes()
            self._retained.append(RetainReq(out.rid, ids, self.options_of(request), self._tool_call_retention_s))
        if output_ids and self._num_admitted <= self._num_traced:
            self._trace.insert(
                np.concatenate([request.prompt_ids, np.array(output_ids[:-1], dtype=np.int32)]), _namespace(request)
            )
        self._traffic.on_end(request, now_s, output_ids if request.session is not None else [])

    # What the device sees

    def on_admission(self, number: int, num_cached: int) -> None:
        prompt_ids = self.live[number].request.prompt_ids
        self.statistics.on_admission(self.live[number].request.tenant, len(prompt_ids), num_cached)
        self._num_admitted += 1
        if self._num_admitted <= self._num_traced:
            self._num_traced_hits += num_cached
            self._trace.look_up(prompt_ids, _namespace(self.live[number].request))

    def on_token_gaps(self, gaps_s: np.ndarray) -> None:
        self.statistics.gaps.add_all(gaps_s)

    def on_step(self, shape: StepShape, start_s: float, end_s: float) -> None:
        """The figures of a run need no single steps."""


def _namespace(request: SimRequest) -> str:
    return "" if request.options is None else request.options.cache_salt


def device_settings(server_args: ServerArgs) -> DeviceSettings:
    """The limits of a device that loads no model. Raises ValueError if one of them is missing."""
    values = {}
    for field in dataclasses.fields(DeviceSettings):
        name = "context_length" if field.name == "context_len" else field.name
        values[field.name] = value = getattr(server_args, name)
        if value is None and field.name != "max_saved_states":
            raise ValueError(f"a simulation needs --{name.replace('_', '-')}")
    return DeviceSettings(**values)


class _Inbox:
    """The messages to the scheduler. Waiting takes no time: the clock moves to the next message."""

    def __init__(self, simulation: Simulation, wake_s: float) -> None:
        self._simulation = simulation
        self._wake_s = wake_s

    def drain(self) -> list[ToScheduler]:
        return list(self._simulation.messages())

    def wait(self, timeout_s: float) -> bool:
        next_s = self._simulation.next_s
        if next_s is not None:
            self._simulation.clock.advance_to(next_s + self._wake_s)
        return next_s is not None


class _Outputs:
    """The scheduler's outputs, to the clients."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._reader = TokenOutReader()

    def send(self, message: ToDetokenizer, /) -> None:
        for out in self._reader.read(message):
            self._simulation.on_output(out)


class _DeviceTimes(StepLog):
    """Gives the planner the time of a step without the host's part before it, as in a server."""

    def __init__(self, clock: SimClock, device: SimDevice) -> None:
        super().__init__(clock)
        self._device = device

    def on_result(self, batch: ScheduleBatch) -> float:
        super().on_result(batch)
        return self._device.last_step_s


class _Nobody:
    def send(self, message: ToTokenizer, /) -> None:
        """Drops heartbeats."""
