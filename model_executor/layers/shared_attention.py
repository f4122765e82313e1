"""What Gemma 4 has around attention: a norm of values without weights, and layers that read the KV of another layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from .layernorm import RMSNorm
from .rotary import CosSin, rotate


class NormedValues:
    """Attention on the fused projection, whose values are normalised before."""

    def __init__(
        self,
        attention: Callable[[torch.Tensor, Any, ForwardBatch], torch.Tensor],
        kv_heads: tuple[int, int],
        eps: float,
        *,
        keys_are_values: bool,
    ) -> None:
        """`kv_heads`: their number, and the components of one. `keys_are_values`: the projection has queries and keys
        only, and the values are the keys before their norm and rotation."""
        self._attention = attention
        self._kv_heads = kv_heads
        self._size = kv_heads[0] * kv_heads[1]
        self._eps = eps
        self._keys_are_values = keys_are_values

    def __call__(self, qkv: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        if self._keys_are_values:
            qkv = torch.cat((qkv, qkv[:, -self._size :]), 1)
        values = qkv[:, -self._size :].unflatten(1, self._kv_heads)
        values.copy_(F.rms_norm(values.float(), self._kv_heads[1:], None, self._eps))
        return self._attention(qkv, rotation, batch)


class SharedAttention:
    """Attention of new queries to the K and V that an earlier layer has stored: [T, heads * head_dim] -> the same."""

    def __init__(
        self, layer_id: int, backend: AttentionBackend, query_norm: RMSNorm, angles: Callable[[Any], CosSin]
    ) -> None:
        """`layer_id`: of the earlier layer. `query_norm`: of each head. `angles`: makes what `rotate` takes from a
        rotation of the model."""
        self._layer_id = layer_id
        self._backend = backend
        self._query_norm = query_norm
        self._angles = angles

    def __call__(self, queries: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        q = self._query_norm(queries.reshape(-1, self._backend.head_dim)).view(len(queries), -1, self._backend.head_dim)
        return self._backend.attend(rotate(q, self._angles(rotation)), self._layer_id, batch)
