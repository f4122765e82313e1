"""Linear layers with 8-bit or 4-bit weights, on the compiled CPU operations (csrc/cpu/quantized.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...srt.model_files.experts_config import ExpertsConfig
from ...srt.model_files.latent_config import LatentConfig
from ...srt.model_files.model_config import Activation
from .. import cpu_extension
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from .cpu_latent import CpuLatentAttention
from .cpu_layers import CpuExperts, CpuLayers, QuantizedEmbedding, embedding_of, router_of
from .cpu_lora import CpuLoraGatedLinear
from .experts import ExpertWeights, RouterWeights
from .kinds import AttentionLayer, Layer
from .latent_attention import LatentLayers
from .lora_layers import LoraTables
from .packing import PackedWeight, interleave, pack, pack_bias, pack_gated
from .quantized_weight import QuantizedWeight

_ops = torch.ops.tercet_cpu


class QuantizedLinear:
    """`Linear` on quantized weights. `to_float`: the result is float32 for every type of x."""

    def __init__(
        self, weight: QuantizedWeight | PackedWeight, bias: torch.Tensor | None = None, *, to_float: bool = False
    ) -> None:
        self.num_out = weight.shape[0]
        self.packed = pack(weight)
        self.bias = pack_bias(bias)
        self._options = weight.bits, to_float

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.quantized_linear(x, self.packed, self.bias, self.num_out, *self._options)

    def argmax(self, x: torch.Tensor, soft_cap: float | None = None) -> torch.Tensor:
        """The column of the first largest number of each row of the float32 result, as `GreedyLayer` says."""
        return _ops.quantized_linear_argmax(x, self.packed, self.bias, self.num_out, self._options[0], soft_cap)


class QuantizedGatedLinear:
    """`GatedLinear` on quantized weights. A panel holds gate rows in one half and the matching up rows in the other."""

    def __init__(
        self, weight: QuantizedWeight | PackedWeight, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> None:
        self.num_out = weight.shape[0] // 2
        self.packed = pack_gated(weight)
        self.bias = None if bias is None else pack_bias(interleave(bias))
        self._options = weight.bits, activation

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch | None = None, lora: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        return _ops.quantized_gated_linear(x, self.packed, self.bias, self.num_out, *self._options, lora)


class QuantizedLayers(CpuLayers):
    """All layers on compiled operations, with 8-bit and 4-bit weights."""

    compiled = True

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: type of the activations."""
        self._dtype = dtype
        # Else torch multiplies what is not quantized: routers, and what makes keys and values from latents.
        self.fully_compiled = cpu_extension.multiplies(dtype)

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return QuantizedLinear(weight, bias)

    def latent_attention(
        self, layer_id: int, backend: AttentionBackend, sizes: LatentConfig, layers: LatentLayers
    ) -> AttentionLayer:
        if not self.fully_compiled:
            return super().latent_attention(layer_id, backend, sizes, layers)
        return CpuLatentAttention(layer_id, backend, sizes, layers)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> Layer:
        return QuantizedGatedLinear(weight, bias, activation)

    def lora_gated_linear(
        self, weight: Any, bias: torch.Tensor | None, activation: Activation, tables: LoraTables
    ) -> Layer:
        return CpuLoraGatedLinear(QuantizedGatedLinear(weight, bias, activation), tables)

    def experts(self, router: RouterWeights, experts: Sequence[ExpertWeights], config: ExpertsConfig) -> Layer:
        if not self.fully_compiled:
            assert config.gate is None, "check_experts has refused it"
            return super().experts(router, experts, config)
        return CpuExperts(self.router(router), experts, config, router.corrections, rounds_to_integers=True)

    def head(self, weight: Any) -> Layer:
        return QuantizedLinear(weight, to_float=True)

    def router(self, router: RouterWeights) -> Layer:
        """A router is not quantized."""
        if not self.fully_compiled:
            return super().router(router)
        return router_of(router, self._dtype)

    def embedding(self, weight: Any) -> Layer:
        return embedding_of(weight, self._dtype)

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        assert isinstance(head, QuantizedLinear)
        return QuantizedEmbedding(head.packed, self._dtype)
