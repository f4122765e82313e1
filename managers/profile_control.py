"""Profiles of the engine as the TokenizerManager sees them: calls to the scheduler, and their errors."""

from __future__ import annotations

from collections.abc import Callable

from ..srt.errors import InvalidRequest, TercetError
from ..srt.profile_messages import ProfileReply, StartProfileReq, StopProfileReq
from .calls import Calls, SchedulerLink


class ProfileControl:
    """Starts and stops profiles. A profile ends with its scheduler: a restarted engine runs none."""

    def __init__(self, calls: Calls, link: Callable[[], SchedulerLink]) -> None:
        """`link`: the link to the scheduler; it raises EngineDead and EngineRestarting."""
        self._calls = calls
        self._link = link

    async def start(self, question: Callable[[int], StartProfileReq]) -> str:
        """Returns the file of the trace when the profile has started.

        `question`: makes the message with the id of the call. Raises InvalidRequest if a profile runs, TercetError if
        the profile cannot start, EngineDead and EngineRestarting.
        """
        return _path_of(await self._calls.ask(self._link(), question, ProfileReply))

    async def stop(self) -> str:
        """Returns the file of the trace when it is written.

        Raises InvalidRequest if no profile runs, TercetError if the file cannot be written, EngineDead and
        EngineRestarting.
        """
        return _path_of(await self._calls.ask(self._link(), StopProfileReq, ProfileReply))


def _path_of(reply: ProfileReply) -> str:
    if reply.refusal is not None:
        raise InvalidRequest(reply.refusal)
    if reply.failure is not None:
        raise TercetError(reply.failure)
    return reply.path
