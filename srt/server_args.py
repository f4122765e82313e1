"""The settings of an engine. Each is one annotated field.

The command line, its help, the docs table (command_line.py) and the validation are made from these fields alone.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from .origins import parse_origins
from .setting import Setting
from .setting import server_setting as _server
from .setting_checks import check_settings


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The settings of an engine. They are frozen: a change makes a new object (`dataclasses.replace`).

    Raises ValueError that names the flag, the given value and the allowed ones.
    """

    model_path: Annotated[str, Setting("Hugging Face directory, .gguf file, or config.json (dummy weights)")]
    tokenizer_path: Annotated[
        str | None, Setting("Directory or .gguf file of the tokenizer; default: --model-path")
    ] = None
    skip_tokenizer_init: Annotated[bool, Setting("Load no tokenizer: prompts and answers are token ids")] = False
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"], Setting("Format of the weights; dummy: random weights")
    ] = "auto"
    weight_version: Annotated[
        str, Setting("Name of the weights in answers; KV files of another name are never read")
    ] = "default"
    context_length: Annotated[int | None, Setting("Maximum context length in tokens; default: the model's")] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Setting(
            "Data type of weights, activations and KV; auto: float16 or bfloat16 on a GPU, bfloat16 or float32 on a "
            "CPU; with float32, a CPU keeps matrices as their file stores them"
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3"],
        Setting("Data type of the KV cache; auto: --dtype; fp8_e4m3: 8 bits, scale 1, with --attention-backend triton"),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4", "fp8"] | None,
        Setting(
            "8-bit or 4-bit weights, multiplied with 8-bit activations: int8 and int4 on a CPU, fp8 with "
            "--attention-backend triton; default: weights in --dtype, or fp8 as a checkpoint stores them"
        ),
    ] = None
    weight_cache: Annotated[
        str,
        Setting("Folder that caches dequantised GGUF weights for later starts; auto: ~/.cache/tercet; off: no cache"),
    ] = "auto"
    chat_template: Annotated[str | None, Setting("Jinja chat template: a file or the template itself")] = None
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "deepseek_v3",
            "gemma",
            "gpt-oss",
            "hermes",
            "llama3_json",
            "mistral",
            "pythonic",
            "qwen3_coder",
        ],
        _server("Format of the model's tool calls; auto: the one that the chat template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["deepseek-r1", "gpt-oss", "granite", "mistral", "qwen3"] | None,
        _server("Format of the model's reasoning, which is then separated from the content; default: not separated"),
    ] = None
    served_model_name: Annotated[str | None, _server("Model name in the API; default: --model-path")] = None
    host: Annotated[str, _server("Address to listen on")] = "127.0.0.1"
    tokenizer_worker_num: Annotated[
        int, _server("Number of processes that serve HTTP: they read bodies, tokenise and write answers")
    ] = 1
    port: Annotated[int, _server("TCP port to listen on; 0: any free port")] = 30000
    api_key: Annotated[
        str | list[str] | None,
        _server(
            "API key that clients must send; repeat it for several keys; default: the variable TERCET_API_KEY",
            secret=True,
            repeatable=True,
        ),
    ] = None
    max_concurrent_requests_per_key: Annotated[
        int | None,
        _server("Maximum number of unanswered requests of an API key, or of a client address without keys"),
    ] = None
    requests_per_minute_per_key: Annotated[
        int | None,
        _server("Maximum number of requests in a minute of an API key, or of a client address without keys"),
    ] = None
    resume_grace: Annotated[
        float,
        _server("Seconds for which a client can continue a stream whose connection broke; 0: such a request ends"),
    ] = 0.0
    resume_file: Annotated[
        str | None,
        _server(
            "File that records the streams of --resume-grace, with their prompts, so that clients can continue them "
            "after the server was killed or restarted; default: none"
        ),
    ] = None
    ssl_certfile: Annotated[str | None, _server("PEM file of the certificate chain; serves HTTPS instead of HTTP")] = (
        None
    )
    ssl_keyfile: Annotated[str | None, _server("PEM file of the private key; default: --ssl-certfile has it, too")] = (
        None
    )
    ssl_keyfile_password: Annotated[str | None, _server("Password of an encrypted private key", secret=True)] = None
    ssl_ca_certs: Annotated[
        str | None, _server("PEM file of authorities; only clients with a certificate of theirs can connect")
    ] = None
    allowed_origins: Annotated[
        str | None,
        _server(
            "Origins whose web pages may use the server (CORS): https://ui.example, several with commas between them "
            "or as a JSON list; *: all; default: none"
        ),
    ] = None
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Setting("Source of default sampling parameters: the model's generation_config, or OpenAI's defaults"),
    ] = "model"
    stream_interval: Annotated[int, Setting("Number of tokens between two chunks of a stream")] = 1
    incremental_streaming_output: Annotated[
        bool, _server("/generate streams only new text and ids in each event, instead of all so far")
    ] = False
    allow_auto_truncate: Annotated[
        bool, Setting("Drop the first tokens of a prompt that is too long, instead of refusing it")
    ] = False
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Setting("Device of the model; auto: a GPU if there is one, else the CPU")
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "cpu", "torch", "triton"],
        Setting("Implementation of attention and layers; auto: triton on a GPU; cpu (C++) or else torch on a CPU"),
    ] = "auto"
    mem_fraction_static: Annotated[
        float | None,
        Setting("Fraction of memory for weights and KV; default: on a GPU all that steps leave, on a CPU a small pool"),
    ] = None
    max_total_tokens: Annotated[
        int | None, Setting("Size of the KV pool in tokens; default: computed from the memory")
    ] = None
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
    enable_return_hidden_states: Annotated[
        bool, Setting("Let requests ask for hidden states; the decode steps of such requests are not recorded")
    ] = False
    grammar_backend: Annotated[
        Literal["auto", "xgrammar", "llguidance", "none"],
        Setting("Library for structured output; auto: xgrammar for plain JSON schemas, llguidance for everything else"),
    ] = "auto"
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
    page_size: Annotated[
        int | None, Setting("Tokens in a KV page; default: 1, or 32 on a CPU whose C++ kernels support the model")
    ] = None
    radix_eviction_policy: Annotated[
        Literal["value", "lru", "lfu", "fifo", "mru", "filo"],
        Setting(
            "Order in which cached prefixes are evicted; value: by the last use, the cost of computing them again and "
            "retention; lru: least recently used first; lfu: least often used first; fifo: oldest first; mru: most "
            "recently used first; filo: newest first"
        ),
    ] = "value"
    max_retention_s: Annotated[
        float, Setting("Maximum of a request's retention_seconds; 0: only requests without retention")
    ] = 3600.0
    tool_call_retention_s: Annotated[
        float,
        Setting(
            "Seconds of retention for a request that ends in a tool call, at most --max-retention-s; 0: none. It needs "
            "--radix-eviction-policy value"
        ),
    ] = 60.0
    max_retained_share: Annotated[
        float, Setting("Share of the KV pool that retention may cover; beyond it, the oldest retentions end")
    ] = 0.5
    disable_radix_cache: Annotated[bool, Setting("Cache and share no prefixes")] = False
    kv_events_config: Annotated[
        str | None,
        Setting(
            "Publishes what the prefix cache stores and drops, for routers. JSON with the names of vLLM and SGLang: "
            '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": ""}'
        ),
    ] = None
    enable_hierarchical_cache: Annotated[
        bool, Setting("Keep the KV of prefixes that leave the KV pool in host memory, in files, or in both")
    ] = False
    hicache_size: Annotated[
        float | None,
        Setting("GB (2**30 bytes) of host memory for KV; default: none, or 1 with --hicache-storage-dir"),
    ] = None
    hicache_storage_dir: Annotated[
        str | None, Setting("Folder for files with KV, which survive a restart and which several servers may share")
    ] = None
    hicache_storage_size: Annotated[
        float, Setting("GB (2**30 bytes) of all files in --hicache-storage-dir; the least recently used ones go first")
    ] = 16.0
    disable_overlap_schedule: Annotated[
        bool, Setting("Plan a step only after the tokens of the last step are known, as is always done on a CPU")
    ] = False
    disable_cuda_graph: Annotated[
        bool, Setting("Do not record decode steps: launch each kernel or operation separately")
    ] = False
    fuse_small_steps: Annotated[
        bool,
        Setting(
            "With Triton attention, compute steps of at most 8 tokens with fewer kernels: norms, sums and activations "
            "inside the linear layers. Tokens have other bits than without the flag. Not measured on a GPU yet"
        ),
    ] = False
    cuda_graph_max_bs: Annotated[
        int | None, Setting("Batch size of the largest recorded decode step; default: 256")
    ] = None
    random_seed: Annotated[
        int | None,
        Setting("Seed for requests without a seed and for dummy weights; default: random at each start"),
    ] = None
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
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Setting("Lowest level of log messages that are shown")
    ] = "info"
    enable_metrics: Annotated[
        bool, _server("Count requests for Prometheus: /metrics, and times in the meta_info of /generate")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        _server("URL to send OpenTelemetry traces to by OTLP over HTTP; example: http://127.0.0.1:4318/v1/traces"),
    ] = None
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
    explain_schedule: Annotated[
        float | None,
        Setting("Log which limits and requests a request waited for, if it waited so many seconds; default: never"),
    ] = None
    update_weights_dir: Annotated[
        str | None, _server("Folder whose models /update_weights_from_disk may load; default: it is refused")
    ] = None
    profile_dir: Annotated[
        str | None, _server("Folder for traces of /start_profile, which is refused without this flag")
    ] = None
    decode_log_interval: Annotated[int, Setting("Number of decode steps between two log lines")] = 40
    record_schedule: Annotated[
        str | None,
        Setting(
            "File that records all requests, with their token ids, and each step of the scheduler, for `tercet bench "
            "scheduler --replay`; it is rotated at 64 MiB"
        ),
    ] = None

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def honours_retention(self) -> bool:
        """Whether the prefix cache keeps retained prefixes longer than others."""
        return self.radix_eviction_policy == "value" and not self.disable_radix_cache

    def with_seed(self) -> ServerArgs:
        """The same settings with `random_seed` set. If it is None, a seed is drawn from the system."""
        if self.random_seed is not None:
            return self
        return dataclasses.replace(self, random_seed=secrets.randbits(32))

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that open the server; none without a key."""
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key)

    def without_secrets(self) -> dict[str, Any]:
        """All settings that may be shown, by their names."""
        hints = get_type_hints(ServerArgs, include_extras=True)
        secret = {name for name, hint in hints.items() if get_args(hint)[1].secret}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in secret}

    @property
    def origins(self) -> tuple[str, ...]:
        """The allowed origins; ("*",) for all."""
        return parse_origins(self.allowed_origins)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerArgs:
        """Make settings from keyword arguments or a parsed file. Raises ValueError for a wrong name or type."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown setting {', '.join(unknown)}; known settings: {', '.join(sorted(known))}")
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
