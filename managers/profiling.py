"""The profile of the scheduler's steps. While none runs, the scheduler launches its steps directly on the runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ..model_executor.step import ForwardMode, LaunchedStep, Runner, StepInputs, StepOutput, TokenMasks
from ..srt.profile_messages import ProfileReply, StartProfileReq, StopProfileReq
from .scheduler_io import SchedulerIO

logger = logging.getLogger(__name__)


class StepTrace(Protocol):
    """Records what the process and its device do: a StepProfiler, or a test's fake."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named span of the trace."""

    def stop(self) -> None:
        """End the recording. Must be called once."""

    def write(self, path: Path) -> None:
        """Write the trace after `stop`. Raises OSError."""


StartTrace = Callable[[StartProfileReq], StepTrace]


class _Launcher(Protocol):
    """A runner, as far as a profile needs it."""

    def launch(self, step: StepInputs) -> LaunchedStep: ...


class Profiling:
    """Starts and stops profiles, one at a time, and writes their traces."""

    def __init__(self, runner: Runner, io: SchedulerIO, start_trace: StartTrace) -> None:
        self.runner: _Launcher = runner
        """The scheduler's runner. While a profile runs, it records its steps."""
        self._bare = runner
        self._io = io
        self._start_trace = start_trace
        self._running: _ProfiledRunner | None = None
        self._last_failure = ""

    def handle(self, message: StartProfileReq | StopProfileReq) -> None:
        """Starts or stops a profile, and replies."""
        if isinstance(message, StartProfileReq):
            self._io.reply(self._start(message))
        else:
            self._io.reply(self._stop(message))

    def close(self) -> None:
        """Writes the trace of a running profile, at the end of the scheduler."""
        if self._running is not None:
            self._finish(self._running)

    def _start(self, message: StartProfileReq) -> ProfileReply:
        if self._running is not None:
            return ProfileReply(message.call_id, refusal="a profile is running; /stop_profile ends it")
        try:
            Path(message.path).parent.mkdir(parents=True, exist_ok=True)
            trace = self._start_trace(message)
        except Exception as error:
            return ProfileReply(message.call_id, failure=_reason("could not start the profile", error))
        self._last_failure = ""
        self.runner = self._running = _ProfiledRunner(self._bare, trace, message, self._finish)
        return ProfileReply(message.call_id, message.path)

    def _stop(self, message: StopProfileReq) -> ProfileReply:
        running = self._running
        if running is None:
            refusal = "no profile is running"
            if self._last_failure:
                refusal += f"; {self._last_failure}"
            return ProfileReply(message.call_id, refusal=refusal)
        self._finish(running)
        return ProfileReply(message.call_id, running.message.path, failure=self._last_failure or None)

    def _finish(self, running: _ProfiledRunner) -> None:
        """Ends a profile, unless it has been stopped. An error must not end the engine."""
        if running is not self._running:
            return
        self.runner, self._running = self._bare, None
        path = Path(running.message.path)
        try:
            running.trace.stop()
            running.trace.write(path)
        except Exception as error:
            self._last_failure = _reason(f"could not write the trace {path.name}", error)
        else:
            logger.info("Wrote the trace of %d steps to %s", running.num_launched, path)


class _ProfiledRunner:
    """A runner that records each step under its name, and ends the profile after the last one."""

    def __init__(
        self, runner: Runner, trace: StepTrace, message: StartProfileReq, finish: Callable[[_ProfiledRunner], None]
    ) -> None:
        self.trace = trace
        self.message = message
        self.num_launched = 0
        self._runner = runner
        self._finish = finish

    def launch(self, step: StepInputs) -> LaunchedStep:
        if self.num_launched == self.message.num_steps:  # its last step is in flight
            return self._runner.launch(step)
        self.num_launched += 1
        name = f"step {self.num_launched}: {_described(step)}"
        with self.trace.span(f"launch {name}"):
            launched = self._runner.launch(step)
        return _ProfiledStep(launched, self, name, is_last=self.num_launched == self.message.num_steps)

    def end(self) -> None:
        """The last step is over."""
        self._finish(self)


class _ProfiledStep:
    def __init__(self, launched: LaunchedStep, runner: _ProfiledRunner, name: str, *, is_last: bool) -> None:
        self._launched = launched
        self._runner = runner
        self._name = name
        self._is_last = is_last

    def sample(self, masks: TokenMasks | None = None) -> None:
        with self._runner.trace.span(f"sample {self._name}"):
            self._launched.sample(masks)

    def wait(self) -> StepOutput:
        with self._runner.trace.span(f"wait {self._name}"):
            output = self._launched.wait()
        if self._is_last:
            self._runner.end()
        return output


def _described(step: StepInputs) -> str:
    """What a step computes, for the name of its spans."""
    if step.mode is ForwardMode.DECODE:
        return f"decode of {len(step.rows)} requests"
    return f"extend of {len(step.rows)} requests, {step.num_tokens} tokens"


def _reason(what: str, error: Exception) -> str:
    """The reason for the client, without details of the host. The log has the details."""
    logger.error("%s: %s", what[:1].upper() + what[1:], error, exc_info=not isinstance(error, OSError))
    return f"{what}: {error.strerror if isinstance(error, OSError) and error.strerror else 'internal error'}"
