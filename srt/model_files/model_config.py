"""The config of a model. load_config.py reads it from a model's files.

This module does not import torch, because the HTTP process reads the config too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from ..errors import ModelNotSupported
from .delta_net_config import DeltaNetConfig
from .experts_config import ExpertsConfig
from .families import FAMILIES, not_in_families
from .family import AttentionGates, Family, QKNormKind
from .gemma4_config import Gemma4Config, Heads
from .generation_defaults import GenerationDefaults
from .latent_config import LatentConfig
from .layer_windows import SlidingWindows
from .quantization_config import QuantizationConfig
from .rope_config import RopeConfig
from .short_convolutions import ShortConvolutions

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
"""The activation of a gated feed-forward layer. gelu_tanh: GELU whose error function is approximated by tanh."""
UngatedActivation: TypeAlias = Literal["squared_relu"]
"""The activation of a feed-forward layer without a gate. squared_relu: the square of max(x, 0)."""
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)
"""The activations by the names that config.json has."""
UNGATED_ACTIVATIONS: Mapping[str, UngatedActivation] = MappingProxyType({"relu2": "squared_relu"})


def activations_of(family: Family) -> Mapping[str, Activation | UngatedActivation]:
    """The activations that a config of the family may name."""
    return ACTIVATIONS if family.has_gates else UNGATED_ACTIVATIONS


_SIZES = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "context_len",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The config of a decoder-only model.

    sliding_windows: one entry per layer; None: the layer attends to all positions.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    latent: LatentConfig | None = None
    """Latent attention. Then a token has one key for all heads: num_kv_heads is 1, and head_dim is `latent.key_dim`."""
    gemma4: Gemma4Config | None = None
    """How layers differ from one another. Then num_kv_heads, head_dim and intermediate_size are the largest of any
    layer. None: all layers have heads of one size."""
    convolutions: ShortConvolutions | None = None
    """of the layers with convolutions in place of attention; None: there are none"""
    delta_net: DeltaNetConfig | None = None
    """of the layers with a Gated DeltaNet in place of attention, which is recurrent; None: there are none"""
    sliding_windows: SlidingWindows = ()
    """An empty tuple is replaced by one None per layer."""
    rms_norm_eps: float = 1e-6
    hidden_act: Activation | UngatedActivation = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_ropes: tuple[RopeConfig, ...] = ()
    """of each layer; empty: every layer has `rope`"""
    attention_scale: float = 0.0
    """factor of the dot product of a query and a key; 0 is replaced by 1 / sqrt(head_dim)"""
    embedding_scale: float = 1.0
    """factor of the embeddings, before the first layer"""
    residual_scale: float = 1.0
    """factor of the outputs of attention and feed-forward layers, before they are added to the residual"""
    logits_divisor: float = 1.0
    """what logits are divided by"""
    scores_soft_cap: float | None = None
    """scores of attention become cap * tanh(score / cap); None: no cap"""
    logits_soft_cap: float | None = None
    """the same for logits"""
    input_norms: bool = True
    """whether the residual is normalised before attention and feed-forward layers"""
    output_norms: bool = False
    """whether the outputs of attention and feed-forward layers are normalised before they are added to the residual"""
    attention_gates: AttentionGates | None = None
    """what of the output of attention is multiplied by sigmoids of linear functions of the layer's input"""
    norm_offset: float = 0.0
    """what is added to each weight of a norm that a checkpoint has"""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNormKind | None = None
    """None: queries and keys are not normalised"""
    experts: ExpertsConfig | None = None
    """of the sparse layers; None: all layers are dense"""
    num_extra_layers: int = 0
    """layers of the checkpoint after the last one, which predict further tokens; they are not read"""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """from the config and the generation config; the tokenizer may add others"""
    dtype: str | None = None
    """dtype of the checkpoint: "float32", "float16" or "bfloat16"; None: not given"""
    quantization: QuantizationConfig | None = None
    """how quantized matrices of a safetensors checkpoint are stored; None: it has none"""
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    model_path: str = ""
    load_format: Literal["safetensors", "gguf", "dummy"] = "dummy"

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        where = f"{self.model_path}: " if self.model_path else ""
        if self.architecture not in FAMILIES:
            raise ModelNotSupported(f"{where}{not_in_families(self.architecture)}")
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{where}{name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise ValueError(f"{where}rms_norm_eps must be a finite number above 0, got {self.rms_norm_eps}")
        if not (self.input_norms or self.output_norms):
            raise ModelNotSupported(f"{where}layers without norms of their inputs and outputs are not supported")
        if self.stream_divisor != 1 and not self.input_norms:
            raise ModelNotSupported(
                f"{where}scaled embeddings or residuals are not supported without norms of the layers' inputs"
            )
        experts = self.experts
        if experts is not None and self.output_norms:
            raise ModelNotSupported(f"{where}norms of outputs are not supported in a mixture of experts")
        if experts is not None and self.hidden_act != "silu":
            raise ModelNotSupported(f"{where}activation {self.hidden_act} is not supported in a mixture of experts")
        if experts is not None and not 1 <= experts.num_experts_per_token <= experts.num_experts:
            raise ValueError(
                f"{where}a token must have from 1 to {experts.num_experts} experts, as many as a layer has, got "
                f"{experts.num_experts_per_token}"
            )
        if not self.attention_layers:
            raise ModelNotSupported(f"{where}at least one layer must have attention")
        if self.latent is not None:
            assert (self.num_kv_heads, self.head_dim) == (1, self.latent.key_dim) and self.latent.rope_dim % 2 == 0
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{where}num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.latent is None and self.head_dim % 2:
            raise ValueError(f"{where}head_dim must be even for rotary embedding, got {self.head_dim}")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise ValueError(f"{where}a sliding window must be at least 1, got {self.sliding_windows}")
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"{where}{len(self.sliding_windows)} sliding windows given for {self.num_layers} layers")
        if len(self.ropes) != self.num_layers:
            raise ValueError(f"{where}{len(self.ropes)} rotary embeddings given for {self.num_layers} layers")

    @property
    def stream_divisor(self) -> float:
        """What the residual stream is divided by (models/decoder.py)."""
        if self.gemma4 is not None:  # its layers multiply the stream by matrices
            return 1.0
        return self.embedding_scale if self.output_norms else self.residual_scale

    @property
    def residual_norm_eps(self) -> float:
        """`rms_norm_eps` of the divided residual stream."""
        return self.rms_norm_eps / self.stream_divisor**2

    @property
    def embedding_factor(self) -> float:
        """What the embeddings are multiplied by to begin the divided residual stream."""
        return self.embedding_scale / self.stream_divisor

    @property
    def output_norm_factor(self) -> float:
        """What the norms of outputs are multiplied by in the divided residual stream."""
        return self.residual_scale / self.stream_divisor

    @property
    def has_gates(self) -> bool:
        """Whether feed-forward layers have gates."""
        return self.hidden_act not in UNGATED_ACTIVATIONS.values()

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embedding of each layer."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def latent_dim(self) -> int | None:
        """Components of a token's latent; None: attention is not latent attention."""
        return None if self.latent is None else self.latent.latent_dim

    @property
    def rope_dim(self) -> int:
        """Components of a head that the rotary embedding has angles for."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Components of a head's value, which the output projection of attention multiplies."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def attended_dim(self) -> int:
        """Components of what attention sums for a head: of a value, or of a latent."""
        return self.head_dim if self.latent_dim is None else self.latent_dim

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention. If not, it has a short convolution or a Gated DeltaNet."""
        return layer not in self._layers_without_attention

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention."""
        return tuple(sorted(set(range(self.num_layers)).difference(self._layers_without_attention)))

    @property
    def _layers_without_attention(self) -> tuple[int, ...]:
        mixers = self.convolutions or self.delta_net
        return () if mixers is None else mixers.layers

    @property
    def num_attention_gates(self) -> int:
        """How many gates the output of a layer's attention has."""
        match self.attention_gates:
            case "heads":
                return self.num_heads
            case "components":
                return self.num_heads * self.head_dim
        return 0

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that store K and V. Other layers with attention read those of an earlier layer."""
        return self.attention_layers if self.gemma4 is None else self.gemma4.kv_layers

    def kv_source(self, layer: int) -> int:
        """The layer whose K and V a layer with attention reads."""
        return layer if self.gemma4 is None else self.gemma4.kv_sources[layer]

    def heads(self, layer: int) -> Heads:
        """The heads of K and V in a layer with attention."""
        return Heads(self.num_kv_heads, self.head_dim) if self.gemma4 is None else self.gemma4.heads[layer]

    def is_sparse(self, layer: int) -> bool:
        """Whether the feed-forward layer is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def has_dense_layers(self) -> bool:
        return self.experts is None or bool(self.experts.dense_layers)

    @property
    def feed_forward_widths(self) -> tuple[int, ...]:
        """The widths of the feed-forward layers that the model has, and of its experts."""
        dense = (self.intermediate_size,) if self.has_dense_layers else ()
        return dense if self.experts is None else (*dense, *self.experts.widths)

    @property
    def multiplied_widths(self) -> tuple[int, ...]:
        """The widths of what linear layers multiply. Those of all heads, which are even, are left out."""
        latent = () if self.latent is None else (*self.latent[:4], self.latent.query_rank or 2)
        gemma4 = () if self.gemma4 is None else (*self.gemma4.widths, self.gemma4.input_dim or 2)
        delta_net = () if self.delta_net is None else (self.delta_net.value_size,)
        return (self.hidden_size, *self.feed_forward_widths, *latent, *gemma4, *delta_net)

    @property
    def model_type(self) -> str:
        return FAMILIES[self.architecture].model_type
