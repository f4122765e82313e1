"""The messages that start and stop a profile of the scheduler's steps: TokenizerManager -> Scheduler, and the reply."""

from __future__ import annotations

import msgspec


class StartProfileReq(msgspec.Struct, frozen=True, kw_only=True, tag="start_profile"):
    """Record the steps from now on. The answer is a ProfileReply."""

    call_id: int
    path: str
    """The file of the trace, which ends in `.json.gz`. Its folder is created."""
    num_steps: int
    """The trace is written after so many steps, or at a StopProfileReq."""
    cpu: bool
    """Record what the scheduler's thread does."""
    gpu: bool
    """Record the kernels and copies of a GPU."""
    record_shapes: bool
    """Record the shapes of the operations' inputs."""
    with_stack: bool
    """Record the Python functions that call the operations."""


class StopProfileReq(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Write the trace of the running profile. The answer is a ProfileReply."""

    call_id: int


class ProfileReply(msgspec.Struct, frozen=True, tag="profile"):
    """A StartProfileReq or a StopProfileReq has taken effect, or has failed."""

    call_id: int
    path: str = ""
    """The file of the trace."""
    refusal: str | None = None
    """Why nothing was done: a profile runs already, or none runs."""
    failure: str | None = None
    """Why the profile or its file failed."""
