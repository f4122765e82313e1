"""Reads the config of a model from config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from .families import FAMILIES, SOFT_CAP_KEYS, not_in_families
from .family import MAX_LAYERS, AttentionGates, Family
from .generation_defaults import HF_KEYS, read_generation_defaults
from .latent_config import latent_from_hf, latent_scale
from .model_config import Activation, ModelConfig, UngatedActivation, activations_of
from .quantization_config import read_quantization_config
from .rope_config import layer_ropes, rope_from_hf, ropes_from_hf, ropes_of_windows
from .settings import Settings

_KEYS_OF_CHECKPOINT = (
    "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip


def config_from_hf(
    config: Settings,
    generation: Settings,
    older_quantization: Callable[[], Settings | None],
    path: str,
    load_format: Literal["safetensors", "dummy"],
) -> ModelConfig:
    """Read the config from config.json and generation_config.json.

    `older_quantization`: reads quantization settings beside config.json. `path`: becomes `model_path`. Raises as
    `load_model_config`.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    if family.has_text_config:
        config = _text_config(config, family)
    config = config.with_defaults(family.defaults)
    if family.with_llama_keys is not None:
        config = family.with_llama_keys(config)
    quantization = read_quantization_config(config, older_quantization, stacked_experts=family.stacked_experts)
    if quantization is not None and family.expert_names.has_rows_of_all:
        raise config.unsupported(f"quantization_config is not supported for {architecture}")
    _check_supported(config, family, architecture)
    scores_soft_cap, logits_soft_cap = map(config.optional_number, SOFT_CAP_KEYS)
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    latent = latent_from_hf(config) if family.has_latents else None
    head_dim = _head_dim(config, family, num_heads, hidden_size) if latent is None else latent.rope_dim
    context_len = config.integer("max_position_embeddings")
    windows = family.sliding_windows(config, num_layers)
    gemma4 = None if family.gemma4 is None else family.gemma4(config, windows)
    if family.has_local_rope:
        head_dims = (head_dim, head_dim) if gemma4 is None else gemma4.head_dims(windows)
        rope, local_rope = ropes_from_hf(config, family, context_len, head_dims)
        ropes = ropes_of_windows(windows, rope, local_rope)
    else:
        rope = rope_from_hf(config, family, context_len, head_dim)
        ropes = layer_ropes(family, config, rope, windows)
    dtype = config.text("dtype") or config.text("torch_dtype")
    dtype = None if dtype is None else dtype.removeprefix("torch.")
    num_kv_heads = config.integer("num_key_value_heads", num_heads) if latent is None else 1
    if gemma4 is not None:
        num_kv_heads, head_dim = gemma4.largest
    multipliers = _multipliers(config, family, head_dim, dtype)
    bos_ids = config.token_ids("bos_token_id")
    if not bos_ids and config.get("bos_token_id") is not None:
        raise config.refusal("bos_token_id", "a token id, or null", [])
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size") if gemma4 is None else max(gemma4.widths),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim if latent is None else latent.key_dim,
        latent=latent,
        gemma4=gemma4,
        convolutions=None if family.convolutions is None else family.convolutions(config, num_layers),
        delta_net=None if family.delta_net is None else family.delta_net(config, num_layers),
        vocab_size=config.integer("vocab_size"),
        context_len=max(context_len, rope.context_len),
        sliding_windows=windows,
        # null does not stand for the default here: other libraries cannot compute with it, either.
        rms_norm_eps=config.number("rms_norm_eps", None if "rms_norm_eps" in config else family.default_rms_norm_eps),
        hidden_act=_activation(config, family),
        rope=rope,
        layer_ropes=ropes,
        attention_scale=multipliers.attention if latent is None else latent_scale(config, latent),
        embedding_scale=multipliers.embeddings,
        residual_scale=multipliers.residual,
        logits_divisor=multipliers.logits_divisor,
        scores_soft_cap=scores_soft_cap,
        logits_soft_cap=logits_soft_cap,
        input_norms=family.input_norms,
        output_norms=family.output_norms if family.output_norms_key is None else config.flag(family.output_norms_key),
        attention_gates=_attention_gates(config, family),
        norm_offset=family.norm_offset,
        tie_word_embeddings=config.flag("tie_word_embeddings", family.tied_by_default),
        qkv_bias=_has_bias(config, family.qkv_bias),
        o_bias=_has_bias(config, family.o_bias),
        mlp_bias=_has_bias(config, family.mlp_bias),
        qk_norm=family.qk_norm if family.qk_norm_key is None or config.flag(family.qk_norm_key) else None,
        experts=None if family.experts is None else family.experts(config, num_layers),
        num_extra_layers=_num_extra_layers(config) if family.has_extra_layers else 0,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys((*config.token_ids("eos_token_id"), *generation.token_ids("eos_token_id")))),
        dtype=dtype,
        quantization=quantization,
        generation=read_generation_defaults(generation, HF_KEYS),
        model_path=path,
        load_format=load_format,
    )


