"""Everything that a runner has to know, resolved once: no "auto" and no None where a number is meant."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...srt.model_files.model_config import ModelConfig
from ...srt.server_args import ServerArgs
from ..attention.registry import default_page_size, resolve_attention_backend
from ..device.dtypes import resolve_dtype
from ..weights.loader import checkpoint_dtype
from ..weights.quantization import check_quantization

_DEFAULT_RECORDED_ROWS = 256
_SMALLEST_LIMITS_FOR_PAGES = (2048, 128, 128)
"""Tokens of the KV pool, of a step's prompts and of a chunk. Below one of them, pages of several tokens waste much."""


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """The settings of a runner as they are in force."""

    device: torch.device
    dtype: torch.dtype
    """of weights, activations, keys and values"""
    attention_backend: str
    """a name of attention.registry.BACKEND_NAMES"""
    quantization: str | None
    weight_cache: str
    page_size: int
    context_len: int
    max_running_requests: int
    max_prefill_tokens: int
    """prompt tokens of the largest step; a GPU keeps memory for it"""
    chunked_prefill_size: int
    """prompt tokens of one request in one step"""
    mem_fraction_static: float | None
    """None: the pool takes what steps leave of a GPU; on a CPU it is modest"""
    max_total_tokens: int | None
    """None: the memory decides"""
    record_decodes: bool
    """whether decode steps are recorded as graphs"""
    max_recorded_rows: int
    """requests of the largest decode step that is recorded"""
    seed: int
    """of dummy weights; 0 when the settings have none"""


def resolve_settings(server_args: ServerArgs, config: ModelConfig) -> RunnerSettings:
    """Raises ValueError for settings that do not fit the model or the machine."""
    device = resolve_device(server_args.device)
    on_cpu = device.type == "cpu"
    dtype = resolve_dtype(server_args.dtype, checkpoint_dtype(config), device)
    backend = resolve_attention_backend(server_args.attention_backend, device)
    check_quantization(server_args.quantization, backend, device)
    context_len = server_args.context_length or config.context_len
    if context_len > config.context_len:
        raise ValueError(f"--context-length must be at most the model's {config.context_len}, got {context_len}")
    return RunnerSettings(
        device=device,
        dtype=dtype,
        attention_backend=backend,
        quantization=server_args.quantization,
        weight_cache=server_args.weight_cache,
        page_size=_page_size(server_args) or default_page_size(backend, config.head_dim, dtype),
        context_len=context_len,
        max_running_requests=server_args.max_running_requests,
        max_prefill_tokens=server_args.max_prefill_tokens or (2048 if on_cpu else 16384),
        chunked_prefill_size=server_args.chunked_prefill_size or (1024 if on_cpu else 8192),
        mem_fraction_static=server_args.mem_fraction_static,
        max_total_tokens=server_args.max_total_tokens,
        record_decodes=not server_args.disable_cuda_graph,
        max_recorded_rows=min(
            server_args.max_running_requests, server_args.cuda_graph_max_bs or _DEFAULT_RECORDED_ROWS
        ),
        seed=server_args.random_seed or 0,
    )


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises ValueError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, but torch finds none")
    return device


def _page_size(server_args: ServerArgs) -> int | None:
    """None: the default of the attention backend, which a small pool or small steps rule out."""
    limits = server_args.max_total_tokens, server_args.max_prefill_tokens, server_args.chunked_prefill_size
    is_small = any(
        limit is not None and limit < smallest
        for limit, smallest in zip(limits, _SMALLEST_LIMITS_FOR_PAGES, strict=True)
    )
    return server_args.page_size or (1 if is_small else None)
