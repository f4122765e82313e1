"""Settings: failures of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from .setting import Setting

HEARTBEAT_S = 0.5
"""Each process of the engine gives a sign of life at least so often, unless a step takes longer."""
MIN_WATCHDOG_S = 2 * HEARTBEAT_S
"""The least timeout of a watchdog. A shorter one would take an idle process for one that hangs."""


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """The settings of failures of the engine."""

    TITLE: ClassVar[str] = "Failures of the engine"

    watchdog_timeout: Annotated[
        float, Setting("Seconds that a step may take; then the engine logs the stacks of its threads and is restarted")
    ] = 300.0
    soft_watchdog_timeout: Annotated[
        float | None, Setting("Seconds after which the stacks of a step are logged, and it goes on; default: never")
    ] = None
    engine_restarts: Annotated[
        int, Setting("Number of restarts within --engine-restart-window after a process of the engine died; 0: none")
    ] = 3
    engine_restart_window: Annotated[float, Setting("Seconds for which a restart counts")] = 600.0
    crash_report_requests: Annotated[
        bool, Setting("Reports about crashes have the whole requests: token ids and all parameters; default: lengths")
    ] = False
