"""The interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...mem_cache.token_to_kv_pool import TokenToKVPool
from ...srt.errors import ModelNotSupported
from ...srt.model_files.rope_config import RopeConfig
from ..forward_batch import ForwardBatch
from ..step import Int32Array


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer, as its model family defines it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """factor of the dot product of a query and a key"""
    rope: RopeConfig
    window: int | None = None
    """number of last positions that a token attends to, itself included; None: all positions"""
    soft_cap: float | None = None
    """scores become soft_cap * tanh(score / soft_cap), before masks and sinks (Gemma 2); None: no cap"""
    has_sinks: bool = False
    """whether each head has a learned logit that joins the softmax without a value (GPT-OSS)"""
    latent_dim: int | None = None
    """Of latent attention (MLA, arXiv 2405.04434), whose one KV head serves all query heads: the value of a token is
    the first `latent_dim` components of its key. None: each token has values beside its keys."""


class AttentionBackend(ABC):
    """Computes attention over the KV pool, for all layers of a model.

    The runner calls `plan(batch)` once per step. Then each layer with attention calls `forward`, or `attend` if it
    stores K and V itself. `layer_id` numbers these layers from 0; layers without attention do not count.

    A token at position p of a request attends to positions 0..p of that request, the tokens of this step included. In a
    layer with a sliding window it attends to the last `window` of them. A backend may keep its plan until the next
    step, but no results.
    """

    name: str

    def __init__(self, specs: Sequence[AttentionSpec], kv_pool: TokenToKVPool) -> None:
        """`specs`: of the layers with attention. Raises ModelNotSupported for one that this backend cannot compute."""
        first = specs[0]
        for spec in specs:
            if (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.latent_dim) != (
                first.num_heads,
                first.num_kv_heads,
                first.head_dim,
                first.latent_dim,
            ):
                raise ModelNotSupported(f"attention backend {self.name} needs the same kind of heads in all layers")
        self.kv_pool = kv_pool
        self.num_heads, self.num_kv_heads, self.head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        self.latent_dim = first.latent_dim
        self.attended_dim = first.head_dim if first.latent_dim is None else first.latent_dim
        """components of what attention sums for a head, as in ModelConfig"""
        self.scales = [spec.scale for spec in specs]
        """[num_layers]"""
        self.sliding_windows = [spec.window for spec in specs]
        """[num_layers]; None: the layer attends to all positions"""
        self.soft_caps = [spec.soft_cap for spec in specs]
        """[num_layers]; None: the scores of the layer have no cap"""
        self._have_sinks = [spec.has_sinks for spec in specs]

    def num_splits(self, seq_lens: Int32Array) -> int | None:
        """The number of work units (splits) of decoding requests with these lengths: host, int32 [B].

        None: the steps of this backend cannot be recorded in a CUDA graph. A number promises that a DECODE step can be
        recorded: `plan` uses `seq_lens_host` only to size its buffers, and the recorded step serves all lengths with at
        most that many units.
        """
        return None

    def max_part_bytes(self, context_len: int) -> int:
        """An upper bound in bytes of what a layer may take in addition to what the warm-up steps of a GPU show.

        `context_len`: the most tokens of a request.
        """
        return 0

    def decode_part_bytes(self, num_rows: int, context_len: int, pool_tokens: int) -> int:
        """An upper bound in bytes of the partial results of a launch that serves requests with one new token.

        `num_rows`: the most requests; `context_len`: the most tokens of one; `pool_tokens`: the size of the KV pool.
        """
        return 0

    def of_layer(self, layer_id: int) -> tuple[AttentionBackend, int]:
        """The backend that computes a layer, and the number of the layer there."""
        return self, layer_id

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare the plan that all layers of this step share. Must not wait for the device."""

    @abstractmethod
    def attend(
        self, q: torch.Tensor, layer_id: int, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention for q: [T, num_heads, head_dim], rotated. Returns [T, num_heads * attended_dim].

        The last dimension of q is contiguous; the others may have any strides, because q is often a view of the fused
        projection. The pool already holds K and V of the new tokens, at `batch.out_cache_loc`. sinks: the logit of each
        head that joins the softmax without a value, float32 [num_heads], contiguous; None: the layer has none.
        """

    def _check_sinks(self, layer_id: int, sinks: torch.Tensor | None) -> None:
        """Assert that a layer has sinks if and only if its spec says so."""
        assert (sinks is not None) == self._have_sinks[layer_id], f"the spec of layer {layer_id} says otherwise"
        if sinks is not None:
            assert sinks.shape == (self.num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store k [T, num_kv_heads, head_dim] and v [T, num_kv_heads, attended_dim] at `batch.out_cache_loc`, then
        call `attend`.

        k is rotated. The strides of k and v are as free as those of q.
        """
        self.kv_pool.set_kv(layer_id, batch.out_cache_loc, k, v)
        return self.attend(q, layer_id, batch, sinks)
