"""Triton layers whose small steps are a short chain of kernels: norm, sums and activation inside the linear layers.

A step of at most 8 tokens is bound by the number of its dependent kernels. Here a layer has 5 of them instead of 10:
norm + qkv; rotation, store and attention; o + sum; norm + gate and up + activation; down + sum. Attention takes one
kernel if each request has one new token (`TritonAttentionBackend.can_fuse`), else three or more. The output head
computes the last norm. A layer before a sum prepares the norm after it (`ScaledRows`).
"""

from __future__ import annotations

import torch

from ..attention.base import AttentionBackend
from ..attention.triton_backend import TritonAttentionBackend
from ..forward_batch import ForwardBatch
from ..kernels.scaled_rows import ScaledRows
from ..kernels.skinny_linear import MAX_ROWS, Norm, skinny_linear, skinny_linear_sum
from .attention import QKNorm
from .kinds import AttentionLayer
from .layernorm import RMSNorm
from .linear import GatedLinear, Linear
from .output_head import OutputHead, PlainHead
from .residual import BeforeSum, Layer, NormedLayer, Pending, Stream, StreamLayer, SummedLayer
from .rotary import CosSin
from .triton_layers import TritonAttention, TritonLayers


class FusedNormedLayer(NormedLayer):
    """The StreamLayer that is one kernel for few tokens."""

    def __init__(self, norm: RMSNorm, layer: Linear | GatedLinear, *, dependent: bool = False) -> None:
        super().__init__(norm, layer)
        self._dependent = dependent
        self._gated = isinstance(layer, GatedLinear)
        self._linear = layer.linear if isinstance(layer, GatedLinear) else layer
        assert not self._linear.is_packed
        self._norm_args = Norm(norm.weight, norm.eps)

    def __call__(
        self, pending: Pending, residual: torch.Tensor | None, batch: ForwardBatch | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        few = _few_rows(Stream(pending, residual))
        if few is None:
            return super().__call__(pending, residual, batch)
        rows, stream = few
        weight, bias = self._linear.weight, self._linear.bias
        out = skinny_linear(rows, weight, bias, norm=self._norm_args, gated=self._gated, dependent=self._dependent)
        return out, stream


class FusedSummedLayer(SummedLayer):
    """The BeforeSum that adds in the layer's own kernel for few tokens."""

    def __init__(self, layer: Linear, next_norm: RMSNorm, *, dependent: bool = False) -> None:
        super().__init__(layer)
        assert not layer.is_packed
        self._linear = layer
        self._next_norm = next_norm.weight
        self._dependent = dependent

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch | None) -> Pending:
        if len(x) > MAX_ROWS:
            return super().__call__(x, residual, batch)
        weight, bias = self._linear.weight, self._linear.bias
        return skinny_linear_sum(x, weight, bias, residual, self._next_norm, dependent=self._dependent)


class FusedHead(PlainHead):
    """The OutputHead that is one kernel for few tokens, without a soft cap. Their logits have the same bits in any
    batch."""

    def __init__(self, norm: RMSNorm, layer: Linear, soft_cap: float | None = None, *, dependent: bool = False) -> None:
        super().__init__(norm, layer, soft_cap)
        assert not layer.is_packed
        self._dependent = dependent
        self._weight = layer.weight
        self._norm_args = Norm(norm.weight, norm.eps)

    def of_hidden(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if len(hidden) > MAX_ROWS:
            return super().of_hidden(hidden, out)
        return self._few_logits(hidden, None, out)

    def __call__(self, stream: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        few = _few_rows(stream)
        return super().__call__(stream, out) if few is None else self._few_logits(few[0], self._norm_args, out)

    def _few_logits(self, x: torch.Tensor | ScaledRows, norm: Norm | None, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            num_rows = len(x.x if isinstance(x, ScaledRows) else x)
            out = torch.empty((num_rows, len(self._weight)), dtype=torch.float32, device=self._weight.device)
        return self._capped(skinny_linear(x, self._weight, norm=norm, out=out, dependent=self._dependent))


class FusedTritonAttention(TritonAttention):
    """The TritonAttention that is one kernel where its backend can fuse.

    That kernel cannot scale queries, or normalise after the rotation.
    """

    def __init__(
        self,
        layer_id: int,
        backend: TritonAttentionBackend,
        qk_norm: QKNorm | None,
        sinks: torch.Tensor | None = None,
        *,
        dependent: bool = False,
    ) -> None:
        super().__init__(layer_id, backend, qk_norm, sinks)
        self._triton = backend
        self._rotates_last = qk_norm is None or not qk_norm.norm_after
        self._fused_norm = {key: value for key, value in self._norm.items() if key != "norm_after"}
        self._dependent = dependent

    def __call__(self, qkv: torch.Tensor, cos_sin: CosSin, batch: ForwardBatch) -> torch.Tensor:
        cos, sin, q_scales = cos_sin
        if not self._rotates_last or q_scales is not None or not self._triton.can_fuse(batch, qkv.dtype):
            return super().__call__(qkv, cos_sin, batch)
        return self._triton.attend_fused(
            self._heads(qkv), cos, sin, self.layer_id, batch, self.sinks, dependent=self._dependent, **self._fused_norm
        )


class FusedTritonLayers(TritonLayers):
    """TritonLayers with fused kernels for steps of at most MAX_ROWS tokens.

    Experts, activations other than SiLU and vectors of float16 have no fused kernels.
    """

    def __init__(self, *, dependent: bool = False) -> None:
        """`dependent`: whether the fused kernels are dependent launches (kernels/dependent_launch.py)."""
        self._dependent = dependent

    def attention(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> AttentionLayer:
        assert isinstance(backend, TritonAttentionBackend)
        return FusedTritonAttention(layer_id, backend, qk_norm, sinks, dependent=self._dependent)

    def after_norm(self, norm: RMSNorm, layer: Layer) -> StreamLayer:
        if isinstance(layer, Linear) or (isinstance(layer, GatedLinear) and layer.activation == "silu"):
            return FusedNormedLayer(norm, layer, dependent=self._dependent)
        return super().after_norm(norm, layer)

    def before_sum(self, layer: Layer, next_norm: RMSNorm) -> BeforeSum:
        assert isinstance(layer, Linear)
        return FusedSummedLayer(layer, next_norm, dependent=self._dependent)

    def output_head(self, norm: RMSNorm, layer: Layer, soft_cap: float | None) -> OutputHead:
        assert isinstance(layer, Linear)
        return FusedHead(norm, layer, soft_cap, dependent=self._dependent)


def _few_rows(stream: Stream) -> tuple[torch.Tensor | ScaledRows, torch.Tensor] | None:
    """What the next norm needs, and the stream as one tensor, if it has few rows and nothing is to be added."""
    pending, residual = stream
    if isinstance(pending, ScaledRows):
        assert residual is not None and len(residual) == len(pending.x)
        return pending, residual
    whole = pending if residual is None else residual if pending is None else None
    return (whole, whole) if whole is not None and len(whole) <= MAX_ROWS else None
