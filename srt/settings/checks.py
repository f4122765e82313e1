"""The rules for the values of settings, and for settings that need or exclude one another."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..kv_events import read_config
from ..model_files.lora_config import MAX_RANK
from ..origins import parse_origins
from ..plain_values import is_utf8
from ..tenant_weights import parse_weights
from ..weight_messages import VERSION_RULE, is_version
from .failures import HEARTBEAT_S, MIN_WATCHDOG_S
from .scheduler import MAX_VERIFIED_TOKENS
from .setting import flag_name

if TYPE_CHECKING:
    from ..server_args import ServerArgs

MAX_RETENTION_S = 86_400.0
"""A day: more than any prefix stays in a KV pool."""

RETENTION_SETTINGS = ("max_retention_s", "tool_call_retention_s", "max_retained_share")
"""Settings of retention, which only the eviction policy `value` honours. 0 turns the first two off."""
MAX_HTTP_WORKERS = 64
_AT_LEAST_1 = (
    "context_length",
    "max_loras",
    "max_lora_rank",
    "stream_interval",
    "max_total_tokens",
    "max_running_requests",
    "max_saved_states",
    "max_queued_requests",
    "max_concurrent_requests_per_key",
    "requests_per_minute_per_key",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "page_size",
    "cuda_graph_max_bs",
    "decode_log_interval",
)
_OF_ONE_HTTP_PROCESS = ("resume_file", "resume_grace", "response_store_mib")
"""Settings whose state is in the process that serves HTTP, so there can be only one."""


def check_settings(args: ServerArgs) -> None:
    """Raises ValueError that names the flag, the given value and the allowed ones."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:  # messages have no larger ones
            raise ValueError(f"{flag_name(field.name)} must be in [-2**63, 2**63), got {value}")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (not is_utf8(text) or "\0" in text):  # neither a path nor a message has it
                raise ValueError(f"{flag_name(field.name)} must be valid UTF-8 without NUL characters")
    for name in _AT_LEAST_1:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{flag_name(name)} must be at least 1, got {value}")
    for name in ("update_weights_dir", "lora_dir", "profile_dir", "served_model_name", "resume_file"):
        if getattr(args, name) == "":  # an empty folder would be the current one
            raise ValueError(f"{flag_name(name)} must not be empty")
    if not is_version(args.weight_version):
        raise ValueError(f"--weight-version must have {VERSION_RULE}, got {args.weight_version!r}")
    _check_sizes(args)
    _check_lora(args)
    _check_http(args)
    _check_observability(args)
    _check_scheduler(args)
    _check_prefix_cache(args)
    _check_tiers(args)
    _check_failures(args)


def check_tokenizer_settings(args: ServerArgs) -> None:
    """Raises ValueError for a setting of the tokenizer that is not loaded. Benchmarks do without this check: they load
    none, and may have the --config file of a server."""
    for name in ("tokenizer_path", "chat_template", "tool_call_parser", "reasoning_parser", "grammar_backend"):
        if args.skip_tokenizer_init and getattr(args, name) != getattr(type(args), name):
            raise ValueError(f"{flag_name(name)} has no effect with --skip-tokenizer-init")


def _check_sizes(args: ServerArgs) -> None:
    """Checks the sizes of pages, steps and the KV pool."""
    if args.page_size is not None and args.page_size > 1024:
        raise ValueError(f"--page-size must be at most 1024, got {args.page_size}")
    for name, num_pages in (("chunked_prefill_size", 1), ("max_prefill_tokens", 1), ("max_total_tokens", 2)):
        value = getattr(args, name)
        least = num_pages * (args.page_size or 1)
        if value is not None and value < least:
            pages = "" if args.page_size is None else f" with --page-size {args.page_size}"
            raise ValueError(f"{flag_name(name)} must be at least {least}{pages}, got {value}")
    if args.context_length == 1:
        raise ValueError("--context-length must be at least 2, for a prompt and its first token; got 1")
    if args.mem_fraction_static is not None and not 0 < args.mem_fraction_static < 1:
        raise ValueError(f"--mem-fraction-static must be in (0, 1), got {args.mem_fraction_static}")


