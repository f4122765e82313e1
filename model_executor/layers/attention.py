"""The attention layer in plain torch: norm of heads, rotary embedding, then the attention backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from .layernorm import HeadNorm
from .rotary import CosSin, rotate


class QKNorm(NamedTuple):
    """The norm of query and key heads (Qwen 3). The weights have shape [head_dim]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class Attention:
    """Attention on the fused projection: qkv [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads * head_dim]."""

    def __init__(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> None:
        """`sinks`: see `AttentionBackend.attend`. They are not copied, because an update may overwrite them."""
        self.sinks = sinks
        self.layer_id = layer_id
        self.backend = backend
        self.num_heads, self.num_kv_heads, self.head_dim = backend.num_heads, backend.num_kv_heads, backend.head_dim
        self._norm = None
        if qk_norm is not None:
            self._norm = HeadNorm(qk_norm.q_weight, qk_norm.k_weight, self.num_heads, self.num_kv_heads, qk_norm.eps)

    def __call__(self, qkv: torch.Tensor, cos_sin: CosSin, batch: ForwardBatch) -> torch.Tensor:
        qkv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self._norm is not None:
            qk = self._norm(qk)
        qk = rotate(qk, cos_sin)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        return self.backend.forward(q, k, v, self.layer_id, batch, self.sinks)
