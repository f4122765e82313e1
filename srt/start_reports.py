"""What a child process tells its parent when it has started: once, over a pipe."""

from __future__ import annotations

import msgspec

from .adapters import AdapterFacts
from .weight_messages import WeightFacts


class CpuKernels(msgspec.Struct, frozen=True):
    """The compiled CPU operations that a server uses, and how they are tuned (model_executor/cpu_calibration.py)."""

    build: str
    block_kib: int
    chunk: int
    bfloat16: str
    """Products of bfloat16: native or widened."""
    prefetch: str
    """The cache that weights, keys and values are prefetched into: l1 or l2."""
    linears: str
    """Whose linear layers the model has: tercet or onednn."""
    weights: str
    """How weights of bfloat16 are stored: compact, in 12 bits a number, or plain."""
    source: str
    """Where the tuning is from: default, measured, or a file."""


class SchedulerReady(msgspec.Struct, frozen=True, kw_only=True, tag="scheduler_ready"):
    """The scheduler process is ready. The fields are facts that only a loaded model knows."""

    max_total_num_tokens: int
    max_running_requests: int
    max_req_input_len: int
    """Tokens of the longest prompt that fits into the context and into the KV pool."""
    context_len: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    vocab_size: int
    dtype: str
    """Type of the activations."""
    weights: WeightFacts
    device: str
    attention_backend: str
    page_size: int
    kv_bytes: int
    graph_bytes: int = 0
    """Device memory of CUDA graphs; 0 without graphs."""
    cpu_kernels: CpuKernels | None = None
    """None: the server does not use them."""
    adapters: list[AdapterFacts] = []
    """The loaded LoRA adapters."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The process has loaded the model or the tokenizer, and is a fork server now: it forks when it is asked."""


class DetokenizerReady(msgspec.Struct, frozen=True, tag="detokenizer_ready"):
    """The detokenizer process is ready."""


class GrammarWorkerReady(msgspec.Struct, frozen=True, tag="grammar_worker_ready"):
    """The grammar worker is ready."""


class HttpWorkerReady(msgspec.Struct, frozen=True, tag="http_worker_ready"):
    """The HTTP worker accepts connections, and has its tokenizer. It waits for the first EngineNews."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """A child could not start. `user_error`: the message says what to change; otherwise the log has the traceback."""

    message: str
    user_error: bool


Ready = SchedulerReady | DetokenizerReady | GrammarWorkerReady | HttpWorkerReady
ToParent = Ready | Loaded | StartFailed
