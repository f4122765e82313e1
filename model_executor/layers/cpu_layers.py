"""The layers of a decoder on the compiled CPU operations (csrc/cpu): eight operations per decoder layer and step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...srt.machine.huge_pages import zeroed
from ...srt.model_files.delta_net_config import DeltaNetConfig
from ...srt.model_files.experts_config import ExpertsConfig
from ...srt.model_files.latent_config import LatentConfig
from ...srt.model_files.model_config import Activation
from ...srt.model_files.rope_config import RopeConfig
from .. import cpu_extension
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from ..row_states import LayerStates
from .activation import SquaredReLU
from .attention import QKNorm
from .cpu_convolution import CpuShortConvolution
from .cpu_delta_net import CpuDeltaNet
from .cpu_latent import CpuLatentAttention
from .cpu_lora import CpuLoraGatedLinear, FusedGates
from .delta_net import DeltaNetWeights
from .embedding import Embedding, ScaledEmbedding
from .experts import Expert, ExpertWeights, RouterWeights, WithSharedExpert
from .head_gates import HeadGates
from .kinds import AttentionLayer, Layer, Rotary, TorchLayers
from .latent_attention import LatentAttention, LatentLayers, angles_of_halves
from .layernorm import RMSNorm
from .lora_layers import LoraTables
from .output_head import GreedyHead, GreedyLayer, OutputHead, PlainHead
from .packing import PackedWeight, Weight, interleave, pack, pack_bias, pack_gated
from .rotary import CosSin, Rotaries, RotationTable, query_scales
from .shared_attention import SharedAttention
from .short_convolution import ConvolutionWeights

_ops = torch.ops.tercet_cpu


class CpuRMSNorm(RMSNorm):
    """RMSNorm that adds the residual and normalises in one pass."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__(weight.float(), eps)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return _ops.rms_norm(x, residual, self.weight, self.eps)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        _ops.add_rms_norm(x, residual, self.weight, self.eps)


class CpuLinear:
    """`Linear` on packed weights. `to_float`: the result is float32 for every type of x.

    The weights have the type of x, or are quantized; for an x of float32 they may also be bfloat16. Those of another
    type are converted to that of x when they are multiplied. `compact`: see `panels_of`.
    """

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None = None, *, to_float: bool = False, compact: bool = False
    ) -> None:
        self.num_out = weight.shape[0]
        self.packed = pack(weight, compact=compact)
        self.bias = pack_bias(bias)
        self._to_float = to_float

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.linear(x, self.packed, self.bias, self.num_out, self._to_float)

    def argmax(self, x: torch.Tensor, soft_cap: float | None = None) -> torch.Tensor:
        """The column of the first largest number of each row of the float32 result, as `GreedyLayer` says."""
        return _ops.linear_argmax(x, self.packed, self.bias, self.num_out, soft_cap)


class CpuFloat32Router(CpuLinear):
    """A router that has weights of float32 beside an x of bfloat16, which it multiplies in float32."""

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return super().__call__(_ops.widened(x), batch)


def router_of(router: RouterWeights, dtype: torch.dtype, *, compact: bool = False) -> CpuLinear:
    """The layer of a router. `dtype`: the type of x. `compact`: see `panels_of`."""
    weight = router.weight
    stored = weight.panels.dtype if isinstance(weight, PackedWeight) else weight.dtype
    kind = CpuFloat32Router if dtype != torch.float32 and stored == torch.float32 else CpuLinear
    return kind(weight, router.bias, to_float=True, compact=compact)


class CpuGatedLinear:
    """`GatedLinear` on packed weights. A panel holds gate rows in one half and the matching up rows in the other.

    `compact`: see `panels_of`.
    """

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None = None,
        activation: Activation = "silu",
        *,
        compact: bool = False,
    ) -> None:
        self.num_out = weight.shape[0] // 2
        self._activation = activation
        self.packed = pack_gated(weight, compact=compact)
        self.bias = None if bias is None else pack_bias(interleave(bias))

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch | None = None, lora: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        return _ops.gated_linear(x, self.packed, self.bias, self.num_out, self._activation, lora)


