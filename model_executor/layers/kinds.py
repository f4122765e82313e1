"""Which layers a decoder is made of: plain torch, our Triton kernels, or a CPU's compiled operations.

Chosen once, when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ...srt.model_files.rope_config import RopeConfig
from .attention import Attention
from .embedding import Embedding
from .layernorm import RMSNorm
from .linear import GatedLinear, Linear
from .rotary import RotaryEmbedding

Layer = Callable[[torch.Tensor], torch.Tensor]


class LayerKinds(NamedTuple):
    """A set of layers that fit together. Those of another set take and return the same but for rounding."""

    norm: type[RMSNorm]
    rotary: Callable[..., Callable[[torch.Tensor], Any]]
    """(rope config, head_dim, context_len, device) -> (positions -> what `attention` takes as the rotation)"""
    attention: Callable[..., Callable[..., torch.Tensor]]
    linear: Callable[[Any, torch.Tensor | None], Layer] = Linear
    """(weight, bias); a weight is a tensor, or a QuantizedWeight where layers of such are made"""
    gated_linear: Callable[[Any, torch.Tensor | None], Layer] = GatedLinear
    """(weight, bias) of gate and up projection, to silu(gate) * up"""
    head: Callable[[Any], Layer] = Linear
    """weight -> (hidden states -> logits)"""
    tied_embedding: Callable[[Any, Any], Layer] = lambda weight, head: Embedding(weight)
    """(weight, the head made of it) -> (ids -> vectors)"""
    compiled: bool = False
    """Between embedding and logits there is nothing but a CPU's compiled operations."""


def _angles_anew(rope: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> RotaryEmbedding:
    return RotaryEmbedding(rope, head_dim, device)


TORCH_LAYERS = LayerKinds(RMSNorm, _angles_anew, Attention)


def layers_for(
    attention_backend: str, dtype: torch.dtype, *, quantized: bool = False, widths: Iterable[int] = ()
) -> LayerKinds:
    """Kernels beside kernels: the layers that run where this attention backend does. Only `cpu` has quantized ones.

    `widths`: of everything that linear layers multiply
    """
    assert not quantized or attention_backend == "cpu"
    match attention_backend:
        case "triton":
            from .triton_layers import TRITON_LAYERS  # Triton takes half a second to import

            return TRITON_LAYERS
        case "cpu" if quantized:
            from .quantized_layers import quantized_layers  # as below

            return quantized_layers(dtype)
        case "cpu":
            from .cpu_layers import cpu_layers  # its operations exist where the backend does

            return cpu_layers(dtype, widths)
    return TORCH_LAYERS
