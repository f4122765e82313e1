"""The layers of a model with LoRA adapters, around layers of any kind. Layers without adapters stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...srt.model_files.delta_net_config import DeltaNetConfig
from ...srt.model_files.experts_config import ExpertsConfig
from ...srt.model_files.latent_config import LatentConfig
from ...srt.model_files.model_config import Activation
from ...srt.model_files.rope_config import RopeConfig
from ..attention.base import AttentionBackend
from ..row_states import LayerStates
from .attention import QKNorm
from .decode_start import StartDecode
from .delta_net import DeltaNetWeights
from .experts import Expert, ExpertWeights, RouterWeights
from .kinds import AttentionLayer, Layer, LayerKinds, Rotary
from .latent_attention import LatentLayers
from .layernorm import RMSNorm
from .lora_layers import LoraLinear, LoraTables
from .output_head import OutputHead
from .residual import BeforeSum, StreamLayer
from .short_convolution import ConvolutionWeights


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


class LoraLayers:
    """The LayerKinds whose linear layers have adapters if their weights are AdaptedWeights."""

    def __init__(self, layers: LayerKinds) -> None:
        """`layers`: makes all layers without adapters."""
        self._layers = layers
        self.compiled = layers.compiled
        self.fully_compiled = layers.fully_compiled

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        if not isinstance(weight, AdaptedWeight):
            return self._layers.linear(weight, bias)
        return LoraLinear(self._layers.linear(weight.weight, bias), weight.tables)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> Layer:
        if not isinstance(weight, AdaptedWeight):
            return self._layers.gated_linear(weight, bias, activation)
        return self._layers.lora_gated_linear(weight.weight, bias, activation, weight.tables)

    def lora_gated_linear(
        self, weight: Any, bias: torch.Tensor | None, activation: Activation, tables: LoraTables
    ) -> Layer:
        return self._layers.lora_gated_linear(weight, bias, activation, tables)

    def squared_relu(self, linear: Layer) -> Layer:
        return self._layers.squared_relu(linear)

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        return self._layers.norm(weight, eps)

    def rotary(self, ropes: Sequence[RopeConfig], head_dim: int, context_len: int, device: torch.device) -> Rotary:
        return self._layers.rotary(ropes, head_dim, context_len, device)

    def attention(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> AttentionLayer:
        return self._layers.attention(layer_id, backend, qk_norm, sinks)

    def latent_attention(
        self, layer_id: int, backend: AttentionBackend, sizes: LatentConfig, layers: LatentLayers
    ) -> AttentionLayer:
        return self._layers.latent_attention(layer_id, backend, sizes, layers)

    def shared_attention(self, layer_id: int, backend: AttentionBackend, query_norm: RMSNorm) -> AttentionLayer:
        return self._layers.shared_attention(layer_id, backend, query_norm)

    def gated_heads(self, attention: AttentionLayer, num_gates: int) -> AttentionLayer:
        return self._layers.gated_heads(attention, num_gates)

    def convolution(self, stored: torch.Tensor, weights: ConvolutionWeights) -> AttentionLayer:
        return self._layers.convolution(stored, weights)

    def delta_net(
        self, sizes: DeltaNetConfig, states: LayerStates, weights: DeltaNetWeights, eps: float
    ) -> AttentionLayer:
        return self._layers.delta_net(sizes, states, weights, eps)

    def experts(self, router: RouterWeights, experts: Sequence[ExpertWeights], config: ExpertsConfig) -> Layer:
        return self._layers.experts(router, experts, config)

    def with_shared_expert(self, experts: Layer, shared: Expert, gate: Any | None) -> Layer:
        return self._layers.with_shared_expert(experts, shared, gate)

    def after_norm(self, norm: RMSNorm, layer: Layer) -> StreamLayer:
        return self._layers.after_norm(norm, layer)

    def before_sum(self, layer: Layer, next_norm: RMSNorm) -> BeforeSum:
        return self._layers.before_sum(layer, next_norm)

    def select_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return self._layers.select_rows(x, indices)

    def head(self, weight: Any) -> Layer:
        return self._layers.head(weight)

    def output_head(self, norm: RMSNorm, layer: Layer, soft_cap: float | None) -> OutputHead:
        return self._layers.output_head(norm, layer, soft_cap)

    def embedding(self, weight: Any) -> Layer:
        return self._layers.embedding(weight)

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        return self._layers.tied_embedding(weight, head)

    def scaled_embedding(self, embedding: Layer, factor: float) -> Layer:
        return self._layers.scaled_embedding(embedding, factor)

    def start_decode(self, embedding: Layer, rotary: Rotary) -> StartDecode:
        return self._layers.start_decode(embedding, rotary)
