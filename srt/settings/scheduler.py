"""Settings: the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from .setting import Setting


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """The settings of the scheduler."""

    TITLE: ClassVar[str] = "The scheduler"

    max_running_requests: Annotated[int, Setting("Maximum number of running requests")] = 256
    max_queued_requests: Annotated[
        int, Setting("Maximum number of waiting requests; further requests get status 503")
    ] = 4096
    max_queue_time: Annotated[
        float | None,
        Setting("Refuse a request with status 503 if it would wait longer, in seconds; default: no limit"),
    ] = None
    waiting_timeout: Annotated[
        float | None, Setting("Seconds that a request may wait for its first step, then status 503; default: no limit")
    ] = None
    running_timeout: Annotated[
        float | None, Setting("Seconds that a request may run, then it ends with what it has; default: no limit")
    ] = None
    chunked_prefill_size: Annotated[
        int | None, Setting("Maximum number of tokens of one prompt in a step; default: 8192 on a GPU, 1024 on a CPU")
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        Setting("Maximum number of prompt tokens of all requests in a step; default: 16384 on a GPU, 2048 on a CPU"),
    ] = None
    enable_mixed_chunk: Annotated[
        bool,
        Setting(
            "Let running requests always decode in the steps that prefill other requests; otherwise they do if that is "
            "faster, unless --max-itl-ms is none"
        ),
    ] = False
    max_itl_ms: Annotated[
        float | Literal["auto", "none"],
        Setting(
            "Maximum time between two tokens of a running request while prompts are computed, in milliseconds: each "
            "step computes as many prompt tokens as fit into it, and running requests decode in it if that is faster; "
            "auto: 250 ms, or the time of 15 decode steps if that is longer; none: not bounded by time"
        ),
    ] = "auto"
    stream_interval: Annotated[int, Setting("Number of tokens between two chunks of a stream")] = 1
    schedule_policy: Annotated[
        Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "shortest-prefill-first", "hrrn", "dlpm"],
        Setting(
            "Order of the waiting queue; fcfs: first come, first served; lpm: longest cached prefix first; dfs-weight: "
            "depth first through the cached prefixes, those of most requests first; lof: longest output first; random: "
            "by --random-seed; shortest-prefill-first: fewest uncached tokens first; hrrn: longest wait for each "
            "uncached token first; dlpm: longest cached prefix first among the tenants that have used less than their "
            "share"
        ),
    ] = "lpm"
    tenant_weights: Annotated[
        str | None,
        Setting("Shares of tenants with --schedule-policy dlpm, such as alice=2,bob=0.5; default: 1 for each"),
    ] = None
    schedule_conservativeness: Annotated[
        float, Setting("A value above 1 reserves more KV for running requests, so fewer are retracted")
    ] = 1.0
    enable_priority_scheduling: Annotated[
        bool, Setting("Let requests have a priority: those of higher priority go first, and may displace others")
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Setting("A lower value of a request's priority is the higher priority")
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int, Setting("A waiting request may preempt running ones whose priority is lower by more than this")
    ] = 10
    admission_watermark: Annotated[
        float, Setting("Share of the KV pool that stays free for running requests when a prompt starts beside them")
    ] = 0.02
