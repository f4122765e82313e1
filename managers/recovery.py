"""What happens to the samples of an engine that has died: which are sent again, when, and which are not.

If the engine died by itself, a request may be the cause, and would kill the next engine, too. The requests of the fatal
step are suspects. Suspects are sent again one after the other: the next one follows when the last one has passed the
place where the engine died. So a second death names the culprit, which ends with an error. All other samples are sent
again at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..srt.errors import FatalRequest
from ..srt.io_struct import GenerateReq
from .generation import Generation

_MARGIN = 2
"""Tokens after the place of the fatal step. A fault on a device may be reported one step late."""


class Blame(NamedTuple):
    """The engine died by itself. `positions`: the output tokens of each request in the fatal step, by key.

    None: the step is unknown, or the engine died between two steps. Then every sample that it had is a suspect.
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

    def __init__(self) -> None:
        self.num_restarts = 0
        self.num_resumed = 0
        """Samples that were sent again, once for each time."""
        self.num_fatal = 0
        """Samples that ended with FatalRequest."""
        self._suspects: deque[_Suspect] = deque()
        self._on_trial: _Suspect | None = None

    @property
    def is_isolating(self) -> bool:
        """Whether samples wait for the trial of another one."""
        return self._on_trial is not None

    def on_death(self, lost: Sequence[Generation], blame: Blame | None) -> None:
        """`lost`: the samples that the engine had. `blame`: None if the cause was outside the engine."""
        self.num_restarts += 1
        trial, self._on_trial = self._on_trial, None
        if blame is None:
            culprits: list[Generation] = []
        else:
            fatal = [one for one in lost if blame.positions is None or one.key in blame.positions]
            culprits = self._convict(fatal, trial)
            if not culprits:
                self._suspect(fatal, blame.positions or {})
        for culprit in culprits:
            self.num_fatal += 1
            culprit.fail(FatalRequest("the engine died twice while it worked on this request; it is not tried again"))
        if trial is not None and not trial.generation.is_over:
            self._suspects.appendleft(trial)

    def take_innocent(self, waiting: Iterable[Generation]) -> list[Generation]:
        """Those of the waiting samples that are no suspects, in the order in which they are sent.

        Streams that have begun come first, the shortest one first: so the median stream waits for few tokens.
        """
        suspects = {one.generation.key for one in self._suspects}
        return sorted((one for one in waiting if one.key not in suspects), key=_num_tokens_if_begun)

    def next_trial(self) -> Generation | None:
        """The next suspect to be sent, if the last one is cleared."""
        if self._on_trial is not None and not self._on_trial.is_cleared:
            return None
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            suspect = self._suspects.popleft()
            if not suspect.generation.is_over:
                self._on_trial = suspect
        return None if self._on_trial is None else self._on_trial.generation

    def _convict(self, fatal: Sequence[Generation], trial: _Suspect | None) -> list[Generation]:
        """The culprit, if this death proves one."""
        if trial is not None and trial.generation in fatal:
            return [trial.generation]
        return [one for one in fatal if len(fatal) == 1 and one.num_strikes]

    def _suspect(self, fatal: Sequence[Generation], positions: Mapping[str, int]) -> None:
        known = {one.generation.key for one in self._suspects}
        for one in fatal:
            one.num_strikes += 1
            if one.key not in known:
                position = max(positions.get(one.key, 0), len(one.output_ids))
                self._suspects.append(_Suspect(one, position + 1 + _MARGIN))


def _num_tokens_if_begun(generation: Generation) -> float:
    """The tokens that an engine without a cache has to compute; infinite before the first output."""
    if generation.request is None or not generation.output_ids:
        return math.inf
    return len(generation.request.input_ids) // 4 + len(generation.output_ids)


def watched(request: GenerateReq) -> GenerateReq:
    """The request of a suspect: its tokens come one by one, so that its progress is seen."""
    return msgspec.structs.replace(request, options=msgspec.structs.replace(request.options, stream=True))
