"""Which layers a decoder is made of: plain torch, or our Triton kernels. Chosen once, when the model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...srt.rope_config import RopeConfig
from .activation import silu_and_mul
from .attention import Attention
from .layernorm import RMSNorm
from .rotary import RotaryEmbedding


class LayerKinds(NamedTuple):
    """A set of layers that fit together. Those of another set take and return the same but for rounding."""

    norm: type[RMSNorm]
    rotary: Callable[..., Callable[[torch.Tensor], Any]]
    """(rope config, head_dim, context_len, device) -> (positions -> what `attention` takes as the rotation)"""
    attention: Callable[..., Callable[..., torch.Tensor]]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]


def _angles_anew(rope: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> RotaryEmbedding:
    return RotaryEmbedding(rope, head_dim, device)


TORCH_LAYERS = LayerKinds(RMSNorm, _angles_anew, Attention, silu_and_mul)


def layers_for(attention_backend: str) -> LayerKinds:
    """Kernels beside kernels: the layers that run where this attention backend does."""
    if attention_backend != "triton":
        return TORCH_LAYERS
    from .triton_layers import TRITON_LAYERS  # Triton takes half a second to import

    return TRITON_LAYERS
