"""The parameters and the layers of Gemma 4 that other families lack. decoder.py and parameters.py use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ...srt.model_files.gemma4_config import Gemma4Config
from ...srt.model_files.model_config import ModelConfig
from ..attention.base import AttentionBackend
from ..layers.attention import QKNorm
from ..layers.kinds import AttentionLayer, LayerKinds
from ..layers.layer_inputs import LayerEnd, LayerInputs
from ..layers.residual import NormedSum
from ..layers.shared_attention import NormedValues
from .family import Parameters
from .parameter import LinearParts, Parameter, Part, Split

INPUT_TABLE = "embed_tokens_per_layer.weight"
"""The table of the inputs of layers."""
_PROJECTION, _PROJECTION_NORM = "per_layer_projection.weight", "per_layer_projection_norm.weight"
_GATE, _OF_GATED, _OUTPUT_NORM = "input_gate.weight", "input_proj.weight", "input_output_norm.weight"
_FACTOR = "factor"


def config_of_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """The config of a model whose layers all have the sizes of this one."""
    assert config.gemma4 is not None
    heads, width = config.gemma4.heads[layer], config.gemma4.widths[layer]
    return dataclasses.replace(
        config, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, intermediate_size=width
    )


def attention_parts(
    gemma4: Gemma4Config, layer: int, norms: dict[str, Part], linears: dict[str, LinearParts]
) -> tuple[dict[str, Part], dict[str, LinearParts]]:
    """The norms and linear layers around attention that the layer has, of those that a layer with K and V has."""
    num_projected = 3
    if gemma4.kv_sources[layer] != layer:
        norms = {name: part for name, part in norms.items() if name != "k_norm"}
        num_projected = 1
    elif layer in gemma4.layers_without_values:
        num_projected = 2
    qkv = linears["qkv_proj"]
    return norms, linears | {"qkv_proj": qkv._replace(parts=qkv.parts[:num_projected])}


def unread_tensors(config: ModelConfig) -> Iterator[str]:
    """What the names of tensors begin with that a checkpoint may have, but that no layer needs.

    Published checkpoints have K and V of layers that read those of another layer.
    """
    if config.gemma4 is not None:
        for layer, source in enumerate(config.gemma4.kv_sources):
            if layer != source:
                for module in ("k_proj", "v_proj", "k_norm", "v_norm"):
                    yield f"model.layers.{layer}.self_attn.{module}."


def input_parameters(config: ModelConfig) -> Iterator[Parameter]:
    """The parameters that make the inputs of all layers."""
    assert config.gemma4 is not None
    width, hidden = config.gemma4.input_dim, config.hidden_size
    if width:
        of_layers = config.num_layers * width
        yield _whole(INPUT_TABLE, "model.embed_tokens_per_layer.weight", config.gemma4.input_vocab_size, of_layers)
        yield _whole(_PROJECTION, "model.per_layer_model_projection.weight", of_layers, hidden)
        yield _whole(_PROJECTION_NORM, "model.per_layer_projection_norm.weight", width)


def end_parameters(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """The parameters of a layer's end."""
    assert config.gemma4 is not None
    width, hidden, source = config.gemma4.input_dim, config.hidden_size, f"model.layers.{layer}."
    prefix = f"layers.{layer}."
    yield _whole(prefix + _FACTOR, f"{source}layer_scalar", 1)
    if width:
        yield _whole(prefix + _GATE, f"{source}per_layer_input_gate.weight", width, hidden)
        yield _whole(prefix + _OF_GATED, f"{source}per_layer_projection.weight", hidden, width)
        yield _whole(prefix + _OUTPUT_NORM, f"{source}post_per_layer_input_norm.weight", hidden)


def layer_inputs(config: ModelConfig, params: Parameters, layers: LayerKinds) -> LayerInputs | None:
    """What makes the inputs of layers. None: they have none."""
    if config.gemma4 is None or not config.gemma4.input_dim:
        return None
    # The projection is divided by the square root of hidden_size before the norm, which a larger epsilon stands for.
    norm = layers.norm(params[_PROJECTION_NORM], config.rms_norm_eps * config.hidden_size)
    return LayerInputs(layers.embedding(params[INPUT_TABLE]), layers.linear(params[_PROJECTION], None), norm)


def layer_end(config: ModelConfig, layer: int, params: Parameters, layers: LayerKinds) -> LayerEnd | None:
    """The end of a layer. None: it ends with its feed-forward layer."""
    if config.gemma4 is None:
        return None
    prefix = f"layers.{layer}."
    assert config.hidden_act != "squared_relu"
    gate = projection = None
    if config.gemma4.input_dim:
        gate = layers.linear(params[prefix + _GATE], None)
        norm = layers.norm(params[prefix + _OUTPUT_NORM], config.rms_norm_eps)
        projection = NormedSum(layers.linear(params[prefix + _OF_GATED], None), norm)
    return LayerEnd(params[prefix + _FACTOR], gate, projection, config.hidden_act)


def gemma4_attention(
    config: ModelConfig, layer: int, params: Parameters, backend: AttentionBackend, layers: LayerKinds
) -> AttentionLayer:
    """The attention of a layer."""
    assert config.gemma4 is not None
    source = config.kv_source(layer)
    backend, index = backend.of_layer(config.kv_layers.index(source))
    q_norm = params[f"layers.{layer}.q_norm.weight"]
    if source != layer:
        return layers.shared_attention(index, backend, layers.norm(q_norm, config.rms_norm_eps))
    qk_norm = QKNorm(q_norm, params[f"layers.{layer}.k_norm.weight"], config.rms_norm_eps)
    attention = layers.attention(index, backend, qk_norm)
    keys_are_values = layer in config.gemma4.layers_without_values
    return NormedValues(attention, config.heads(layer), config.rms_norm_eps, keys_are_values=keys_are_values)


def _whole(name: str, checkpoint_name: str, *shape: int) -> Parameter:
    return Parameter(name, shape, (Part(checkpoint_name, shape),), Split.REPLICATED)
