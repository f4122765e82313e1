"""Reads the config of a model in the GGUF format from its metadata and its tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Literal

import numpy as np

from ..errors import ModelNotSupported
from .experts_config import SHARED_LENGTH_KEY, ExpertsConfig, gguf_experts
from .experts_deepseek import SIGMOID
from .families import FAMILIES, SOFT_CAP_KEYS
from .family import MAX_LAYERS, Family
from .generation_defaults import GGUF_KEYS, read_generation_defaults
from .gguf_architectures import (
    GGUF_ARCHITECTURES,
    GGUF_ARCHITECTURES_WITH_EXPERTS,
    GGUF_ARCHITECTURES_WITH_SHARED_EXPERTS,
    GGUF_ARCHITECTURES_WITH_WINDOWS,
)
from .gguf_convolutions import KV_HEADS_KEY, WIDTH_KEY, with_convolutions
from .gguf_file import GGUFTensor
from .gguf_model import GGUFModel
from .gguf_rope import GGUF_DIVISORS, QUERY_SCALE_KEYS, GGUFDivisors, rope_from_gguf
from .latent_config import GGUF_LATENT_KEYS, gguf_latent_scale, latent_from_gguf
from .layer_windows import SlidingWindows, local_windows
from .model_config import ModelConfig, activations_of
from .rope_config import RopeConfig, layer_ropes, ropes_of_windows
from .settings import Settings, quote

# The `{architecture}.*` keys that a GGUF file may have. Others are refused, because nearly all change the computation.
_GGUF_KEYS = (
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.freq_base_swa", "tensor_data_layout",
    "expert_count", "expert_used_count", "expert_feed_forward_length", "pooling_type", "attention.sliding_window",
    "attention.sliding_window_pattern",
)  # fmt: skip
_GGUF_MULTIPLIERS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
"""More keys of a family with `has_multipliers`."""
_GGUF_EXTRA_LAYERS = "nextn_predict_layers"
"""The key of a family with `has_extra_layers`. Its number is part of `block_count`."""
_GGUF_KEYS_FOR_IMAGES = ("vision.", "mm.")
"""What the keys begin with that describe the parts for images of a model that also takes them."""
_GGUF_POOLINGS = (0, 3)
"""None, and the last token, which is what /v1/embeddings takes by default. Embedding models name their pooling."""


def config_from_gguf(file: GGUFModel, load_format: Literal["gguf", "dummy"]) -> ModelConfig:
    """Read the config of a GGUF model. Raises as `load_model_config` does."""
    metadata = Settings(file.path, file.metadata)
    arch = metadata.text("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise metadata.unsupported(
            f"GGUF architecture {arch!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    config = _own_settings(file, metadata, arch)
    architecture = _architecture(config, arch)
    if (pooling := config.integer("pooling_type", 0, minimum=0)) not in _GGUF_POOLINGS:
        raise metadata.unsupported(f"{arch}.pooling_type={pooling} is not supported; supported: 3, the last token")
    family = FAMILIES[architecture]
    latent = latent_from_gguf(config) if family.has_latents else None
    num_extra_layers = config.integer(_GGUF_EXTRA_LAYERS, 0, minimum=0)
    num_layers = config.integer("block_count", minimum=1 + num_extra_layers, maximum=MAX_LAYERS) - num_extra_layers
    convolutions = None
    if family.convolutions is not None:
        config, convolutions = with_convolutions(config, num_layers)
    first_layer = next(layer for layer in range(num_layers) if convolutions is None or layer not in convolutions.layers)
    attention = f"blk.{first_layer}.attn"
    first_projection = f"{attention}_qkv" if family.stacked_qkv else f"{attention}_q"
    if latent is not None and latent.query_rank is not None:
        first_projection = f"{attention}_q_a"
    tensors = _tensors(file, f"{first_projection}.weight")

    num_heads, hidden_size = config.integer("attention.head_count"), config.integer("embedding_length")
    head_dim, rotary_dim = (latent.rope_dim,) * 2 if latent is not None else _head_dims(config, family, arch)
    context_len = config.integer("context_length")
    rope = rope_from_gguf(config, family, _rope_divisors(file, tensors, rotary_dim), context_len)
    if rotary_dim != head_dim:
        rope = dataclasses.replace(rope, rotary_dim=rotary_dim)
    windows = _windows(config, family, num_layers)
    ropes = layer_ropes(family, config, rope, windows)
    scale = head_dim**-0.5
    local_theta = config.number("rope.freq_base_swa", family.local_rope_theta or rope.theta, above=1)
    if family.has_local_rope:
        ropes = ropes_of_windows(windows, rope, RopeConfig(local_theta))
    elif local_theta != rope.theta:
        raise metadata.unsupported(f"{arch}.rope.freq_base_swa={local_theta:g} is not supported")
    if num_layers == family.gguf_layers_scaled_by_width:
        scale = (hidden_size / num_heads) ** -0.5
    if latent is not None:
        scale = gguf_latent_scale(config, latent)
    if family.has_multipliers:
        scale = config.number("attention.scale", scale)
        # As in llama.cpp, it says for these files whether there is a rotary embedding.
        if not config.flag("rope.scaling.finetuned", True):
            raise config.unsupported_value("rope.scaling.finetuned", "true", False)
    # As in llama.cpp, a file without the keys has the caps of the first models.
    caps = [config.number(key, family.defaults[key]) if family.has_soft_caps else None for key in SOFT_CAP_KEYS]
    # A file without norms that all models of the family have is not complete. The loader names them.
    always_has_qk_norm = family.qk_norm is not None and family.qk_norm_key is None
    has_qk_norm = always_has_qk_norm or f"{attention}_q_norm.weight" in tensors
    special = [_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer(KV_HEADS_KEY, num_heads) if latent is None else 1,
        head_dim=head_dim if latent is None else latent.key_dim,
        latent=latent,
        convolutions=convolutions,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_len=max(context_len, rope.context_len),
        sliding_windows=windows,
        rms_norm_eps=config.number("attention.layer_norm_rms_epsilon", family.default_rms_norm_eps),
        rope=rope,
        hidden_act=activations_of(family)[str(family.defaults.get(family.activation_key, "silu"))],
        layer_ropes=ropes,
        attention_scale=scale,
        embedding_scale=math.sqrt(hidden_size) if family.scales_embeddings else config.number("embedding_scale", 1.0),
        residual_scale=config.number("residual_scale", 1.0),
        logits_divisor=config.number("logit_scale", 1.0),
        scores_soft_cap=caps[0],
        logits_soft_cap=caps[1],
        input_norms=family.input_norms,
        output_norms=family.output_norms,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias=f"{first_projection}.bias" in tensors,
        o_bias=f"{attention}_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=family.qk_norm or "heads" if has_qk_norm else None,
        experts=_experts(config, family, tensors, num_layers),
        num_extra_layers=num_extra_layers,
        bos_token_id=_token_id(metadata, "bos"),
        eos_token_ids=tuple(dict.fromkeys(token for token in special if token is not None)),
        dtype=_dtype(tensors[f"{first_projection}.weight"].type),
        generation=read_generation_defaults(metadata, GGUF_KEYS),
        model_path=file.path,
        load_format=load_format,
    )


def _head_dims(config: Settings, family: Family, arch: str) -> tuple[int, int]:
    """The components of a head, and how many of them are rotated."""
    head_dim = config.integer(
        "attention.key_length", config.integer("embedding_length") // config.integer("attention.head_count")
    )
    rotary_dim = config.integer("rope.dimension_count", head_dim)
    if family.partial_rotary and (rotary_dim % 2 or rotary_dim > head_dim):
        raise config.unsupported(f"{arch}.rope.dimension_count must be even and at most {head_dim}, got {rotary_dim}")
    for key in ("attention.value_length", *(() if family.partial_rotary else ("rope.dimension_count",))):
        if (given := config.integer(key, head_dim)) != head_dim:
            raise config.unsupported(f"{arch}.{key} must equal the head dimension {head_dim}, got {given}")
    return head_dim, rotary_dim


def _own_settings(file: GGUFModel, metadata: Settings, arch: str) -> Settings:
    """The settings of the architecture. Refuses a key that may change the computation."""
    prefix, family = f"{arch}.", FAMILIES[GGUF_ARCHITECTURES[arch]]
    keys = _GGUF_KEYS + (_GGUF_MULTIPLIERS if family.has_multipliers else ())
    keys += SOFT_CAP_KEYS if family.has_soft_caps else ()
    keys += QUERY_SCALE_KEYS if family.has_query_scale else ()
    keys += GGUF_LATENT_KEYS if family.has_latents else ()
    keys += () if family.convolutions is None else (WIDTH_KEY,)
    keys += () if family.gguf_shared_gate is None else (SHARED_LENGTH_KEY,)
    keys += family.gguf_expert_keys + ((_GGUF_EXTRA_LAYERS,) if family.has_extra_layers else ())
    for key in file.metadata:
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name not in keys and not name.startswith(_GGUF_KEYS_FOR_IMAGES):
            raise metadata.unsupported(f"metadata {key}={quote(file.metadata[key])} is not supported")
    return Settings(
        file.path, {key: file.metadata[prefix + key] for key in keys if prefix + key in file.metadata}, prefix
    )


def _tensors(file: GGUFModel, first_projection: str) -> dict[str, GGUFTensor]:
    """The tensors by name. Refuses a file without those that each model has."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for name in ("token_embd.weight", first_projection):
        if name not in tensors:
            raise ValueError(f"{file.path} is not a complete model: it has no tensor {name!r}")
    embedding = tensors["token_embd.weight"]
    if len(embedding.shape) != 2:
        raise ValueError(f"{file.path}: token_embd.weight must have two dimensions, got {embedding.shape}")
    return tensors


