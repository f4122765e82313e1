"""What happens to the samples of an engine that has died: which are sent again, when, and which are not.

If the engine died by itself, a request may be the cause, and would kill the next engine, too. The requests of the fatal
step are suspects. Suspects are sent again one after the other: the next one follows when the last one has passed the
place where the engine died. Beside them run only streams that had begun and were not in the fatal step. Requests that
have not run yet wait for the end of the trials. So a second death names the culprit, which ends with an error. All
equal requests end, too, and new ones are refused for a while, because clients send a failed request again.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..srt.errors import FatalRequest
from ..srt.io_struct import GenerateReq
from .generation import Generation

_MARGIN = 2
"""Tokens after the place of the fatal step. A fault on a device may be reported one step late."""


class Blame(NamedTuple):
    """The engine died by itself. `positions`: the output tokens of each request in the fatal step, by key.

    None: the step is unknown, or the engine died between two steps, for example while it planned one. Then every sample
    that it had is a suspect.
    """

    positions: Mapping[str, int] | None


class _Suspect(NamedTuple):
    generation: Generation
    cleared_at: int
    """With this number of output tokens, it has passed the place of the fatal step."""

    @property
    def is_cleared(self) -> bool:
        return self.generation.is_over or len(self.generation.output_ids) >= self.cleared_at


class Recovery:
    """The suspects of one engine, and the counts of its restarts."""

    def __init__(self, memory_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`memory_s`: seconds for which requests that equal a culprit are refused."""
        self.num_restarts = 0
        self.num_resumed = 0
        """Samples that were sent again, once for each time."""
        self.num_fatal = 0
        """Samples that ended with FatalRequest."""
        self._suspects: dict[str, _Suspect] = {}
        """Those that wait for their trial, in this order."""
        self._on_trial: _Suspect | None = None
        self._died_at: float | None = None
        """When the engine died that is being restarted."""
        self._last_restart_s: float | None = None
        self._memory_s = memory_s
        self._clock = clock
        self._convicted: dict[bytes, float] = {}
        """Digests of culprits, with the times at which they are forgotten."""

    @property
    def is_isolating(self) -> bool:
        """Whether samples wait for the trial of another one."""
        return self._on_trial is not None or bool(self._suspects)

    def on_death(self, lost: Sequence[Generation], blame: Blame | None, unfinished: Iterable[Generation]) -> bool:
        """Returns whether it found a culprit. It ends the culprit and all equal samples.

        `lost`: the samples that the engine had. `blame`: None if no request is to blame. `unfinished`: all samples,
        with those that wait for the engine.
        """
        self.num_restarts += 1
        self._died_at = self._clock() if self._died_at is None else self._died_at
        trial, self._on_trial = self._on_trial, None
        if trial is not None:
            self._suspects = {trial.generation.key: trial, **self._suspects}
        if blame is None:
            return False
        fatal = [one for one in lost if blame.positions is None or one.key in blame.positions]
        culprit = _culprit(
            fatal, None if trial is None else trial.generation, is_step_known=blame.positions is not None
        )
        if culprit is None:
            self._suspect(fatal, blame.positions or {})
        else:
            self._convict(culprit, unfinished)
        return culprit is not None

    def on_restart(self) -> None:
        """The engine runs again."""
        if self._died_at is not None:
            self._last_restart_s, self._died_at = self._clock() - self._died_at, None

    def restart_left_s(self) -> float | None:
        """How long the restart that is under way will take if it takes as long as the last one. None: unknown."""
        if self._died_at is None or self._last_restart_s is None:
            return None
        return self._died_at + self._last_restart_s - self._clock()

    def take_innocent(self, waiting: Iterable[Generation]) -> list[Generation]:
        """The waiting samples that may be sent now, in order. Suspects may not, nor new samples during trials.

        Streams that have begun come first, the shortest one first: so the median stream waits for few tokens.
        """
        is_isolating = self.is_isolating
        innocent = (one for one in waiting if one.key not in self._suspects and (one.output_ids or not is_isolating))
        return sorted(innocent, key=_num_tokens_if_begun)

    def next_trial(self) -> Generation | None:
        """The next suspect to be sent, if the last one is cleared."""
        if self._on_trial is not None and not self._on_trial.is_cleared:
            return None
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            suspect = self._suspects.pop(next(iter(self._suspects)))
            if not suspect.generation.is_over:
                self._on_trial = suspect
        return None if self._on_trial is None else self._on_trial.generation

    def refusal(self, request: GenerateReq) -> FatalRequest | None:
        """An error if an equal request has killed the engine twice (see `_digest`)."""
        if not self._convicted:
            return None
        now = self._clock()
        self._convicted = {digest: until for digest, until in self._convicted.items() if until > now}
        until = self._convicted.get(_digest(request))
        if until is None:
            return None
        return FatalRequest(f"the engine died twice on an equal request; it is refused for {until - now:.0f} s more")

    def _convict(self, culprit: Generation, unfinished: Iterable[Generation]) -> None:
        self.num_fatal += 1
        self._suspects.pop(culprit.key, None)
        if culprit.request is not None:
            self._convicted[_digest(culprit.request)] = self._clock() + self._memory_s
        culprit.fail(FatalRequest("the engine died twice while it worked on this request; it is not tried again"))
        for one in unfinished:
            error = None if one.request is None or one.is_over else self.refusal(one.request)
            if error is not None:
                self.num_fatal += 1
                one.fail(error)

    def _suspect(self, fatal: Sequence[Generation], positions: Mapping[str, int]) -> None:
        for one in fatal:
            one.num_strikes += 1
            position = max(positions.get(one.key, 0), len(one.output_ids))
            self._suspects[one.key] = _Suspect(one, position + 1 + _MARGIN)


def _culprit(fatal: Sequence[Generation], trial: Generation | None, *, is_step_known: bool) -> Generation | None:
    """The culprit, if this death proves one. `fatal`: the samples of the fatal step, or all if it is not known."""
    if trial is not None and trial in fatal and (is_step_known or all(one.num_strikes for one in fatal)):
        return trial
    return fatal[0] if len(fatal) == 1 and fatal[0].num_strikes else None


def _digest(request: GenerateReq) -> bytes:
    """Equal requests have equal digests. What does not change the computation does not count. Nor do the seed and the
    numbers of tokens, which depend on the engine's memory."""
    sampling = msgspec.structs.replace(
        request.options.sampling, sampling_seed=None, max_new_tokens=None, min_new_tokens=0
    )
    options = msgspec.structs.replace(
        request.options,
        sampling=sampling,
        stream=False,
        priority=0,
        tenant="",
        waiting_timeout=None,
        running_timeout=None,
        session_id="",
        retention_seconds=None,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(options) + request.input_ids, digest_size=16).digest()


def _num_tokens_if_begun(generation: Generation) -> float:
    """The tokens that an engine without a cache has to compute; infinite before the first output."""
    if generation.request is None or not generation.output_ids:
        return math.inf
    return len(generation.request.input_ids) // 4 + len(generation.output_ids)


def watched(request: GenerateReq) -> GenerateReq:
    """The request of a suspect: its tokens come one by one, so that its progress is seen."""
    return msgspec.structs.replace(request, options=msgspec.structs.replace(request.options, stream=True))
