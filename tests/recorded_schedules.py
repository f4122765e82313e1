"""A recorded scheduler on the fake runner, and random requests for it, for tests."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from kv_makers import make_tiers
from simulations import MODEL
from timed_rig import TimedStep

from fakes import FakeClock, FakeInbox, FakeOutbox, FakeRunner
from tercet.managers.engine_view import StepLog
from tercet.managers.schedule_recorder import ScheduleRecorder, SchedulerEnds
from tercet.managers.scheduler_io import SchedulerIO
from tercet.managers.scheduler_process import build_scheduler
from tercet.managers.token_out_reader import TokenOutReader
from tercet.model_executor.step import LaunchedStep, StepInputs
from tercet.srt.adapters import AdapterRef
from tercet.srt.io_struct import AbortReq, FlushCacheReq, GenerateReq, RetainReq, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.server_args import ServerArgs

VOCAB = 97
EOS = 5


@dataclasses.dataclass(frozen=True)
class Limits:
    page_size: int
    context_len: int = 256
    max_running_requests: int = 6
    max_saved_states: int | None = None
    max_prefill_tokens: int = 64
    chunked_prefill_size: int = 48


class Runner(FakeRunner):
    """The fake runner, with what the scheduler asks of an engine's. Its steps take time."""

    def __init__(
        self,
        page_size: int,
        clock: FakeClock,
        seconds_of: Callable[[StepInputs], float],
        *,
        is_asynchronous: bool,
        num_host_pages: int = 0,
    ) -> None:
        self.settings = Limits(page_size)
        self.max_total_num_tokens = 320
        self.is_asynchronous = is_asynchronous
        shape = (self.settings.max_running_requests + 1, self.settings.context_len)
        super().__init__(shape, self.max_total_num_tokens, page_size, VOCAB, num_host_pages)
        self._clock = clock
        self._seconds_of = seconds_of
        self._free_at_s = 0.0

    def launch(self, step: StepInputs) -> LaunchedStep:
        self._free_at_s = max(self._free_at_s, self._clock.now) + self._seconds_of(step)
        return TimedStep(super().launch(step), self._free_at_s, self._clock)


class Recorded:
    """A recorded scheduler, driven turn by turn. Each read of its clock takes time."""

    def __init__(
        self,
        path: Path,
        page_size: int,
        *,
        is_asynchronous: bool = False,
        host_blocks: int = 0,
        seconds_of: Callable[[StepInputs], float] = lambda step: 0.0,
        **settings: object,
    ) -> None:
        """`host_blocks`: pages of host memory; 0: there is none. `seconds_of`: the time that a step takes beside the
        reads of the clock."""
        self.inbox = FakeInbox()
        self.outbox = FakeOutbox()
        clock = FakeClock()

        def ticking() -> float:
            clock.now += 0.001
            return clock.now

        runner = Runner(page_size, clock, seconds_of, is_asynchronous=is_asynchronous, num_host_pages=host_blocks)
        args = ServerArgs(model_path="none", random_seed=3, admission_watermark=0.0, **settings)  # type: ignore[arg-type]
        self.runner = runner
        tiers = None
        if host_blocks:
            tiers = make_tiers(page_size, 1, runner.host.reshape(host_blocks, -1).view(np.uint8))
        self.recorder = ScheduleRecorder(path, args, dataclasses.replace(MODEL, vocab_size=VOCAB), runner, ticking)
        ends = self.recorder.wrap(SchedulerEnds(self.inbox, self.outbox, StepLog(ticking)))
        self.scheduler = build_scheduler(
            args,
            dataclasses.replace(MODEL, eos_token_ids=(EOS,)),
            runner,  # type: ignore[arg-type]
            None,
            SchedulerIO(ends.inbox, ends.outbox, FakeOutbox(), ticking),
            ticking,
            step_log=ends.step_log,
            tiers=tiers,
            compile_grammars_here=True,
        )

    def run(
        self, messages_of: Callable[[int], list[object]], num_turns: int, *, share_of_tool_calls: float = 0.0
    ) -> None:
        """`share_of_tool_calls`: of the answers. Their prefixes are retained."""
        in_flight = None
        rng = random.Random(num_turns)
        requests: dict[str, GenerateReq] = {}
        answers: dict[str, list[int]] = defaultdict(list)
        num_read = 0
        reader = TokenOutReader()
        for turn in range(100_000):
            if turn >= num_turns and in_flight is None and not self.scheduler.queues.is_busy:
                break
            self.inbox.messages.extend(messages_of(turn) if turn < num_turns else [])
            requests |= {one.rid: one for one in self.inbox.messages if isinstance(one, GenerateReq)}
            in_flight = self.scheduler.turn(in_flight)
            outs = [out for message in self.outbox.messages[num_read:] for out in reader.read(message)]
            num_read = len(self.outbox.messages)
            for out in outs:
                answers[out.rid] += out.token_ids
                if out.finish is not None and rng.random() < share_of_tool_calls:
                    request = requests[out.rid]
                    token_ids = request.input_ids + pack_ids(answers[out.rid])
                    self.inbox.messages.append(RetainReq(out.rid, token_ids, request.options, 3600.0))
        self.recorder.close()


def workload(seed: int, rate: float = 0.35, adapters: Sequence[AdapterRef] = ()) -> Callable[[int], list[object]]:
    """Random requests with shared prefixes, aborts and flushes, and turns without any."""
    rng = random.Random(seed)
    shared = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    names: list[str] = []

    def messages(turn: int) -> list[object]:
        found: list[object] = []
        while rng.random() < rate:
            own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
            prompt = rng.choice(shared)[: rng.randrange(41)] + own
            names.append(f"r{len(names)}")
            sampling = SamplingParams(
                max_new_tokens=rng.choice([0, 1, 5, 12, 70]),
                sampling_seed=rng.randrange(99),
                ignore_eos=rng.random() < 0.5,
            )
            salt = rng.choice(["", "", "a"])
            options = RequestOptions(
                sampling=sampling,
                cache_salt=salt,
                adapter=rng.choice([None, *adapters]) if adapters else None,
                priority=rng.randrange(3),
                stream=rng.random() < 0.5,
            )
            found.append(GenerateReq(names[-1], pack_ids(prompt), options))
        if names and rng.random() < 0.05:
            found.append(AbortReq(rng.choice(names)))
        if rng.random() < 0.01:
            found.append(rng.choice([FlushCacheReq(1), AbortReq(None)]))
        return found

    return messages
