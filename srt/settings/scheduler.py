"""Settings: the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from .setting import Setting

MAX_VERIFIED_TOKENS = 16
"""Most tokens of a decode step with drafts, beside forced ones: the newest token of each request and all drafts. On a
CPU, a step of 16 tokens takes only about 2.6 times as long as one of 1 token (docs/log.md), because both read all
weights."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """The settings of the scheduler."""

    TITLE: ClassVar[str] = "The scheduler"

    max_running_requests: Annotated[
        int | None,
        Setting(
            "Maximum number of running requests; default: 256, or fewer if the states of recurrent layers would take "
            "more than 2 GiB on a CPU, or 8 GiB or a tenth of the memory on a GPU, but at least 8"
        ),
    ] = None
    max_queued_requests: Annotated[
        int,
        Setting(
            "Maximum number of waiting requests, besides those that the next step has rows for; further requests get "
            "status 503"
        ),
    ] = 4096
    max_queue_time: Annotated[
        float | None,
        Setting("Maximum estimated wait of a new request in seconds; above it: status 503; default: no limit"),
    ] = None
    waiting_timeout: Annotated[
        float | None,
        Setting("Seconds that a request may wait for its first step; after that: status 503; default: no limit"),
    ] = None
    running_timeout: Annotated[
        float | None,
        Setting("Seconds that a request may run; after that it ends with the output so far; default: no limit"),
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
            "Running requests always decode in the steps that prefill other requests; by default only if that is "
            "faster, and never with --max-itl-ms none"
        ),
    ] = False
    max_itl_ms: Annotated[
        float | Literal["auto", "none"],
        Setting(
            "Maximum time between two tokens of a running request while prompts are computed, in milliseconds: each "
            "step computes as many prompt tokens as fit into this time, and running requests decode in the same step "
            "if that is faster; auto: 250 ms, or the time of 15 decode steps if that is longer; none: no bound"
        ),
    ] = "auto"
    stream_interval: Annotated[int, Setting("Number of tokens between two chunks of a stream")] = 1
    schedule_policy: Annotated[
        Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "shortest-prefill-first", "hrrn", "dlpm"],
        Setting(
            "Order of the waiting queue; fcfs: first come, first served; lpm: longest cached prefix first; dfs-weight: "
            "depth-first order of the cached prefixes, those of most requests first; lof: longest output first; "
            "random: by --random-seed; shortest-prefill-first: fewest uncached tokens first; hrrn: highest response "
            "ratio next, that is, the longest wait per uncached token; dlpm: longest cached prefix first among the "
            "tenants that have used less than their share"
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
        bool, Setting("Allow a priority in requests: higher priorities go first, and may preempt or displace others")
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Setting("A lower value of `priority` in a request means a higher priority")
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int, Setting("A waiting request may preempt running requests whose priority is lower by more than this")
    ] = 10
    admission_watermark: Annotated[
        float, Setting("Share of the KV pool that new prompts leave free for running requests")
    ] = 0.02
    speculative_algorithm: Annotated[
        Literal["NGRAM"] | None,
        Setting(
            "How to guess the next tokens of a request (drafts). A step verifies them, and so may return several "
            "tokens; with the C++ kernels, drafts change no token; NGRAM: what followed an earlier occurrence of the "
            "newest tokens; only on a CPU, with the attention backends cpu and torch; default: no drafts"
        ),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int,
        Setting(
            "Maximum number of drafts of one request in a step; all requests together have at most "
            f"{MAX_VERIFIED_TOKENS} tokens, beside forced ones, in a step with drafts"
        ),
    ] = MAX_VERIFIED_TOKENS - 1
