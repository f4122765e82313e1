"""The ways in which a family of models may differ from plain Llama. families.py has the families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from .delta_net_config import DeltaNetConfig
from .experts_config import QWEN_NAMES, ClampedGate, ExpertNames, ReadExperts
from .gemma4_config import Gemma4Config
from .layer_windows import SlidingWindows
from .settings import Settings
from .short_convolutions import ShortConvolutions

MAX_LAYERS = 10_000
"""Most layers of a model that a file may describe."""
QKNormKind: TypeAlias = Literal["heads", "rows", "rotated_heads"]
"""What a norm of queries and keys normalises: each head, or all query heads of a token together, and all key heads.
rotated_heads: each head, after its rotation. The other norms come before it."""
AttentionGates: TypeAlias = Literal["heads", "components"]
"""What of the output of attention has a gate of its own: each head, or each component of a head. The gates of the
components of a head follow its queries in a checkpoint."""


class LayerNames(NamedTuple):
    """The names of norms and linear layers in a checkpoint: those of a layer, and of the last norm."""

    input_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    """of the input of the feed-forward layer"""
    o_proj: str = "self_attn.o_proj"
    head_gates: str = "self_attn.gate_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = "mlp.gate_up_proj"
    """of a checkpoint that has one tensor for both"""
    down: str = "mlp.down_proj"
    last_norm: str = "model.norm"


LLAMA_NAMES = LayerNames()


@dataclass(frozen=True)
class Family:
    """The differences of an architecture from plain Llama.

    `*_bias`: whether the layer always has a bias, or the key of config.json that says so.
    """

    model_type: str
    implementation: str
    """the module of model_executor/models that implements the family"""
    sliding_windows: Callable[[Settings, int], SlidingWindows]
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    attention_sinks: bool = False
    """whether each head has a learned logit that joins the softmax without a value"""
    has_latents: bool = False
    """whether attention is latent attention"""
    convolutions: Callable[[Settings, int], ShortConvolutions | None] | None = None
    """reads the short convolutions that some layers have in place of attention; None: no layer has one"""
    delta_net: Callable[[Settings, int], DeltaNetConfig | None] | None = None
    """reads the Gated DeltaNet that some layers have in place of attention; None: no layer has one"""
    gemma4: Callable[[Settings, SlidingWindows], Gemma4Config] | None = None
    """reads how layers differ from one another; None: they have heads of one size"""
    with_llama_keys: Callable[[Settings], Settings] | None = None
    """returns the settings of config.json under the keys that Llama's has; None: config.json has these keys"""
    layer_names: LayerNames = LLAMA_NAMES
    adapted_names: Mapping[str, str] = field(default_factory=dict)
    """The names of linear layers in a checkpoint, by those in transformers, which LoRA adapters have. Equal names are
    left out."""
    qk_norm: QKNormKind | None = None
    """`ModelConfig.qk_norm`"""
    qk_norm_key: str | None = None
    """the key of config.json that says whether the model has these norms; None: it always has"""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    """their names in a checkpoint"""
    default_head_dim: int | None = None
    """None: hidden_size / num_heads"""
    default_rms_norm_eps: float = 1e-6
    default_rope_theta: float = 10000.0
    tied_by_default: bool = False
    """whether the output head of a config without tie_word_embeddings is the embedding"""
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    """the rope settings of a config that has none; null counts as none"""
    default_original_context_len: int | None = None
    """For a config without original_max_position_embeddings at its top level. None: that of the rope settings."""
    stacked_qkv: bool = False
    """whether a checkpoint has one tensor for Q, K and V"""
    stacked_gate_up: bool = False
    """whether a checkpoint has one tensor for gate and up"""
    partial_rotary: bool = False
    """whether a config may say that only the first components of a head are rotated"""
    interleaved_rotary: bool = False
    """whether neighbouring components of a head are rotated together"""
    rotated_layers: Callable[[Settings, SlidingWindows], tuple[bool, ...]] | None = None
    """which layers have a rotary embedding; None: all"""
    defaults: dict[str, Any] = field(default_factory=dict)
    """the values of keys that config.json may lack; null does not stand for them"""
    has_text_config: bool = False
    """whether the settings of the language model are in `text_config`, beside those of other parts"""
    text_model_type: str | None = None
    """the `model_type` that `text_config` must have; None: it is not read"""
    activation_key: str = "hidden_act"
    has_gates: bool = True
    """whether feed-forward layers multiply the activation by the outputs of a second projection"""
    has_query_pre_attn_scalar: bool = False
    """whether `query_pre_attn_scalar` replaces head_dim in the scale of attention"""
    has_local_rope: bool = False
    """whether layers with a window have a rotary embedding of their own"""
    local_rope_theta: float | None = None
    """the base of that embedding in a config that has none; None: that of the other layers"""
    has_rope_alpha: bool = False
    """whether a config may have rope settings of the type dynamic with a fixed `alpha`"""
    has_query_scale: bool = False
    """whether queries are multiplied by a `QueryScale`; GGUF files may have none"""
    has_depth_scale: bool = False
    """whether a config has `scale_emb`, `scale_depth` and `dim_model_base` (MiniCPM)"""
    scales_embeddings: bool = False
    """whether embeddings are multiplied by the square root of hidden_size"""
    has_multipliers: bool = False
    """whether a config has factors of embeddings, residuals, scores and logits (Granite)"""
    has_extra_layers: bool = False
    """whether a checkpoint may have layers after the last one, which predict further tokens"""
    has_soft_caps: bool = False
    """whether a config may have soft caps of scores and logits"""
    input_norms: bool = True
    """`ModelConfig.input_norms`"""
    output_norms: bool = False
    """`ModelConfig.output_norms`"""
    output_norms_key: str | None = None
    """the key of config.json that says whether the model has these norms; None: `output_norms` does"""
    attention_gates: AttentionGates | None = None
    """`ModelConfig.attention_gates`"""
    attention_gates_key: str | None = None
    """the key of config.json that says whether attention has these gates; None: `attention_gates` does"""
    output_norm_names: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    """their names in a checkpoint: of attention, and of the feed-forward layer"""
    norm_offset: float = 0.0
    """`ModelConfig.norm_offset` of a Hugging Face checkpoint"""
    gguf_window_period: int | None = None
    """The period of the layers without a window in a GGUF file that names no period (`local_windows`). None: such
    files may not have a window."""
    gguf_window: int | None = 0
    """The window of a GGUF file that names none; 0: its layers have none. None: the file must name one."""
    gguf_layers_scaled_by_width: int | None = None
    """Number of layers of the models whose scale of attention follows from hidden_size / num_heads. GGUF files have no
    key for it, so llama.cpp decides it in this way, too."""
    experts: ReadExperts | None = None
    """reads the mixture of experts; None: all feed-forward layers are dense"""
    expert_names: ExpertNames = QWEN_NAMES
    stacked_experts: bool = False
    """whether a checkpoint has one tensor for the matrices of all experts of a layer, as GPT-OSS has"""
    joined_experts: bool = False
    """whether it may have one, in which the rows of gate come before those of up"""
    gguf_gate: ClampedGate | None = None
    """the activation of experts with biases, for which GGUF files have no key; None: as in `gguf_experts`"""
    gguf_normalized: bool = True
    """`ExpertsConfig.normalized` of GGUF files, which have no key for it"""
    gguf_experts: ReadExperts | None = None
    """reads the experts of a GGUF file; None: `experts_config.gguf_experts` does"""
    gguf_expert_keys: tuple[str, ...] = ()
    """the keys of a GGUF file that only this reads"""
    gguf_shared_gate: bool | None = None
    """`SharedExpert.has_gate` of GGUF files; None: they may not have a shared expert"""