def _architecture(config: Settings, arch: str) -> str:
    if num_experts := config.integer("expert_count", 0, minimum=0):
        if arch not in GGUF_ARCHITECTURES_WITH_EXPERTS:
            raise config.unsupported(f"a mixture of {num_experts} experts is not supported with {arch}")
        if arch in GGUF_ARCHITECTURES_WITH_SHARED_EXPERTS and config.integer(SHARED_LENGTH_KEY, 0, minimum=0):
            return GGUF_ARCHITECTURES_WITH_SHARED_EXPERTS[arch]
        return GGUF_ARCHITECTURES_WITH_EXPERTS[arch]
    if arch in GGUF_ARCHITECTURES_WITH_WINDOWS and config.integer("attention.sliding_window", 0, minimum=0):
        return GGUF_ARCHITECTURES_WITH_WINDOWS[arch]
    return GGUF_ARCHITECTURES[arch]


def _experts(config: Settings, family: Family, tensors: Collection[str], num_layers: int) -> ExpertsConfig | None:
    if family.experts is None:
        return None
    if family.has_latents:
        if not config.integer("expert_count", 0, minimum=0):
            return None
        # As in llama.cpp for GLM-4.7-Flash, whose first files do not name the function: only sigmoids have corrections.
        if any(name.endswith(".exp_probs_b.bias") for name in tensors):
            config = config.with_defaults({"expert_gating_func": SIGMOID})
    if family.gguf_experts is not None:
        return family.gguf_experts(config, num_layers)
    return gguf_experts(
        config,
        tensors,
        family.gguf_gate,
        normalized=family.gguf_normalized,
        shared_gate=family.gguf_shared_gate,
    )


