"""The layers of a decoder on the compiled operations of a CPU (csrc/cpu): eight of them a layer and step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...srt.machine.huge_pages import Arena, zeroed
from ...srt.model_files.rope_config import RopeConfig
from .. import cpu_extension
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from .attention import QKNorm
from .kinds import AttentionLayer, Layer, Rotary, TorchLayers
from .layernorm import RMSNorm
from .rotary import RotationTable

_ops = torch.ops.tercet_cpu


class CpuRMSNorm(RMSNorm):
    """Sum and norm in one pass."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return _ops.rms_norm(x, residual, self.weight, self.eps)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight [n, k] -> panels [ceil(n / width), k / per_word, width, per_word], zeros beyond n.

    A panel holds as many columns of the product as two vector registers hold floats, word by word of 32 bits: those of
    one step of a row's dot products lie side by side.
    """
    width, per_word = 2 * cpu_extension.lanes(), 4 // weight.itemsize
    n, k = weight.shape
    assert k % per_word == 0, (n, k)
    return on_huge_pages(padded(weight, 0, width).view(-1, width, k // per_word, per_word).transpose(1, 2))


_arena = Arena()


def on_huge_pages(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    return torch.from_numpy(_arena.take(x.nbytes)).view(x.dtype).view(x.shape).copy_(x)


def padded(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Zeros at the end of that dimension; x itself, not a copy, where its length is a multiple already."""
    missing = -x.shape[dim] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def pack_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None:
        return None
    width = 2 * cpu_extension.lanes()
    return padded(bias.float(), 0, width).view(-1, width)


class CpuLinear:
    """As `Linear`; `to_float`: the result is float32 whatever x is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, to_float: bool = False) -> None:
        self.num_out = weight.shape[0]
        self.packed = pack(weight)
        self.bias = pack_bias(bias)
        self._to_float = to_float

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.linear(x, self.packed, self.bias, self.num_out, self._to_float)


class CpuGatedLinear:
    """As `GatedLinear`: the two halves of a panel are what one vector of the result is made of."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.num_out = weight.shape[0] // 2
        self.packed = pack(interleave(weight))
        self.bias = None if bias is None else pack_bias(interleave(bias))

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.linear_silu_mul(x, self.packed, self.bias, self.num_out)


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """[2 * n, ...]: a vector's worth of rows of the first half, the same of the second, the next of the first ..."""
    lanes = cpu_extension.lanes()
    halves = padded(gate_up.view(2, -1, *gate_up.shape[1:]), 1, lanes).view(2, -1, lanes, *gate_up.shape[1:])
    return halves.transpose(0, 1).reshape(-1, *gate_up.shape[1:])


class PackedEmbedding:
    """As `Embedding`, out of the packed output head of a model that ties the two."""

    def __init__(self, head: CpuLinear) -> None:
        self._packed = head.packed

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.embedding(ids, self._packed)


class Rotation(NamedTuple):
    """Where a step's tokens look up their angles."""

    cos_sin: torch.Tensor
    positions: torch.Tensor


class CpuRotary:
    """Cosines and sines of the positions that sequences have reached, float32 [context_len, head_dim]. Memory is taken
    as it is filled: a context of a million tokens would take half a gigabyte at once."""

    def __init__(self, rope: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> None:
        table = torch.from_numpy(zeroed(context_len * head_dim * 4)).view(torch.float32).view(context_len, head_dim)
        self._rotations = RotationTable(rope, table)

    def cover(self, num_positions: int) -> None:
        """To be called before a step whose sequences have so many tokens."""
        self._rotations.cover(num_positions)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions: int64 [T], covered when they are used"""
        return Rotation(self._rotations.table, positions)


class CpuAttention:
    """Norm of heads, rotation and the store of K and V in one operation. As `Attention` otherwise."""

    def __init__(self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None) -> None:
        self.layer_id = layer_id
        self.backend = backend
        self._norm = (None, None, 0.0) if qk_norm is None else qk_norm
        self._k, self._v = backend.kv_pool.k_buffer[layer_id], backend.kv_pool.v_buffer[layer_id]

    def __call__(self, qkv: torch.Tensor, rotation: Rotation, batch: ForwardBatch) -> torch.Tensor:
        cos_sin, positions = rotation
        _ops.rotate_and_store(qkv, positions, batch.out_cache_loc, cos_sin, *self._norm, self._k, self._v)
        q = qkv.view(qkv.shape[0], -1, self.backend.head_dim)[:, : self.backend.num_heads]
        return self.backend.attend(q, self.layer_id, batch)


class CpuLayers(TorchLayers):
    """Norms, rotation and attention are compiled operations; linear layers are torch's."""

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        return CpuRMSNorm(weight, eps)

    def rotary(self, rope: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> Rotary:
        return CpuRotary(rope, head_dim, context_len, device)

    def attention(self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None) -> AttentionLayer:
        return CpuAttention(layer_id, backend, qk_norm)


class CpuFloatLayers(CpuLayers):
    """Everything is a compiled operation."""

    compiled = True

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return CpuLinear(weight, bias)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return CpuGatedLinear(weight, bias)

    def head(self, weight: Any) -> Layer:
        return CpuLinear(weight, to_float=True)

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        assert isinstance(head, CpuLinear)
        return PackedEmbedding(head)


def cpu_layers(dtype: torch.dtype, widths: Iterable[int] = ()) -> CpuLayers:
    """Linear layers are torch's where this processor's build does not multiply the type, or a width is no whole number
    of words (32 bits)."""
    whole_words = all(width * dtype.itemsize % 4 == 0 for width in widths)
    return CpuFloatLayers() if whole_words and cpu_extension.multiplies(dtype) else CpuLayers()
