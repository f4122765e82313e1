"""The layers of a decoder on Triton kernels, with fewer launches and fewer memory passes than plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...srt.model_files.delta_net_config import DeltaNetConfig
from ...srt.model_files.experts_config import ExpertsConfig
from ...srt.model_files.latent_config import LatentConfig
from ...srt.model_files.model_config import Activation
from ...srt.model_files.rope_config import RopeConfig
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from ..kernels.activation import act_and_mul
from ..kernels.decode_start import decode_start
from ..kernels.delta_net import Recurrence, delta_net
from ..kernels.experts import expert_weight_tables, experts_forward
from ..kernels.rmsnorm import add_rmsnorm, qk_rmsnorm, rmsnorm
from ..kernels.rotary import rotary
from ..kernels.short_convolution import short_convolution
from ..row_states import LayerStates
from .attention import QKNorm
from .decode_start import DecodeStart, StartDecode
from .delta_net import DeltaNet, DeltaNetWeights
from .embedding import Embedding, ScaledEmbedding
from .experts import ExpertWeights, RouterWeights
from .fp8_layers import Fp8GatedLinear, Fp8Linear
from .fp8_weight import Fp8Weight
from .kinds import AttentionLayer, Layer, Rotary, TorchLayers
from .latent_attention import LatentAttention, LatentLayers, angles_of_halves
from .layernorm import RMSNorm
from .linear import GatedLinear
from .lora_layers import LoraGatedLinear, LoraTables
from .rotary import CosSin, RotationTable, query_scales
from .shared_attention import SharedAttention
from .short_convolution import ConvolutionWeights, ShortConvolution


class TritonRMSNorm(RMSNorm):
    """RMSNorm that adds the residual and normalises in one kernel."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return rmsnorm(x, self.weight, self.eps, residual)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        add_rmsnorm(x, self.weight, self.eps, residual)