def _check_supported(config: Settings, family: Family, architecture: str) -> None:
    """Raise ModelNotSupported for a key that changes the computation in a way that no layer here has."""
    is_interleaved = family.interleaved_rotary
    if family.has_latents and (given := config.flag("rope_interleave", is_interleaved)) != is_interleaved:
        raise config.unsupported_value("rope_interleave", str(is_interleaved).lower(), given)
    for key in ("rope_interleaved", "use_mrope", "use_cla"):
        if config.flag(key):
            raise config.unsupported(f"{key}={config.get(key)!r} is not supported")
    for key, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        if config.flag(key, causal) != causal:
            raise config.unsupported(f"{key}={config.get(key)!r} is not supported: attention here is always causal")
    if config.get("clip_qkv") is not None:
        raise config.unsupported(f"clip_qkv={config.get('clip_qkv')!r} is not supported; supported: null")
    for key in SOFT_CAP_KEYS:
        if config.optional_number(key) is not None and not family.has_soft_caps:
            raise config.unsupported(f"{key} is not supported for {architecture}")
    for key, known in (("attention_bias", family.qkv_bias), ("mlp_bias", family.mlp_bias)):
        if config.flag(key) and known not in (True, key):
            raise config.unsupported(f"{key} is not supported for {architecture}")


def _head_dim(config: Settings, family: Family, num_heads: int, hidden_size: int) -> int:
    if family.default_head_dim is None and hidden_size % num_heads and config.get("head_dim") is None:
        raise ValueError(
            f"{config.source}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})"
        )
    return config.integer("head_dim", family.default_head_dim or hidden_size // num_heads)


class _Multipliers(NamedTuple):
    """Factors of ModelConfig."""

    attention: float
    embeddings: float
    residual: float = 1.0
    logits_divisor: float = 1.0


def _multipliers(config: Settings, family: Family, head_dim: int, dtype: str | None) -> _Multipliers:
    if family.has_multipliers:
        keys = "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"
        return _Multipliers(*(config.number(key, 1.0) for key in keys))
    if family.has_depth_scale:
        num_layers, hidden_size = config.integer("num_hidden_layers"), config.integer("hidden_size")
        return _Multipliers(
            head_dim**-0.5,
            config.number("scale_emb", 1.0),
            config.number("scale_depth", math.sqrt(num_layers)) / math.sqrt(num_layers),
            hidden_size / config.number("dim_model_base", hidden_size),
        )
    query_scalar = config.optional_number("query_pre_attn_scalar") if family.has_query_pre_attn_scalar else None
    root = math.sqrt(config.integer("hidden_size"))
    return _Multipliers((query_scalar or head_dim) ** -0.5, _rounded(root, dtype) if family.scales_embeddings else 1.0)


def _num_extra_layers(config: Settings) -> int:
    return config.integer("num_nextn_predict_layers", minimum=0, maximum=MAX_LAYERS)


def _attention_gates(config: Settings, family: Family) -> AttentionGates | None:
    key = family.attention_gates_key
    return family.attention_gates if key is None or config.flag(key) else None


def _has_bias(config: Settings, of_family: bool | str) -> bool:
    return config.flag(of_family) if isinstance(of_family, str) else of_family


def _text_config(config: Settings, family: Family) -> Settings:
    """The config of the language model of a model that also takes images.

    Keys that concern the whole checkpoint are at the top level of the file.
    """
    text = config.nested("text_config")
    if text is None:
        raise config.unsupported("it has no text_config")
    known, given = family.text_model_type, text.text("model_type")
    if known is not None and given != known:
        raise text.unsupported_value("model_type", known, given)
    return text.with_values({key: config.get(key) for key in _KEYS_OF_CHECKPOINT if config.get(key) is not None})


def _activation(config: Settings, family: Family) -> Activation | UngatedActivation:
    key, known = family.activation_key, activations_of(family)
    name = config.text(key) or "silu"
    if name not in known:
        raise config.unsupported(f"{key} {name!r} is not supported; supported: {', '.join(known)}")
    return known[name]


def _rounded(number: float, dtype: str | None) -> float:
    """The number in the type of a checkpoint. Models are trained with this rounding."""
    if dtype == "bfloat16":
        bits = int(np.float32(number).view(np.uint32))
        return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))
    return float(np.float16(number) if dtype == "float16" else np.float32(number))


def _architecture(config: Settings) -> str:
    names = config.texts("architectures") or []
    model_type = config.text("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    if not names and model_type is None:
        raise config.unsupported("neither architectures nor model_type is given, so it is no config of a model")
    name = names[0] if names else str(model_type)
    if name not in FAMILIES:
        raise config.unsupported(not_in_families(name))
    if model_type is not None and model_type != FAMILIES[name].model_type:
        raise config.unsupported(f"model_type {model_type!r} with architecture {name!r} is not supported")
    return name
