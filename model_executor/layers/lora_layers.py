"""Linear layers with LoRA adapters, around layers of any kind: y = W x + B A x, with the A and B of a token's adapter.

All adapters are in tables on the device. A layer adds what the adapters of its batch compute; other tokens keep their
bits. A gate and up projection is computed in two steps, because the sum comes before the activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...srt.model_files.experts_config import ExpertsConfig
from ...srt.model_files.model_config import Activation
from ...srt.model_files.rope_config import RopeConfig
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch, TokenAdapters
from .attention import QKNorm
from .decode_start import StartDecode
from .experts import ExpertWeights, RouterWeights
from .kinds import AttentionLayer, GatedSteps, Layer, LayerKinds, Rotary
from .layernorm import RMSNorm
from .output_head import OutputHead
from .residual import BeforeSum, StreamLayer


class LoraSize(NamedTuple):
    """The size of the tables of adapters."""

    num_slots: int
    max_rank: int


class LoraShape(NamedTuple):
    """The shape of a linear layer that adapters change."""

    rows: tuple[int, ...]
    """of each matrix that is stacked in it; each has an A of its own"""
    columns: int


class LoraWeight(NamedTuple):
    """The matrices of an adapter for one layer, float32."""

    a: torch.Tensor
    """[stacked matrices, rank, in]"""
    b: torch.Tensor
    """[out, rank], times the scale of the adapter. Rows of a stacked matrix multiply the output of its A"""


class LoraTables(Protocol):
    """The matrices of all adapters for one layer, on the device, in the type of the activations."""

    num_bytes: int

    def write(self, slot: int, weight: LoraWeight | None) -> None:
        """Write an adapter to a slot, 1 or higher. None: the adapter does not change this layer, or the slot is empty.

        Raises ValueError if a number is too large for the type. Then the slot is in an undefined state.
        """

    def add(self, x: torch.Tensor, out: torch.Tensor, adapters: TokenAdapters) -> None:
        """Add B A x to `out` in place: x [T, in], out [T, out]. Both products have sums of float32."""


class TorchLoraTables:
    """The LoraTables of plain torch: A [slots, stacked matrices * rank, in], B [slots, out, rank]."""

    def __init__(self, shape: LoraShape, size: LoraSize, dtype: torch.dtype, device: torch.device) -> None:
        num_slots, rank = size
        self._shape, self._rank = shape, rank
        self.a = torch.zeros(num_slots, len(shape.rows) * rank, shape.columns, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, sum(shape.rows), rank, dtype=dtype, device=device)
        self.num_bytes = self.a.nbytes + self.b.nbytes

    def write(self, slot: int, weight: LoraWeight | None) -> None:
        a, b = self.a[slot - 1], self.b[slot - 1]
        a.zero_()
        b.zero_()
        if weight is not None:
            rank = weight.b.shape[1]
            a.unflatten(0, (-1, self._rank))[:, :rank] = rounded(weight.a, a.dtype).to(a.device)
            b[:, :rank] = rounded(weight.b, b.dtype).to(b.device)

    def add(self, x: torch.Tensor, out: torch.Tensor, adapters: TokenAdapters) -> None:
        wide = torch.promote_types(self.a.dtype, torch.float32)
        for slot, tokens in adapters.groups:
            a, b = self.a[slot - 1].to(wide), self.b[slot - 1].to(wide)
            between = (x.index_select(0, tokens).to(wide) @ a.t()).split(self._rank, 1)
            parts = zip(between, b.split(self._shape.rows), strict=True)
            added = torch.cat([h @ rows.t() for h, rows in parts], 1)
            out.index_copy_(0, tokens, (out.index_select(0, tokens) + added).to(out.dtype))


def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix of an adapter in the type of a table. Raises ValueError if a number is too large for it."""
    found = matrix.to(dtype)
    if not found.isfinite().all():
        raise ValueError(f"the adapter has numbers that are too large for {str(dtype).removeprefix('torch.')}")
    return found


class AdaptedWeight(NamedTuple):
    """A weight whose layer has adapters."""

    weight: Any
    tables: LoraTables


class AdaptedParameters(Mapping[str, Any]):
    """Parameters, of which some are AdaptedWeights. LoraLayers makes layers of them."""

    def __init__(self, parameters: Mapping[str, Any], tables: Mapping[str, LoraTables]) -> None:
        self._parameters = parameters
        self._tables = tables

    def __getitem__(self, name: str) -> Any:
        found = self._parameters[name]
        return AdaptedWeight(found, self._tables[name]) if name in self._tables else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class LoraLinear:
    """A linear layer with adapters."""

    def __init__(self, layer: Layer, tables: LoraTables) -> None:
        self._layer = layer
        self._tables = tables

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        out = self._layer(x, batch)
        if batch is not None and batch.adapters is not None:
            self._tables.add(x, out, batch.adapters)
        return out


class LoraGatedLinear:
    """A gate and up projection with adapters, and its activation."""

    def __init__(self, steps: GatedSteps, tables: LoraTables) -> None:
        self._projection = LoraLinear(steps.projection, tables)
        self._activate = steps.activate

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self._activate(self._projection(x, batch))


class LoraLayers:
    """The LayerKinds whose linear layers have adapters if their weights are AdaptedWeights."""

    def __init__(self, layers: LayerKinds) -> None:
        """`layers`: makes all layers without adapters."""
        self._layers = layers
        self.compiled = layers.compiled
        self.compiled_experts = layers.compiled_experts

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        if not isinstance(weight, AdaptedWeight):
            return self._layers.linear(weight, bias)
        return LoraLinear(self._layers.linear(weight.weight, bias), weight.tables)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> Layer:
        if not isinstance(weight, AdaptedWeight):
            return self._layers.gated_linear(weight, bias, activation)
        return LoraGatedLinear(self._layers.gated_steps(weight.weight, bias, activation), weight.tables)

    def gated_steps(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> GatedSteps:
        return self._layers.gated_steps(weight, bias, activation)

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        return self._layers.norm(weight, eps)

    def rotary(self, ropes: Sequence[RopeConfig], head_dim: int, context_len: int, device: torch.device) -> Rotary:
        return self._layers.rotary(ropes, head_dim, context_len, device)

    def attention(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> AttentionLayer:
        return self._layers.attention(layer_id, backend, qk_norm, sinks)

    def experts(self, router: RouterWeights, experts: Sequence[ExpertWeights], config: ExpertsConfig) -> Layer:
        return self._layers.experts(router, experts, config)

    def after_norm(self, norm: RMSNorm, layer: Layer) -> StreamLayer:
        return self._layers.after_norm(norm, layer)

    def before_sum(self, layer: Layer, next_norm: RMSNorm) -> BeforeSum:
        return self._layers.before_sum(layer, next_norm)

    def select_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return self._layers.select_rows(x, indices)

    def head(self, weight: Any) -> Layer:
        return self._layers.head(weight)

    def output_head(self, norm: RMSNorm, layer: Layer) -> OutputHead:
        return self._layers.output_head(norm, layer)

    def embedding(self, weight: Any) -> Layer:
        return self._layers.embedding(weight)

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        return self._layers.tied_embedding(weight, head)

    def scaled_embedding(self, embedding: Layer, factor: float) -> Layer:
        return self._layers.scaled_embedding(embedding, factor)

    def start_decode(self, embedding: Layer, rotary: Rotary) -> StartDecode:
        return self._layers.start_decode(embedding, rotary)