def _check_lora(args: ServerArgs) -> None:
    for name in ("lora_dir", "max_loras", "max_lora_rank"):
        if not args.enable_lora and getattr(args, name) is not None:
            raise ValueError(f"{flag_name(name)} needs --enable-lora or --lora-paths")
    if args.max_lora_rank is not None and args.max_lora_rank > MAX_RANK:
        raise ValueError(f"--max-lora-rank must be at most {MAX_RANK}, got {args.max_lora_rank}")
    names = args.adapter_paths.keys()
    if args.max_loras is not None and len(names) > args.max_loras:
        raise ValueError(
            f"--max-loras must be at least {len(names)} for the adapters of --lora-paths, got {args.max_loras}"
        )
    for name in names:
        if args.is_model(name):
            raise ValueError(f"--lora-paths: {name!r} is a name of the model; an adapter needs another one")


def check_api_key(key: str) -> None:
    """Raises ValueError for a key that no header can have. The message does not show it."""
    if any(char.isspace() or not char.isprintable() for char in key):
        raise ValueError("--api-key (or TERCET_API_KEY) must not contain spaces, line breaks or control characters")


def _check_http(args: ServerArgs) -> None:
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be in [0, 65535], got {args.port}")
    if args.host.startswith("["):
        raise ValueError(f"--host must be an address without brackets, such as ::1, got {args.host!r}")
    if args.api_key is not None:
        if not args.api_keys or not all(args.api_keys):
            raise ValueError("--api-key (or TERCET_API_KEY) must not be empty; leave it out to serve without a key")
        for key in args.api_keys:
            check_api_key(key)
    if not 1 <= args.tokenizer_worker_num <= MAX_HTTP_WORKERS:
        raise ValueError(f"--tokenizer-worker-num must be in [1, {MAX_HTTP_WORKERS}], got {args.tokenizer_worker_num}")
    for name in _OF_ONE_HTTP_PROCESS:
        if args.tokenizer_worker_num > 1 and getattr(args, name):
            raise ValueError(f"{flag_name(name)} needs --tokenizer-worker-num 1, got {args.tokenizer_worker_num}")
    for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
        if getattr(args, name) is not None and args.ssl_certfile is None:
            raise ValueError(f"{flag_name(name)} needs --ssl-certfile")
    parse_origins(args.allowed_origins)
    if not 0 <= args.resume_grace < math.inf:
        raise ValueError(f"--resume-grace must be a number of seconds, 0 or more, got {args.resume_grace}")
    if args.resume_file is not None and not args.resume_grace:
        raise ValueError("--resume-file needs --resume-grace SECONDS above 0")
    if not 0 <= args.response_store_mib < 2**20:
        raise ValueError(f"--response-store-mib must be in [0, {2**20}), got {args.response_store_mib}")


def _check_observability(args: ServerArgs) -> None:
    if not 0 <= args.log_requests_level <= 3:
        raise ValueError(f"--log-requests-level must be in [0, 3], got {args.log_requests_level}")
    if args.log_requests_level and not args.log_requests:
        raise ValueError("--log-requests-level needs --log-requests")
    endpoint = args.otlp_traces_endpoint
    if endpoint is not None and not _is_web_address(endpoint):
        raise ValueError(f"--otlp-traces-endpoint must be a URL such as http://HOST:4318/v1/traces, got {endpoint!r}")
    if args.explain_schedule is not None and not 0 <= args.explain_schedule < math.inf:
        raise ValueError(f"--explain-schedule must be a number of seconds, 0 or more, got {args.explain_schedule}")


def _is_web_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of the host, or of the port
        return False


def _check_scheduler(args: ServerArgs) -> None:
    if parse_weights(args.tenant_weights) and args.schedule_policy != "dlpm":
        raise ValueError(f"--tenant-weights needs --schedule-policy dlpm, got {args.schedule_policy}")
    if not args.schedule_conservativeness > 0:
        raise ValueError(f"--schedule-conservativeness must be positive, got {args.schedule_conservativeness}")
    if args.priority_scheduling_preemption_threshold < 0:
        raise ValueError(
            "--priority-scheduling-preemption-threshold must be at least 0, "
            f"got {args.priority_scheduling_preemption_threshold}"
        )
    for name in ("schedule_low_priority_values_first", "priority_scheduling_preemption_threshold"):
        if not args.enable_priority_scheduling and getattr(args, name) != getattr(type(args), name):
            raise ValueError(f"{flag_name(name)} needs --enable-priority-scheduling")
    if args.max_queue_time is not None and not 0 < args.max_queue_time < math.inf:
        raise ValueError(f"--max-queue-time must be a positive number of seconds, got {args.max_queue_time}")
    if not 0 <= args.admission_watermark < 1:
        raise ValueError(f"--admission-watermark must be in [0, 1), got {args.admission_watermark}")
    bound = args.max_itl_ms
    if bound not in ("auto", "none") and not (isinstance(bound, int | float) and 0 < bound < math.inf):
        raise ValueError(f"--max-itl-ms must be a positive number of milliseconds, auto or none, got {bound}")
    if not 1 <= args.speculative_num_draft_tokens < MAX_VERIFIED_TOKENS:
        raise ValueError(
            f"--speculative-num-draft-tokens must be in [1, {MAX_VERIFIED_TOKENS - 1}], "
            f"got {args.speculative_num_draft_tokens}"
        )
    name = "speculative_num_draft_tokens"
    if args.speculative_algorithm is None and getattr(args, name) != getattr(type(args), name):
        raise ValueError(f"{flag_name(name)} needs --speculative-algorithm NGRAM")
    for name in ("waiting_timeout", "running_timeout"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"{flag_name(name)} must be positive, got {value}")


