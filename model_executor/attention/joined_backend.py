"""Attention for a model whose layers have heads of several kinds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...mem_cache.joined_kv_pool import JoinedKVPool
from ..forward_batch import ForwardBatch
from .base import AttentionBackend


class JoinedAttentionBackend(AttentionBackend):
    """Backends of one name, each for the layers of one pool of a JoinedKVPool.

    Layers call the backend of their pool, which `of_layer` returns. Its steps are not recorded in CUDA graphs, because
    the backends may have splits of different sizes.
    """

    def __init__(self, backends: Sequence[AttentionBackend], kv_pool: JoinedKVPool) -> None:
        self.name = backends[0].name
        self.kv_pool = kv_pool
        self._backends = backends

    def of_layer(self, layer_id: int) -> tuple[AttentionBackend, int]:
        assert isinstance(self.kv_pool, JoinedKVPool)
        pool, number = self.kv_pool.places[layer_id]
        return self._backends[pool], number

    def max_part_bytes(self, context_len: int) -> int:
        return max(backend.max_part_bytes(context_len) for backend in self._backends)

    def decode_part_bytes(self, num_rows: int, context_len: int, pool_tokens: int) -> int:
        return max(backend.decode_part_bytes(num_rows, context_len, pool_tokens) for backend in self._backends)

    def plan(self, batch: ForwardBatch) -> None:
        for backend in self._backends:
            backend.plan(batch)

    def attend(
        self, q: torch.Tensor, layer_id: int, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        backend, number = self.of_layer(layer_id)
        return backend.attend(q, number, batch, sinks)
