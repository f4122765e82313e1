"""The kinds of layers that a model can be built from: plain torch, Triton kernels, or compiled CPU operations.

The kind is chosen once, when the model is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ...srt.model_files.delta_net_config import DeltaNetConfig
from ...srt.model_files.experts_config import ClampedGate, ExpertsConfig
from ...srt.model_files.latent_config import LatentConfig
from ...srt.model_files.model_config import Activation, ModelConfig
from ...srt.model_files.rope_config import RopeConfig
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from ..row_states import LayerStates
from .activation import SquaredReLU, gated_activation
from .attention import Attention, QKNorm
from .decode_start import StartDecode, TorchStart
from .delta_net import DeltaNet, DeltaNetWeights
from .embedding import Embedding, ScaledEmbedding
from .experts import ComposedExperts, Expert, ExpertWeights, RouterWeights, WithSharedExpert
from .head_gates import HeadGates, gate_heads
from .latent_attention import LatentAttention, LatentLayers, same_angles
from .layernorm import RMSNorm
from .linear import GatedLinear, Linear
from .lora_layers import LoraGatedLinear, LoraTables
from .output_head import OutputHead, PlainHead
from .residual import BeforeSum, Layer, NormedLayer, StreamLayer, SummedLayer
from .rotary import Rotaries, RotaryEmbedding
from .shared_attention import SharedAttention
from .short_convolution import ConvolutionWeights, ShortConvolution


class Rotary(Protocol):
    """The rotary embeddings of a model: positions int64 [T] -> a rotation for each, which attention layers take."""

    def cover(self, num_positions: int) -> None:
        """Prepare for positions below `num_positions`. Called before the first layer of each step on a CPU."""

    def __call__(self, positions: torch.Tensor, /) -> Sequence[Any]: ...


class AttentionLayer(Protocol):
    """The mixer of a layer, between two linear layers. It stores in the pool what later tokens need of its tokens.

    Attention: the outputs of the first linear layer, [T, n] -> [T, heads * value_dim]. Without latents, n is
    (heads + 2 * kv_heads) * head_dim. A short convolution: [T, 3 * channels] -> [T, channels]. It ignores rotations. So
    does a Gated DeltaNet, which changes the states of rows instead of storing in the pool.
    """

    def __call__(self, qkv: torch.Tensor, rotation: Any, batch: ForwardBatch, /) -> torch.Tensor: ...


class LayerKinds(Protocol):
    """A factory of layers of one kind. Layers of different kinds give the same results, except for rounding.

    A weight is a tensor, a QuantizedWeight for a kind with quantized layers, or an Fp8Weight for Triton layers.
    """

    compiled: bool
    """Whether all layers are compiled CPU operations, except `experts` and `latent_attention`."""
    fully_compiled: bool
    """Whether these two are compiled CPU operations, too."""

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm: ...

    def rotary(self, ropes: Sequence[RopeConfig], head_dim: int, context_len: int, device: torch.device) -> Rotary:
        """Make the rotary embeddings for positions below `context_len`. `head_dim`: the largest of any layer."""

    def attention(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> AttentionLayer:
        """Make attention. `layer_id`: the index of the layer among those with attention. `sinks`: those of a layer
        whose spec has them (`AttentionBackend.attend`)."""

    def latent_attention(
        self, layer_id: int, backend: AttentionBackend, sizes: LatentConfig, layers: LatentLayers
    ) -> AttentionLayer:
        """Make latent attention. `layer_id`: as in `attention`. `layers`: made by `norm` and `linear`."""

    def shared_attention(self, layer_id: int, backend: AttentionBackend, query_norm: RMSNorm) -> AttentionLayer:
        """Make attention to the K and V of another layer, `layer_id`. `query_norm`: of each head, made by `norm`."""

    def gated_heads(self, attention: AttentionLayer, num_gates: int) -> AttentionLayer:
        """Make attention with gates (HeadGates). `attention`: made by `attention`."""

    def convolution(self, stored: torch.Tensor, weights: ConvolutionWeights) -> AttentionLayer:
        """Make a short convolution. `stored`: a `TokenToKVPool.conv_buffer`, [slots, channels]."""

    def delta_net(
        self, sizes: DeltaNetConfig, states: LayerStates, weights: DeltaNetWeights, eps: float
    ) -> AttentionLayer:
        """Make a Gated DeltaNet. `eps`: that of the norm of its outputs."""

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer: ...

    def gated_linear(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> Layer:
        """Make the fused gate and up projection, which returns activation(gate) * up."""

    def lora_gated_linear(
        self, weight: Any, bias: torch.Tensor | None, activation: Activation, tables: LoraTables
    ) -> Layer:
        """Make the same with adapters. Tokens without one have the bits of the layer of `gated_linear`."""

    def squared_relu(self, linear: Layer) -> Layer:
        """Make the squared ReLU of a layer's outputs. `linear`: made by `linear`."""

    def experts(self, router: RouterWeights, experts: Sequence[ExpertWeights], config: ExpertsConfig) -> Layer:
        """Make the mixture of experts: x [T, hidden] -> [T, hidden]. `experts`: each is read once, in order."""

    def with_shared_expert(self, experts: Layer, shared: Expert, gate: Any | None) -> Layer:
        """Make the sum of a mixture of experts and of a shared expert.

        `experts`: made by `experts`. `shared`: made by `gated_linear` and `linear`. `gate`: the weight [1, hidden] of
        its gate; None: it has none.
        """

    def after_norm(self, norm: RMSNorm, layer: Layer) -> StreamLayer:
        """Join a norm and the layer after it. `layer`: made by `linear`, `gated_linear`, `squared_relu`, `experts` or
        `with_shared_expert`."""

    def before_sum(self, layer: Layer, next_norm: RMSNorm) -> BeforeSum:
        """Join a layer and the sum with the residual after it. `layer`: made by `linear`. `next_norm`: of the sum."""

    def select_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Select the tokens whose logits are computed: x [T, n], indices int64 [num_sampled] -> [num_sampled, n]."""

    def head(self, weight: Any) -> Layer:
        """Make the layer of the output head, from hidden states to logits."""

    def output_head(self, norm: RMSNorm, layer: Layer, soft_cap: float | None) -> OutputHead:
        """Join the last norm and the layer of the output head. `layer`: made by `head`. `soft_cap`: that of the logits,
        if they have one."""

    def embedding(self, weight: Any) -> Layer:
        """Make the embedding, from token ids to vectors."""

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        """Make the embedding of a model whose output head has the same weight."""

    def scaled_embedding(self, embedding: Layer, factor: float) -> Layer:
        """Make an embedding that multiplies the vectors of `embedding`, made by this factory."""

    def start_decode(self, embedding: Layer, rotary: Rotary) -> StartDecode:
        """Make the start of decode steps. `embedding`, `rotary`: made by this factory."""


class TorchLayers:
    """The LayerKinds of plain torch."""

    compiled = False
    fully_compiled = False

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight, eps)

    def rotary(self, ropes: Sequence[RopeConfig], head_dim: int, context_len: int, device: torch.device) -> Rotary:
        return Rotaries([RotaryEmbedding(rope, rope.head_dim or head_dim, device) for rope in ropes])

    def attention(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> AttentionLayer:
        return Attention(layer_id, backend, qk_norm, sinks)

    def latent_attention(
        self, layer_id: int, backend: AttentionBackend, sizes: LatentConfig, layers: LatentLayers
    ) -> AttentionLayer:
        return LatentAttention(layer_id, backend, sizes, layers, same_angles)

    def shared_attention(self, layer_id: int, backend: AttentionBackend, query_norm: RMSNorm) -> AttentionLayer:
        return SharedAttention(layer_id, backend, query_norm, same_angles)

    def gated_heads(self, attention: AttentionLayer, num_gates: int) -> AttentionLayer:
        return HeadGates(attention, num_gates, gate_heads)

    def convolution(self, stored: torch.Tensor, weights: ConvolutionWeights) -> AttentionLayer:
        return ShortConvolution(stored, weights)

    def delta_net(
        self, sizes: DeltaNetConfig, states: LayerStates, weights: DeltaNetWeights, eps: float
    ) -> AttentionLayer:
        return DeltaNet(sizes, states, weights, eps)

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return Linear(weight, bias)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> Layer:
        return GatedLinear(weight, bias, activation)

    def lora_gated_linear(
        self, weight: Any, bias: torch.Tensor | None, activation: Activation, tables: LoraTables
    ) -> Layer:
        activate = partial(gated_activation, activation=activation)
        return LoraGatedLinear(self.linear(weight, bias), activate, tables)

    def squared_relu(self, linear: Layer) -> Layer:
        return SquaredReLU(linear)

    def router(self, router: RouterWeights) -> Layer:
        """Make the layer of a router, which `float32_logits` calls."""
        return Linear(router.weight, router.bias)

    def experts(self, router: RouterWeights, experts: Sequence[ExpertWeights], config: ExpertsConfig) -> Layer:
        built = [self._expert(weights, config.gate) for weights in experts]
        return ComposedExperts(self.router(router), built, config, router.corrections)

    def with_shared_expert(self, experts: Layer, shared: Expert, gate: Any | None) -> Layer:
        return WithSharedExpert(experts, shared, self._shared_gate(gate))

    def _shared_gate(self, weight: Any | None) -> Layer | None:
        return None if weight is None else self.router(RouterWeights(weight))

    def _expert(self, weights: ExpertWeights, gate: ClampedGate | None) -> Expert:
        down = self.linear(weights.down, weights.down_bias)
        if gate is None:
            return Expert(self.gated_linear(weights.gate_up, weights.gate_up_bias, "silu"), down)
        return Expert(GatedLinear(weights.gate_up, weights.gate_up_bias, gate), down)

    def after_norm(self, norm: RMSNorm, layer: Layer) -> StreamLayer:
        return NormedLayer(norm, layer)

    def before_sum(self, layer: Layer, next_norm: RMSNorm) -> BeforeSum:
        return SummedLayer(layer)

    def select_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, indices)

    def head(self, weight: Any) -> Layer:
        return Linear(weight)

    def output_head(self, norm: RMSNorm, layer: Layer, soft_cap: float | None) -> OutputHead:
        return PlainHead(norm, layer, soft_cap)

    def embedding(self, weight: Any) -> Layer:
        return Embedding(weight)

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        return Embedding(weight)

    def scaled_embedding(self, embedding: Layer, factor: float) -> Layer:
        return ScaledEmbedding(embedding, factor)

    def start_decode(self, embedding: Layer, rotary: Rotary) -> StartDecode:
        return TorchStart(embedding, rotary)


def is_compiled(layers: LayerKinds, config: ModelConfig) -> bool:
    """Whether all layers of a model are compiled CPU operations, so that its steps can be recorded on a CPU."""
    if config.gemma4 is not None:  # its layers have parts in plain torch
        return False
    has_only_linears = config.experts is None and config.latent is None
    return layers.compiled and (layers.fully_compiled or has_only_linears)


def layers_for(
    attention_backend: str,
    dtype: torch.dtype,
    *,
    quantized: bool = False,
    widths: Iterable[int] = (),
    onednn: bool = False,
    compact: bool = False,
    fuse_small_steps: bool = False,
    dependent_launch: bool = False,
) -> LayerKinds:
    """The kind of layers that goes with an attention backend.

    `quantized`: whether weights are QuantizedWeights, which only `cpu` has. `widths`: lengths of the vectors that
    linear layers multiply. `onednn`: whether a CPU's linear layers are oneDNN's. `compact`: whether a CPU's weights of
    bfloat16 are compact (packing.py). `fuse_small_steps` and `dependent_launch`: see FusedTritonLayers; other backends
    have no such layers.
    """
    assert not quantized or attention_backend == "cpu"
    match attention_backend:
        case "triton" if fuse_small_steps:
            from .fused_layers import FusedTritonLayers  # importing Triton takes half a second

            return FusedTritonLayers(dependent=dependent_launch)
        case "triton":
            from .triton_layers import TritonLayers  # importing Triton takes half a second

            return TritonLayers()
        case "cpu" if quantized:
            from .quantized_layers import QuantizedLayers  # needs the compiled operations

            return QuantizedLayers(dtype)
        case "cpu" if onednn:
            from .onednn_layers import OneDnnLayers  # needs the compiled operations

            return OneDnnLayers(dtype)
        case "cpu":
            from .cpu_layers import cpu_layers  # needs the compiled operations, which this backend has loaded

            return cpu_layers(dtype, widths, compact=compact)
    return TorchLayers()
