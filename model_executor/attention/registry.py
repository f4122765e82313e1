"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from ...mem_cache.token_to_kv_pool import MHATokenToKVPool
from .. import cpu_extension
from .base import AttentionBackend, AttentionSpec

_PACKAGE = __package__
# Named rather than imported: the Triton backend costs half a second of imports that a CPU server does not need.
_BACKENDS = {
    "torch": ("torch_backend", "TorchAttentionBackend"),
    "cpu": ("cpu_backend", "CpuAttentionBackend"),
    "triton": ("triton_backend", "TritonAttentionBackend"),
}
BACKEND_NAMES = tuple(_BACKENDS)
PAGE_OF_PANELS = 32
"""Tokens that are whole panels in every build of the compiled operations."""


def resolve_attention_backend(name: str, device: torch.device) -> str:
    """`auto` is triton on a GPU, and on a CPU the compiled operations where they were built, else torch.

    Raises ValueError for a name that is not known, or a backend that cannot run on this device.
    """
    if name == "auto":
        if device.type == "cuda":
            return "triton"
        return "cpu" if cpu_extension.load() else "torch"
    if name not in _BACKENDS:
        raise ValueError(f"attention backend must be auto, {', '.join(BACKEND_NAMES)}, got {name!r}")
    if name == "cpu" and (device.type != "cpu" or not cpu_extension.load()):
        raise ValueError(f"attention backend cpu needs a CPU and the compiled C++ kernels. {cpu_extension.remedy()}")
    return name


def kv_panel(backend: str, page_size: int, head_dim: int, dtype: torch.dtype) -> int | None:
    """Slots of a block where the KV pool is to be kept in panels (`MHATokenToKVPool`); `backend` is resolved."""
    panel = cpu_extension.kv_panel(dtype, head_dim) if backend == "cpu" else None
    return panel if panel is not None and page_size % panel == 0 else None


def default_page_size(backend: str, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a KV page: one, or what it takes to keep keys and values in panels; `backend` is resolved."""
    return 1 if kv_panel(backend, PAGE_OF_PANELS, head_dim, dtype) is None else PAGE_OF_PANELS


def create_attention_backend(name: str, specs: Sequence[AttentionSpec], kv_pool: MHATokenToKVPool) -> AttentionBackend:
    """`name` as `resolve_attention_backend` returned it; `specs`: one per layer."""
    module, cls = _BACKENDS[name]
    backend = getattr(import_module(f".{module}", _PACKAGE), cls)(specs, kv_pool)
    assert isinstance(backend, AttentionBackend)
    return backend
