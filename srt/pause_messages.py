"""The messages that pause and continue generation: TokenizerManager -> Scheduler, and the reply."""

from __future__ import annotations

import msgspec


class PauseReq(msgspec.Struct, frozen=True, tag="pause"):
    """Launch no further steps. The PauseReply follows when no step is in flight."""

    call_id: int
    retract: bool
    """Running requests release their KV and wait again. False: they keep it."""


class ContinueReq(msgspec.Struct, frozen=True, tag="continue"):
    """Launch steps again. The answer is a PauseReply."""

    call_id: int


class PauseReply(msgspec.Struct, frozen=True, tag="paused"):
    """A PauseReq or a ContinueReq has taken effect."""

    call_id: int