def _check_prefix_cache(args: ServerArgs) -> None:
    if read_config(args.kv_events_config) is not None and args.disable_radix_cache:
        raise ValueError("--kv-events-config needs the prefix cache; leave out --disable-radix-cache")
    if not 0 <= args.max_retention_s <= MAX_RETENTION_S:
        raise ValueError(f"--max-retention-s must be in [0, {MAX_RETENTION_S:g}], got {args.max_retention_s}")
    if not 0 <= args.tool_call_retention_s <= MAX_RETENTION_S:
        raise ValueError(
            f"--tool-call-retention-s must be in [0, {MAX_RETENTION_S:g}], got {args.tool_call_retention_s}"
        )
    if not 0 < args.max_retained_share <= 1:
        raise ValueError(f"--max-retained-share must be in (0, 1], got {args.max_retained_share}")
    if args.disable_radix_cache and args.radix_eviction_policy != type(args).radix_eviction_policy:
        raise ValueError("--radix-eviction-policy has no effect with --disable-radix-cache")
    if args.disable_radix_cache and args.max_saved_states is not None:
        raise ValueError("--max-saved-states has no effect with --disable-radix-cache")
    for name in RETENTION_SETTINGS:
        if not args.honours_retention and getattr(args, name) not in (0, getattr(type(args), name)):
            raise ValueError(f"{flag_name(name)} needs a prefix cache with --radix-eviction-policy value")


def _check_failures(args: ServerArgs) -> None:
    if args.engine_restarts < 0:
        raise ValueError(f"--engine-restarts must be at least 0, got {args.engine_restarts}")
    if not args.engine_restart_window > 0:
        raise ValueError(f"--engine-restart-window must be positive, got {args.engine_restart_window}")
    for name in ("watchdog_timeout", "soft_watchdog_timeout"):
        value = getattr(args, name)
        if value is not None and not value >= MIN_WATCHDOG_S:
            raise ValueError(
                f"{flag_name(name)} must be at least {MIN_WATCHDOG_S:g}, because a healthy process may be silent for "
                f"{HEARTBEAT_S:g} s; got {value:g}"
            )
    soft_s = args.soft_watchdog_timeout
    if soft_s is not None and soft_s >= args.watchdog_timeout:
        raise ValueError(
            f"--soft-watchdog-timeout must be less than --watchdog-timeout {args.watchdog_timeout:g}, got {soft_s:g}"
        )


def _check_tiers(args: ServerArgs) -> None:
    """Check the settings of the tiers below the KV pool."""
    if args.hicache_storage_dir is None and args.hicache_storage_size != type(args).hicache_storage_size:
        raise ValueError("--hicache-storage-size needs --hicache-storage-dir")
    if not args.enable_hierarchical_cache:
        if args.hicache_size is not None or args.hicache_storage_dir is not None:
            raise ValueError("--hicache-size and --hicache-storage-dir need --enable-hierarchical-cache")
        return
    if args.hicache_size is None and args.hicache_storage_dir is None:
        raise ValueError("--enable-hierarchical-cache needs --hicache-size, --hicache-storage-dir, or both")
    if args.disable_radix_cache:
        raise ValueError("--enable-hierarchical-cache keeps prefixes, but --disable-radix-cache shares none")
    for name in ("hicache_size", "hicache_storage_size"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 2**20:
            raise ValueError(f"{flag_name(name)} is in GB and must be above 0 and below {2**20}, got {value:g}")
    if args.hicache_storage_dir == "":
        raise ValueError("--hicache-storage-dir must name a folder, got ''")
