"""Attention backends by name."""

from __future__ import annotations

from importlib import import_module

import torch

from ...mem_cache.token_to_kv_pool import MHATokenToKVPool
from ...srt.model_config import ModelConfig
from .base import AttentionBackend

_PACKAGE = __package__
# Named rather than imported: the Triton backend costs half a second of imports that a CPU server does not need.
_BACKENDS = {
    "torch": ("torch_backend", "TorchAttentionBackend"),
    "triton": ("triton_backend", "TritonAttentionBackend"),
}
BACKEND_NAMES = tuple(_BACKENDS)


def resolve_attention_backend(name: str, device: torch.device) -> str:
    """`auto` is triton on a GPU and torch elsewhere. Raises ValueError for a name that is not known."""
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name not in _BACKENDS:
        raise ValueError(f"attention backend must be auto, {', '.join(BACKEND_NAMES)}, got {name!r}")
    return name


def create_attention_backend(name: str, config: ModelConfig, kv_pool: MHATokenToKVPool) -> AttentionBackend:
    """`name` as `resolve_attention_backend` returned it."""
    module, cls = _BACKENDS[name]
    backend = getattr(import_module(f".{module}", _PACKAGE), cls)(config, kv_pool)
    assert isinstance(backend, AttentionBackend)
    return backend
