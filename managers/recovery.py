"""What happens to the samples of an engine that has died: which are sent again, when, and which are not.

If the engine died by itself, a request may be the cause, and would kill the next engine, too. The requests of the fatal
step are suspects. With overlap, two steps may be in flight, and both count as the fatal step. Suspects are sent again
one after the other: the next one follows when the last one has passed the place where the engine died. Beside them run
only streams that had begun and were not in the fatal step. Requests that have not run yet wait for the end of the
trials. So a second death names the culprit, which ends with an error. All equal requests end, too, and new ones are
refused for a while, because clients send a failed request again.

A request may end before its trial, because its client disconnects. The strike is kept (strikes.py), and an equal new
request is a suspect at once. Otherwise that client could crash the engine again and again. A client may also disconnect
before the first death, for example while a step hangs. So an aborted sample is a suspect until the engine reports its
end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..srt.errors import MAX_RETRY_AFTER_S, FatalRequest, WaitingTimeout
from ..srt.io_struct import GenerateReq
from .generation import Generation
from .strikes import Strikes, digest_of

_MARGIN = 2
"""Tokens after the place of the fatal step. A fault on a device may be reported one step late."""
TRIALS_S = 300.0
"""How long suspects wait for their trials, from the time when the engine runs again. Pauses do not count."""
MAX_STOPPED = 1024
"""Aborted samples whose end the engine has not reported yet. If there are more, the newest are no suspects."""


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
    digest: bytes

    @property
    def is_cleared(self) -> bool:
        return self.generation.is_over or len(self.generation.output_ids) >= self.cleared_at


class Recovery:
    """The suspects of one engine, and the counts of its restarts."""

    def __init__(self, memory_s: float) -> None:
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
        self._clock = time.monotonic
        self._strikes = Strikes(memory_s, lambda: self._clock())
        self._stopped: dict[str, Generation] = {}
        """Aborted samples whose end the engine has not reported yet."""
        self._trials_began: float | None = None
        """When `end_late` was called first in these trials."""
        self._num_tried = 0
        """In these trials."""

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
        self._trials_began = None
        lost = [*lost, *self._stopped.values()]
        self._stopped.clear()
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
        """The waiting samples that may be sent now, in order. Suspects may not, nor new samples during trials. Some of
        the new ones may become suspects here.

        Streams that have begun come first, the shortest one first: so the median stream waits for few tokens.
        """
        is_isolating = self.is_isolating
        innocent = [one for one in waiting if one.key not in self._suspects and (one.output_ids or not is_isolating)]
        if not is_isolating:
            innocent = [one for one in innocent if not self.suspect_again(one)]
        return sorted(innocent, key=_num_tokens_if_begun)

    def next_trial(self) -> Generation | None:
        """The next suspect to be sent, if the last one is cleared."""
        if self._on_trial is not None:
            if not self._on_trial.is_cleared:
                return None
            sample = self._on_trial.generation
            self._strikes.acquit(self._on_trial.digest, math.inf if sample.is_complete else len(sample.output_ids))
            self._num_tried += 1
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            suspect = self._suspects.pop(next(iter(self._suspects)))
            if not suspect.generation.is_over:
                self._on_trial = suspect
        if self._on_trial is None:
            self._trials_began = None
            return None
        return self._on_trial.generation

    def refusal(self, request: GenerateReq) -> FatalRequest | None:
        """An error if an equal request has killed the engine twice (see `digest_of`)."""
        return self._strikes.refusal(request)

    def suspect_again(self, new: Generation) -> bool:
        """Makes a new sample a suspect if an equal request has a strike. Returns whether it has."""
        strike = None if new.request is None or new.output_ids else self._strikes.find(new.request)
        if strike is None:
            return False
        digest, cleared_at = strike
        new.num_strikes += 1
        self._suspects[new.key] = _Suspect(new, cleared_at, digest)
        return True

    def on_stop(self, sample: Generation | None) -> None:
        """The sample is aborted. Until the engine reports its end, a step of it may crash the engine."""
        if sample is not None and len(self._stopped) < MAX_STOPPED:
            self._stopped[sample.key] = sample

    def on_end(self, *keys: str) -> None:
        """The engine has reported the end of these samples, or has never had them."""
        for key in keys:
            self._stopped.pop(key, None)

    def end_late(self, now: float) -> None:
        """Ends the suspects if the trials take too long, because others wait for their end. `now`: without pauses.

        Their strikes stay: an equal new request is a suspect again.
        """
        if self._trials_began is None:
            self._trials_began, self._num_tried = now, 0
        elapsed_s = now - self._trials_began
        if elapsed_s < TRIALS_S:
            return
        late, self._suspects = self._suspects, {}
        trial_s = elapsed_s / max(self._num_tried, 1)
        for place, suspect in enumerate(late.values(), 1):
            error = WaitingTimeout(
                "the engine died in a step of several requests, which are tried one after the other; this one has "
                f"waited for {TRIALS_S:g} s; try again later"
            )
            error.retry_after_s = min(math.ceil(place * trial_s), MAX_RETRY_AFTER_S)
            suspect.generation.fail(error)

    def _convict(self, culprit: Generation, unfinished: Iterable[Generation]) -> None:
        self.num_fatal += not culprit.is_over
        self._suspects.pop(culprit.key, None)
        if culprit.request is not None:
            self._strikes.convict(culprit.request)
        culprit.fail(FatalRequest("the engine died twice while it worked on this request; it is not tried again"))
        for one in unfinished:
            error = None if one.request is None or one.is_over else self.refusal(one.request)
            if error is not None:
                self.num_fatal += 1
                one.fail(error)

    def _suspect(self, fatal: Sequence[Generation], positions: Mapping[str, int]) -> None:
        for one in fatal:
            one.num_strikes += 1
            cleared_at = max(positions.get(one.key, 0), len(one.output_ids)) + 1 + _MARGIN
            digest = b""
            if one.request is not None:
                digest = digest_of(one.request)
                self._strikes.add(digest, cleared_at)
            if not one.is_over:
                self._suspects[one.key] = _Suspect(one, cleared_at, digest)


def _culprit(fatal: Sequence[Generation], trial: Generation | None, *, is_step_known: bool) -> Generation | None:
    """The culprit, if this death proves one. `fatal`: the samples of the fatal step, or all if it is not known."""
    if trial is not None and trial in fatal and (is_step_known or all(one.num_strikes for one in fatal)):
        return trial
    return fatal[0] if len(fatal) == 1 and fatal[0].num_strikes else None


def _num_tokens_if_begun(generation: Generation) -> float:
    """The tokens that an engine without a cache has to compute; infinite before the first output."""
    if generation.request is None or not generation.output_ids:
        return math.inf
    return len(generation.request.input_ids) // 4 + len(generation.output_ids)


def watched(request: GenerateReq) -> GenerateReq:
    """The request of a suspect: its tokens come one by one, so that its progress is seen."""
    return msgspec.structs.replace(request, options=msgspec.structs.replace(request.options, stream=True))