class RotaryTable:
    """The table of cosines and sines of all positions, computed once. A step reads its rows in one operation.

    A row has the angles of each rotary embedding of the model, in the width of the largest heads.
    """

    def __init__(self, ropes: Sequence[RopeConfig], head_dim: int, context_len: int, device: torch.device) -> None:
        table = torch.empty((context_len, len(ropes), head_dim), device=device)
        for index, rope in enumerate(ropes):
            RotationTable(rope, table[:, index]).cover(context_len)
        self.table = table.view(context_len, 2 * len(ropes), head_dim // 2)
        """float32, for each rotary embedding the cosines of each position, then its sines"""
        positions = torch.arange(context_len, device=device)
        self._halves = [(rope.head_dim or head_dim) // 2 for rope in ropes]
        self._q_scales = [query_scales(rope.query_scale, positions) for rope in ropes]

    def cover(self, num_positions: int) -> None:
        """Does nothing: the table covers all positions."""

    def __call__(self, positions: torch.Tensor) -> list[CosSin]:
        """Look up cosines and sines: positions int64 [T] -> [T, head_dim / 2] each."""
        return self.rotations(self.table.index_select(0, positions), positions)

    def rotations(self, angles: torch.Tensor, positions: torch.Tensor) -> list[CosSin]:
        """The rotations of positions. `angles`: their rows of the table."""
        halves = [half for half in self._halves for _ in range(2)]
        columns = [column[:, :half] for column, half in zip(angles.unbind(1), halves, strict=True)]
        scales = [None if table is None else table.index_select(0, positions) for table in self._q_scales]
        return [CosSin(*each) for each in zip(columns[::2], columns[1::2], scales, strict=True)]


class TritonStart:
    """The StartDecode that is one kernel."""

    def __init__(self, embedding: Embedding, rotary: RotaryTable, scale: float) -> None:
        """`scale`: what the vectors of the embedding are multiplied by."""
        self._tables = embedding.weight, rotary.table
        self._rotary = rotary
        self._scale = scale

    def __call__(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        newest_tokens: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> DecodeStart:
        ids, positions, x, angles = decode_start(
            rows, seq_lens, slots, newest_tokens, req_to_token, *self._tables, self._scale
        )
        return DecodeStart(ids, positions, x, self._rotary.rotations(angles, positions))


class TritonAttention:
    """`Attention` whose norm of heads, rotation and store of K and V are one kernel.

    A norm of all heads together is a kernel of its own, before that.
    """

    def __init__(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> None:
        self.sinks = sinks
        self.layer_id = layer_id
        self.backend = backend
        self.num_heads, self.num_kv_heads, self.head_dim = backend.num_heads, backend.num_kv_heads, backend.head_dim
        of_rows = qk_norm is not None and qk_norm.is_of_rows(self.head_dim)
        self._row_norm = qk_norm if of_rows else None
        self._norm: dict[str, Any] = {} if qk_norm is None or of_rows else qk_norm._asdict()

    def _heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """The heads of the projection, after a norm of all of them together: [T, heads + 2 * kv_heads, head_dim]."""
        if self._row_norm is not None:
            qk_rmsnorm(qkv, self._row_norm.q_weight, self._row_norm.k_weight, self._row_norm.eps)
        return qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)

    def __call__(self, qkv: torch.Tensor, cos_sin: CosSin, batch: ForwardBatch) -> torch.Tensor:
        qkv = self._heads(qkv)
        pool = self.backend.kv_pool
        rotary(
            qkv, self.num_heads, self.num_kv_heads, *cos_sin, **self._norm, slots=batch.out_cache_loc,
            k_buffer=pool.k_buffer[self.layer_id], v_buffer=pool.v_buffer[self.layer_id],
        )  # fmt: skip
        return self.backend.attend(qkv[:, : self.num_heads], self.layer_id, batch, self.sinks)


class TritonShortConvolution(ShortConvolution):
    """`ShortConvolution` in one kernel."""

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        return short_convolution(
            projected, self._weight, self._bias, self._stored, batch.positions, batch.out_cache_loc, batch.req_to_token,
            batch.rows, batch.extend_start_loc,
        )  # fmt: skip


class TritonDeltaNet(DeltaNet):
    """`DeltaNet` in three kernels. A token has the same bits in any batch and chunk."""

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        weights = Recurrence(self._convolution, self._decay_rate, self._decay_bias, self._norm)
        return delta_net(
            projected, weights, self._eps, self._sizes.num_key_heads, self._states.recent, self._states.matrices,
            batch.positions, batch.rows, batch.extend_start_loc, batch.saved_states,
        )  # fmt: skip


class TritonExperts:
    """A mixture of experts whose launches depend on shapes only, so that a graph may record them."""

    def __init__(self, router: RouterWeights, experts: Sequence[ExpertWeights], config: ExpertsConfig) -> None:
        self._router = router
        self._config = config
        kept = [[x for x in tensors if x is not None] for tensors in zip(*experts, strict=True)]
        self._kept = kept  # the tables have only their addresses
        gate_up, down, gate_up_bias, down_bias = kept
        (gate_up, gate_up_scales), (down, down_scales) = map(_values_and_scales, (gate_up, down))
        self._tables = expert_weight_tables(gate_up, down, gate_up_bias, down_bias, gate_up_scales, down_scales)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        config = self._config
        weight, bias, corrections = self._router
        return experts_forward(
            x, weight, self._tables, config.num_experts_per_token, normalized=config.normalized, router_bias=bias,
            sigmoids=config.has_sigmoids, corrections=corrections, least_sum=config.least_sum, scale=config.scale,
            num_groups=config.num_groups, groups_per_token=config.groups_per_token, gate=config.gate,
        )  # fmt: skip


def _values_and_scales(weights: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of fp8 weights. Other weights have no scales."""
    if not isinstance(weights[0], Fp8Weight):
        return weights, []
    return [weight.values for weight in weights], [weight.scales for weight in weights]


class TritonLayers(TorchLayers):
    """Norms, rotation, attention, convolutions, activations and fp8 products on Triton kernels; other products on
    cuBLAS."""

    def norm(self, weight: torch.Tensor, eps: float) -> RMSNorm:
        return TritonRMSNorm(weight, eps)

    def rotary(self, ropes: Sequence[RopeConfig], head_dim: int, context_len: int, device: torch.device) -> Rotary:
        return RotaryTable(ropes, head_dim, context_len, device)

    def attention(
        self, layer_id: int, backend: AttentionBackend, qk_norm: QKNorm | None, sinks: torch.Tensor | None = None
    ) -> AttentionLayer:
        return TritonAttention(layer_id, backend, qk_norm, sinks)

    def latent_attention(
        self, layer_id: int, backend: AttentionBackend, sizes: LatentConfig, layers: LatentLayers
    ) -> AttentionLayer:
        return LatentAttention(layer_id, backend, sizes, layers, angles_of_halves)

    def shared_attention(self, layer_id: int, backend: AttentionBackend, query_norm: RMSNorm) -> AttentionLayer:
        return SharedAttention(layer_id, backend, query_norm, angles_of_halves)

    def convolution(self, stored: torch.Tensor, weights: ConvolutionWeights) -> AttentionLayer:
        return TritonShortConvolution(stored, weights)

    def delta_net(
        self, sizes: DeltaNetConfig, states: LayerStates, weights: DeltaNetWeights, eps: float
    ) -> AttentionLayer:
        return TritonDeltaNet(sizes, states, weights, eps)

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return Fp8Linear(weight, bias) if isinstance(weight, Fp8Weight) else super().linear(weight, bias)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> Layer:
        if isinstance(weight, Fp8Weight):
            return Fp8GatedLinear(weight, bias, activation)
        return GatedLinear(weight, bias, activation, activate=act_and_mul)

    def lora_gated_linear(
        self, weight: Any, bias: torch.Tensor | None, activation: Activation, tables: LoraTables
    ) -> Layer:
        return LoraGatedLinear(self.linear(weight, bias), partial(act_and_mul, activation=activation), tables)

    def experts(self, router: RouterWeights, experts: Sequence[ExpertWeights], config: ExpertsConfig) -> Layer:
        return TritonExperts(router, experts, config)

    def start_decode(self, embedding: Layer, rotary: Rotary) -> StartDecode:
        scale = 1.0
        if isinstance(embedding, ScaledEmbedding):
            scale = embedding.factor
            embedding = embedding.embedding
        assert isinstance(embedding, Embedding) and isinstance(rotary, RotaryTable)
        return TritonStart(embedding, rotary, scale)