class CpuExperts:
    """`ComposedExperts` as one operation on packed weights, which may be part of a recorded step."""

    def __init__(
        self,
        router: Layer,
        experts: Sequence[ExpertWeights],
        config: ExpertsConfig,
        corrections: torch.Tensor | None,
        *,
        compact: bool = False,
        rounds_to_integers: bool = False,
    ) -> None:
        """`router`: gives logits in float32. `corrections`: those of RouterWeights. `compact`: see `panels_of`.
        `rounds_to_integers`: weights of 8 or 4 bits multiply rows of integers."""
        self._router = router
        self._bits: int | None = None
        self.gate_ups: list[torch.Tensor] = []
        self.downs: list[torch.Tensor] = []
        self._gate_up_biases: list[torch.Tensor] = []
        self._down_biases: list[torch.Tensor] = []
        for weights in experts:
            if rounds_to_integers:
                self._bits = weights.down.bits
            self.gate_ups.append(pack_gated(weights.gate_up, compact=compact))
            self.downs.append(pack(weights.down, compact=compact))
            if weights.gate_up_bias is not None and weights.down_bias is not None:
                self._gate_up_biases.append(pack_bias(interleave(weights.gate_up_bias)))
                self._down_biases.append(pack_bias(weights.down_bias))
        gate = (None, None) if config.gate is None else config.gate
        self._options = config.intermediate_size, config.num_experts_per_token, config.normalized, *gate
        groups = config.num_groups, config.groups_per_token
        self._choice = config.has_sigmoids, corrections, config.least_sum, config.scale, *groups

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        weights = self.gate_ups, self.downs, self._gate_up_biases, self._down_biases
        arguments = x, self._router(x), *weights, *self._options
        if self._bits is None:
            return _ops.experts(*arguments, *self._choice)
        return _ops.quantized_experts(*arguments, self._bits, *self._choice)


class PackedEmbedding:
    """`Embedding` that reads the packed output head, for models that tie the embedding to the head."""

    def __init__(self, head: CpuLinear, dtype: torch.dtype) -> None:
        """`dtype`: type of the vectors."""
        self._packed = head.packed
        self._dtype = dtype

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.embedding(ids, self._packed, self._dtype)


class QuantizedEmbedding:
    """`Embedding` that dequantises rows of a packed weight, which may be that of the output head."""

    def __init__(self, packed: torch.Tensor, dtype: torch.dtype) -> None:
        """`packed`: the panels of a QuantizedWeight. `dtype`: type of the vectors."""
        self._packed = packed
        self._dtype = dtype

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.quantized_embedding(ids, self._packed, self._dtype)


