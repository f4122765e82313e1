"""Settings: logs, metrics and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from .setting import Setting
from .setting import server_setting as _server


@dataclass(frozen=True, kw_only=True)
class ObservabilitySettings:
    """The settings of logs, metrics and records."""

    TITLE: ClassVar[str] = "Logs, metrics and records"

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Setting("Lowest level of log messages that are shown")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Setting("Format of log lines; json: one object per line, for log collectors")
    ] = "text"
    access_log: Annotated[
        bool, _server("Log each HTTP request: method, path, status, duration, tokens and request id")
    ] = False
    log_requests: Annotated[bool, _server("Log each prompt and each sample; see --log-requests-level")] = False
    log_requests_level: Annotated[
        int,
        _server("0: names, counts, times; 1: sampling parameters, too; 2: the start of texts, too; 3: whole texts"),
    ] = 0
    decode_log_interval: Annotated[int, Setting("Number of steps between two log lines of the throughput")] = 40
    enable_metrics: Annotated[
        bool, _server("Serve Prometheus metrics at /metrics, and add times to the meta_info of /generate")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        _server("URL to send OpenTelemetry traces to by OTLP over HTTP; example: http://127.0.0.1:4318/v1/traces"),
    ] = None
    explain_schedule: Annotated[
        float | None,
        Setting("Log which limits and requests a request waited for, if it waited this many seconds; default: never"),
    ] = None
    record_schedule: Annotated[
        str | None,
        Setting(
            "File that records all requests, with their token ids, and each step of the scheduler, for `tercet bench "
            "scheduler --replay`; it is rotated at 64 MiB"
        ),
    ] = None
    profile_dir: Annotated[
        str | None, _server("Folder for traces of /start_profile, which is refused without this flag")
    ] = None
