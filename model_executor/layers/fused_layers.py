"""Triton layers whose small steps are a short chain of kernels: norm, sums and activation inside the linear layers.

A step of at most 8 tokens is bound by the number of its dependent kernels. Here a layer has 5 of them instead of 10:
norm + qkv; rotation, store and attention; o + sum; norm + gate and up + activation; down + sum. Attention takes one
kernel if each request has one new token (`TritonAttentionBackend.can_fuse`), else three or more.
"""

from __future__ import annotations

import torch

from ..attention.base import AttentionBackend
from ..attention.triton_backend import TritonAttentionBackend
from ..forward_batch import ForwardBatch
from ..kernels.skinny_linear import MAX_ROWS, Norm, skinny_linear
from .attention import QKNorm
from .kinds import AttentionLayer
from .layernorm import RMSNorm
from .linear import GatedLinear, Linear
from .residual import AfterNorm, BeforeSum, Layer, NormedLayer, SummedLayer
from .rotary import CosSin
from .triton_layers import TritonAttention, TritonLayers


class FusedNormedLayer(NormedLayer):
    """The AfterNorm that is one kernel for few tokens."""

    def __init__(self, norm: RMSNorm, layer: Linear | GatedLinear) -> None:
        super().__init__(norm, layer)
        self._gated = isinstance(layer, GatedLinear)
        self._linear = layer.linear if isinstance(layer, GatedLinear) else layer
        assert not self._linear.is_packed
        self._norm_args = Norm(norm.weight, norm.eps)

    def __call__(
        self, pending: torch.Tensor | None, residual: torch.Tensor | None, batch: ForwardBatch | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if pending is None or residual is None:
            stream = pending if residual is None else residual
            assert stream is not None
            if len(stream) <= MAX_ROWS:
                weight, bias = self._linear.weight, self._linear.bias
                return skinny_linear(stream, weight, bias, norm=self._norm_args, gated=self._gated), stream
        return super().__call__(pending, residual, batch)


class FusedSummedLayer(SummedLayer):
    """The BeforeSum that adds in the layer's own kernel for few tokens."""

    def __init__(self, layer: Linear) -> None:
        super().__init__(layer)
        assert not layer.is_packed
        self._linear = layer

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor | None:
        if len(x) > MAX_ROWS:
            return super().__call__(x, residual, batch)
        skinny_linear(x, self._linear.weight, self._linear.bias, residual=residual)
        return None


class FusedHead(Linear):
    """The output head whose logits of few tokens have the same bits in any batch."""

    def float32(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if len(x) > MAX_ROWS:
            return super().float32(x, out)
        if out is None:
            out = torch.empty((len(x), len(self.weight)), dtype=torch.float32, device=x.device)
        return skinny_linear(x, self.weight, out=out)


class FusedTritonAttention(TritonAttention):
    """The TritonAttention that is one kernel where its backend can fuse."""

    def __init__(self, layer_id: int, backend: TritonAttentionBackend, qk_norm: QKNorm | None) -> None:
        super().__init__(layer_id, backend, qk_norm)
        self._triton = backend

    def __call__(self, qkv: torch.Tensor, cos_sin: CosSin, batch: ForwardBatch) -> torch.Tensor:
        if not self._triton.can_fuse(batch, qkv.dtype):
            return super().__call__(qkv, cos_sin, batch)
        qkv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        return self._triton.attend_fused(qkv, *cos_sin, self.layer_id, batch, **self._norm)


class FusedTritonLayers(TritonLayers):
    """TritonLayers with fused kernels for steps of at most MAX_ROWS tokens. Types other than float16."""

    def attention(self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None) -> AttentionLayer:
        assert isinstance(backend, TritonAttentionBackend)
        return FusedTritonAttention(layer_id, backend, qk_norm)

    def after_norm(self, norm: RMSNorm, layer: Layer) -> AfterNorm:
        assert isinstance(layer, (Linear, GatedLinear))
        return FusedNormedLayer(norm, layer)

    def before_sum(self, layer: Layer) -> BeforeSum:
        assert isinstance(layer, Linear)
        return FusedSummedLayer(layer)

    def head(self, weight: torch.Tensor) -> Layer:
        return FusedHead(weight)
