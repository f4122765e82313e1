"""The families of Granite 3 and of those models of Granite 4 whose layers all have attention."""

from __future__ import annotations

import dataclasses

from .experts_config import GRANITE_NAMES, ExpertsConfig, granite_experts, mixtral_experts
from .family import Family, LayerNames
from .layer_windows import SlidingWindows, no_window
from .settings import Settings

_ATTENTION = ("attention", "full_attention")
"""The names of layers with attention, in older and in newer files."""

_GRANITE = Family(
    "granite",
    "decoder",
    no_window,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    has_multipliers=True,
    defaults={"bos_token_id": 1, "eos_token_id": 2},
)

_GRANITE_MOE = dataclasses.replace(
    _GRANITE,
    model_type="granitemoe",
    mlp_bias=False,
    experts=mixtral_experts,
    expert_names=GRANITE_NAMES,
    gguf_shared_gate=False,
)


def _of_hybrid(config: Settings) -> Settings:
    """The settings of Granite 4. Without experts, the shared expert is a plain feed-forward layer.

    Raises ModelNotSupported for a model with Mamba layers.
    """
    key = "layer_types" if config.get("layer_types") is not None else "layers_block_type"
    kinds = config.texts(key) or ["linear_attention"]
    if len(kinds) != config.integer("num_hidden_layers") or not set(_ATTENTION) >= set(kinds):
        raise config.unsupported_value(key, "'attention' or 'full_attention' for each layer", kinds)
    if _num_experts(config):
        return config
    return config.with_values({"intermediate_size": config.integer("shared_intermediate_size")})


def _num_experts(config: Settings) -> int:
    return config.integer("num_local_experts", 8, minimum=0)


def _experts(config: Settings, num_layers: int) -> ExpertsConfig | None:
    return granite_experts(config, num_layers) if _num_experts(config) else None


def _rotated(config: Settings, windows: SlidingWindows) -> tuple[bool, ...]:
    """Either all layers have a rotary embedding, or none."""
    kind = config.text("position_embedding_type")
    if kind not in ("rope", "nope", None):
        raise config.unsupported_value("position_embedding_type", "rope, nope or null", kind)
    return (kind == "rope",) * len(windows)


GRANITE_FAMILIES = {
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": dataclasses.replace(
        _GRANITE_MOE, model_type="granitemoeshared", experts=granite_experts
    ),
    "GraniteMoeHybridForCausalLM": dataclasses.replace(
        _GRANITE_MOE,
        model_type="granitemoehybrid",
        defaults=_GRANITE_MOE.defaults | {"shared_intermediate_size": 1024},
        experts=_experts,
        with_llama_keys=_of_hybrid,
        rotated_layers=_rotated,
        stacked_gate_up=True,
        layer_names=LayerNames(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear"),
    ),
}
