"""The interface of a runner for the scheduler: it runs steps, and says how large they may be."""

from __future__ import annotations

from typing import Protocol

from ..model_executor.step import Runner


class StepLimits(Protocol):
    """The settings of a runner that limit steps; see RunnerSettings."""

    @property
    def page_size(self) -> int: ...
    @property
    def context_len(self) -> int: ...
    @property
    def max_running_requests(self) -> int: ...
    @property
    def max_saved_states(self) -> int | None: ...
    @property
    def max_prefill_tokens(self) -> int: ...
    @property
    def chunked_prefill_size(self) -> int: ...


class EngineRunner(Runner, Protocol):
    """A runner, and the facts about it that the scheduler needs. It is a ModelRunner, or the fake device of a
    simulation."""

    @property
    def settings(self) -> StepLimits: ...

    @property
    def max_total_num_tokens(self) -> int:
        """Tokens of the KV pool."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the step is computed."""