def _windows(config: Settings, family: Family, num_layers: int) -> SlidingWindows:
    key, pattern_key = "attention.sliding_window", "attention.sliding_window_pattern"
    window = config.integer(key, family.gguf_window, minimum=0 if family.gguf_window == 0 else 1)
    period = family.gguf_window_period
    if not window:
        return (None,) * num_layers
    if period is None:
        raise config.unsupported_value(key, "0 or absent", window)
    pattern = config.get(pattern_key)
    if not isinstance(pattern, list | np.ndarray):
        return local_windows(window, config.integer(pattern_key, period, minimum=min(period, 1)), num_layers)
    if len(pattern) != num_layers or np.asarray(pattern).dtype != bool:
        raise config.refusal(pattern_key, f"a period, or true or false for each of {num_layers} layers", pattern)
    return tuple(window if has_window else None for has_window in pattern)


def _token_id(metadata: Settings, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    # Some files write -1, signed or unsigned, for "no such token".
    token = metadata.integer(key, minimum=-1, maximum=2**32 - 1) if key in metadata else -1
    return None if token in (-1, 2**32 - 1) else token


def _rope_divisors(file: GGUFModel, tensors: Mapping[str, GGUFTensor], rotary_dim: int) -> GGUFDivisors:
    def values(name: str) -> tuple[float, ...] | None:
        if name not in tensors:
            return None
        tensor = tensors[name]
        if tensor.shape != (rotary_dim // 2,) or tensor.type != 0:
            raise ModelNotSupported(f"{file.path}: {name} must be F32 [{rotary_dim // 2}], got {tensor}")
        divisors = file.tensor_bytes(tensor, 4 * tensor.shape[0]).view(np.float32)
        if not (np.isfinite(divisors) & (divisors > 0)).all():
            raise ValueError(f"{file.path}: {name} must hold positive numbers, got {quote(divisors.tolist())}")
        return tuple(divisors.tolist())

    return GGUFDivisors(*map(values, GGUF_DIVISORS))


def _dtype(tensor_type: int) -> str:
    # Most quantised weights were made from bfloat16, and such a model may overflow in float16.
    return {0: "float32", 1: "float16"}.get(tensor_type, "bfloat16")