class CpuEmbedding(Embedding):
    """`Embedding` whose vectors may have another type than the weight."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        """`dtype`: type of the vectors."""
        super().__init__(weight)
        self._dtype = dtype

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.plain_embedding(ids, self.weight, self._dtype)


class CpuScaledEmbedding(ScaledEmbedding):
    """`ScaledEmbedding` that may be part of a recorded step."""

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        x = self.embedding(ids, batch)
        _ops.scale_rows(x, self.factor)
        return x


def embedding_of(weight: Weight, dtype: torch.dtype) -> Layer:
    """The embedding with a weight of its own. `dtype`: type of the vectors."""
    return CpuEmbedding(weight, dtype) if isinstance(weight, torch.Tensor) else QuantizedEmbedding(pack(weight), dtype)


class Rotation(NamedTuple):
    """The rotation of a step: the table of cosines and sines, the position of each token, and the table of the factors
    of queries, float32 [context_len], if they have some."""

    cos_sin: torch.Tensor
    positions: torch.Tensor
    q_scales: torch.Tensor | None = None


class CpuRotary:
    """The table of cosines and sines, float32 [context_len, head_dim], filled up to the longest sequence so far.

    Memory is taken as the table fills: a full table for a context of a million tokens would take half a gigabyte.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> None:
        try:
            memory = zeroed(context_len * head_dim * 4)
        except OSError as error:  # as for the KV pool (runner/load.py)
            raise ValueError(
                f"no memory for the angles of --context-length {context_len} positions ({error.strerror}); lower it"
            ) from None
        self._rotations = RotationTable(rope, torch.from_numpy(memory).view(torch.float32).view(context_len, head_dim))
        self._q_scales = query_scales(rope.query_scale, torch.arange(context_len))

    def cover(self, num_positions: int) -> None:
        """Fill the table for sequences of up to `num_positions` tokens. Called before each step."""
        self._rotations.cover(num_positions)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions: int64 [T], below the last `cover` when the step runs."""
        return Rotation(self._rotations.table, positions, self._q_scales)


class CpuAttention:
    """`Attention` whose norm of queries and keys, rotation and store of K and V are one operation."""

    def __init__(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> None:
        self.sinks = sinks
        self.layer_id = layer_id
        self.backend = backend
        self._norm: tuple[torch.Tensor | None, torch.Tensor | None, float] = None, None, 0.0
        self._norm_after = qk_norm is not None and qk_norm.norm_after
        if qk_norm is not None:
            self._norm = qk_norm.q_weight.float(), qk_norm.k_weight.float(), qk_norm.eps
        self._k, self._v = backend.kv_pool.k_buffer[layer_id], backend.kv_pool.v_buffer[layer_id]

    def __call__(self, qkv: torch.Tensor, rotation: Rotation, batch: ForwardBatch) -> torch.Tensor:
        cos_sin, positions, q_scales = rotation
        pools = self._k, self._v
        _ops.rotate_and_store(
            qkv, positions, batch.out_cache_loc, cos_sin, *self._norm, *pools, q_scales, self._norm_after
        )
        q = qkv.view(qkv.shape[0], -1, self.backend.head_dim)[:, : self.backend.num_heads]
        return self.backend.attend(q, self.layer_id, batch, self.sinks)


def _angles(rotation: Rotation) -> CosSin:
    return angles_of_halves(CosSin(*rotation.cos_sin.index_select(0, rotation.positions).chunk(2, 1)))


class CpuLayers(TorchLayers):
    """Norms, rotation and attention on compiled operations; linear layers and embeddings on torch's."""

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        return CpuRMSNorm(weight, eps)

    def rotary(self, ropes: Sequence[RopeConfig], head_dim: int, context_len: int, device: torch.device) -> Rotary:
        return Rotaries([CpuRotary(rope, rope.head_dim or head_dim, context_len, device) for rope in ropes])

    def attention(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> AttentionLayer:
        return CpuAttention(layer_id, backend, qk_norm, sinks)

    def latent_attention(
        self, layer_id: int, backend: AttentionBackend, sizes: LatentConfig, layers: LatentLayers
    ) -> AttentionLayer:
        return LatentAttention(layer_id, backend, sizes, layers, _angles)

    def shared_attention(self, layer_id: int, backend: AttentionBackend, query_norm: RMSNorm) -> AttentionLayer:
        return SharedAttention(layer_id, backend, query_norm, _angles)

    def gated_heads(self, attention: AttentionLayer, num_gates: int) -> AttentionLayer:
        return HeadGates(attention, num_gates, _ops.gate_heads)

    def convolution(self, stored: torch.Tensor, weights: ConvolutionWeights) -> AttentionLayer:
        return CpuShortConvolution(stored, weights)

    def delta_net(
        self, sizes: DeltaNetConfig, states: LayerStates, weights: DeltaNetWeights, eps: float
    ) -> AttentionLayer:
        return CpuDeltaNet(sizes, states, weights, eps)

    def squared_relu(self, linear: Layer) -> Layer:
        return SquaredReLU(linear, _ops.square_relu)

    def with_shared_expert(self, experts: Layer, shared: Expert, gate: Any | None) -> Layer:
        return WithSharedExpert(experts, shared, self._shared_gate(gate), _ops.add_gated)

    def output_head(self, norm: RMSNorm, layer: Layer, soft_cap: float | None) -> OutputHead:
        if isinstance(layer, GreedyLayer):
            return GreedyHead(norm, layer, soft_cap, cap_logits=_ops.soft_cap)
        return PlainHead(norm, layer, soft_cap, cap_logits=_ops.soft_cap)

    def select_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return _ops.select_rows(x, indices)

    def scaled_embedding(self, embedding: Layer, factor: float) -> Layer:
        return CpuScaledEmbedding(embedding, factor)


class CpuFloatLayers(CpuLayers):
    """All layers on compiled operations."""

    compiled = True
    fully_compiled = True

    def __init__(self, dtype: torch.dtype, *, compact: bool = False) -> None:
        """`dtype`: type of the activations. `compact`: weights of bfloat16 are compact, as `panels_of` says."""
        self._dtype = dtype
        self._compact = compact

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return CpuLinear(weight, bias, compact=self._compact)

    def latent_attention(
        self, layer_id: int, backend: AttentionBackend, sizes: LatentConfig, layers: LatentLayers
    ) -> AttentionLayer:
        return CpuLatentAttention(layer_id, backend, sizes, layers)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> FusedGates:
        return CpuGatedLinear(weight, bias, activation, compact=self._compact)

    def lora_gated_linear(
        self, weight: Any, bias: torch.Tensor | None, activation: Activation, tables: LoraTables
    ) -> Layer:
        return CpuLoraGatedLinear(self.gated_linear(weight, bias, activation), tables)

    def router(self, router: RouterWeights) -> Layer:
        return router_of(router, self._dtype, compact=self._compact)

    def experts(self, router: RouterWeights, experts: Sequence[ExpertWeights], config: ExpertsConfig) -> Layer:
        return CpuExperts(self.router(router), experts, config, router.corrections, compact=self._compact)

    def head(self, weight: Any) -> Layer:
        return CpuLinear(weight, to_float=True, compact=self._compact)

    def embedding(self, weight: Any) -> Layer:
        return embedding_of(weight, self._dtype)

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        assert isinstance(head, CpuLinear)
        if not isinstance(weight, torch.Tensor) and weight.bits is not None:
            return QuantizedEmbedding(head.packed, self._dtype)
        return PackedEmbedding(head, self._dtype)


def cpu_layers(dtype: torch.dtype, widths: Iterable[int], *, compact: bool) -> CpuLayers:
    """Make the layers of a CPU for the type of the activations and the widths of the model's vectors.

    `compact`: weights of bfloat16 are compact, as `panels_of` says.

    Linear layers use torch's operations in two cases: the build for this processor cannot multiply the type, or a width
    is not a whole number of words (32 bits).
    """
    whole_words = all(width * dtype.itemsize % 4 == 0 for width in widths)
    if not whole_words or not cpu_extension.multiplies(dtype):
        return CpuLayers()
    return CpuFloatLayers(dtype, compact=compact)
