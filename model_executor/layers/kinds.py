"""Which layers a model is made of: plain torch, our Triton kernels, or a CPU's compiled operations.

Chosen once, when the model is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from ...srt.model_files.rope_config import RopeConfig
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from .attention import Attention, QKNorm
from .embedding import Embedding
from .layernorm import RMSNorm
from .linear import GatedLinear, Linear
from .rotary import RotaryEmbedding


class Layer(Protocol):
    """x [T, in] -> [T, out]. `batch`: whose tokens these are, for a layer that has weights of some requests' own (an
    adapter); None outside a step."""

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None, /) -> torch.Tensor: ...


class Rotary(Protocol):
    """positions: int64 [T] -> what `LayerKinds.attention` takes as the rotation."""

    def cover(self, num_positions: int) -> None:
        """Called before a step of a CPU: its positions are below `num_positions`."""

    def __call__(self, positions: torch.Tensor, /) -> Any: ...


class AttentionLayer(Protocol):
    """qkv [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads * head_dim]; keys and values go to the pool."""

    def __call__(self, qkv: torch.Tensor, rotation: Any, batch: ForwardBatch, /) -> torch.Tensor: ...


class LayerKinds(Protocol):
    """Makes layers that fit together. Those of another kind take and return the same but for rounding.

    A weight is a tensor, or a QuantizedWeight where layers of such are made.
    """

    compiled: bool
    """Whether layers are a CPU's compiled operations, every one of them."""

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm: ...

    def rotary(self, rope: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> Rotary:
        """For positions below `context_len`."""

    def attention(self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None) -> AttentionLayer: ...

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer: ...

    def gated_linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        """Gate and up projection in one, to silu(gate) * up."""

    def head(self, weight: Any) -> Layer:
        """Hidden states to logits."""

    def embedding(self, weight: Any) -> Layer:
        """Token ids to vectors."""

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        """The same where the head is made of the same weight."""


class TorchLayers:
    """Layers of plain torch (LayerKinds)."""

    compiled = False

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight, eps)

    def rotary(self, rope: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> Rotary:
        return RotaryEmbedding(rope, head_dim, device)

    def attention(self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None) -> AttentionLayer:
        return Attention(layer_id, backend, qk_norm)

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return Linear(weight, bias)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return GatedLinear(weight, bias)

    def head(self, weight: Any) -> Layer:
        return Linear(weight)

    def embedding(self, weight: Any) -> Layer:
        return Embedding(weight)

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        return Embedding(weight)


def layers_for(
    attention_backend: str, dtype: torch.dtype, *, quantized: bool = False, widths: Iterable[int] = ()
) -> LayerKinds:
    """Kernels beside kernels: the layers that run where this attention backend does. Only `cpu` has quantized ones.

    `widths`: of everything that linear layers multiply
    """
    assert not quantized or attention_backend == "cpu"
    match attention_backend:
        case "triton":
            from .triton_layers import TritonLayers  # Triton takes half a second to import

            return TritonLayers()
        case "cpu" if quantized:
            from .quantized_layers import QuantizedLayers  # as below

            return QuantizedLayers(dtype)
        case "cpu":
            from .cpu_layers import cpu_layers  # its operations exist where the backend does

            return cpu_layers(dtype, widths)
    return TorchLayers()
