"""What the model asks of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...mem_cache.token_to_kv_pool import MHATokenToKVPool
from ...srt.errors import ModelNotSupported
from ...srt.model_files.rope_config import RopeConfig
from ..forward_batch import ForwardBatch


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer, as its model family wants it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """of the product of a query and a key"""
    rope: RopeConfig
    window: int | None = None
    """a token attends to so many of the last positions, itself included; None: to all"""
    soft_cap: float | None = None
    """scores become soft_cap * tanh(score / soft_cap); None: they stay (Gemma 2)"""
    has_sinks: bool = False
    """every head has a learned logit that takes part in the softmax, without a value (GPT-OSS)"""


class AttentionBackend(ABC):
    """Attends to all keys and values of a layer that a request has, those of this step included.

    The model's caller calls `plan(batch)` once per step, then the model calls `forward` for layer 0, 1, ... in
    order; layers that store K and V themselves call `attend` instead. A token at position p of a request attends to
    positions 0..p of that request, or to the last `window` of them (itself included) in a layer with a sliding
    window. A backend may keep what it planned, never what it computed.
    """

    name: str

    def __init__(self, specs: Sequence[AttentionSpec], kv_pool: MHATokenToKVPool) -> None:
        """`specs`: one per layer. Raises ModelNotSupported for one that this backend cannot compute."""
        first = specs[0]
        for spec in specs:
            if spec.soft_cap is not None or spec.has_sinks:
                wanted = "a soft cap of scores" if spec.soft_cap is not None else "attention sinks"
                raise ModelNotSupported(f"attention backend {self.name} does not support {wanted}")
            if (spec.num_heads, spec.num_kv_heads, spec.head_dim) != (
                first.num_heads,
                first.num_kv_heads,
                first.head_dim,
            ):
                raise ModelNotSupported(f"attention backend {self.name} needs the same kind of heads in all layers")
        self.kv_pool = kv_pool
        self.num_heads, self.num_kv_heads, self.head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        self.scales = [spec.scale for spec in specs]
        """[num_layers]"""
        self.sliding_windows = [spec.window for spec in specs]
        """[num_layers] None: the layer sees everything"""

    def num_splits(self, seq_lens: npt.NDArray[np.int32]) -> int | None:
        """Units of attention work that decoding requests of these lengths are (host, int32 [B]).

        A backend that answers promises that a DECODE step may be recorded in a CUDA graph: `plan` takes from
        `seq_lens_host` only how many units to make room for, and the recorded work then serves any lengths that are no
        more units than that. None: steps of this backend cannot be recorded.
        """
        return None

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepares what all layers of this step share. Must not wait for the device."""

    @abstractmethod
    def attend(self, q: torch.Tensor, layer_id: int, batch: ForwardBatch) -> torch.Tensor:
        """q: [T, num_heads, head_dim], rotated; head_dim is contiguous, the other strides are free (a view of the fused
        projection). The new tokens' K and V stand at `batch.out_cache_loc` of the pool. Returns
        [T, num_heads * head_dim]."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Stores k, v ([T, num_kv_heads, head_dim], strides as of q; k rotated) where the batch says, then attends."""
        self.kv_pool.set_kv(layer_id, batch.out_cache_loc, k, v)
        return self.attend(q, layer_id, batch)
