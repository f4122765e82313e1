"""Settings: failures of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from .setting import Setting


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """The settings of failures of the engine."""

    TITLE: ClassVar[str] = "Failures of the engine"

    watchdog_timeout: Annotated[
        float,
        Setting("Seconds that a step may take; after that the engine logs the stacks of its threads and restarts"),
    ] = 300.0
    soft_watchdog_timeout: Annotated[
        float | None,
        Setting("Seconds after which the stacks of a running step are logged; the step continues; default: never"),
    ] = None
    engine_restarts: Annotated[
        int,
        Setting("Maximum number of restarts of the engine within --engine-restart-window; 0: the server exits instead"),
    ] = 3
    engine_restart_window: Annotated[float, Setting("Window for --engine-restarts, in seconds")] = 600.0
    crash_report_requests: Annotated[
        bool,
        Setting("Write whole requests to crash reports: token ids and all parameters; default: no texts or token ids"),
    ] = False
