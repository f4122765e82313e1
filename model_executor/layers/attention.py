"""The attention layer in plain torch: norm of queries and keys, rotary embedding, or the reverse, then the backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from .layernorm import HeadNorm, RowNorm
from .rotary import CosSin, rotate


class QKNorm(NamedTuple):
    """The norm of queries and keys: of each head (Qwen 3), or of all heads of a token together (OLMo 2).

    The weights have shape [head_dim], or [heads * head_dim] and [kv_heads * head_dim].
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    norm_after: bool = False
    """whether it comes after the rotation, as a norm of each head may (Hunyuan)"""

    def is_of_rows(self, head_dim: int) -> bool:
        """Whether it is the norm of all heads together. A single head is normalised alike in both ways."""
        return len(self.q_weight) != head_dim


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
        self._norm: HeadNorm | RowNorm | None = None
        self._norm_after = qk_norm is not None and qk_norm.norm_after
        if qk_norm is not None and qk_norm.is_of_rows(self.head_dim):
            self._norm = RowNorm(qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps)
        elif qk_norm is not None:
            self._norm = HeadNorm(qk_norm.q_weight, qk_norm.k_weight, self.num_heads, self.num_kv_heads, qk_norm.eps)

    def __call__(self, qkv: torch.Tensor, cos_sin: CosSin, batch: ForwardBatch) -> torch.Tensor:
        qkv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self._norm is not None and not self._norm_after:
            qk = self._norm(qk)
        qk = rotate(qk, cos_sin)
        if self._norm is not None and self._norm_after:
            qk = self._norm(qk)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        if cos_sin.q_scales is not None:
            q = (q * cos_sin.q_scales[:, None, None]).to(q.dtype)
        return self.backend.forward(q, k, v, self.layer_id, batch, self.sinks)
