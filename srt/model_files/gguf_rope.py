"""Reads the config of rotary position embedding (RoPE) from a GGUF file."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from .family import Family
from .rope_config import (
    DEFAULT_THETA,
    FrequencyDivisors,
    LinearScaling,
    LongRopeScaling,
    QueryScale,
    RopeConfig,
    number_from_0,
    yarn_attention_factor,
    yarn_scaling,
)
from .settings import Settings

YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
QUERY_SCALE_KEYS = ("attention.temperature_scale", YARN_LOG_MULTIPLIER)
"""More keys of a family with `has_query_scale`. The second one is `mscale_all_dim` of YaRN, whose `mscale` is 1."""
GGUF_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""The names of the tensors whose values GGUFDivisors has, in its order."""


class GGUFDivisors(NamedTuple):
    """The values of a GGUF file's tensors for rotary embedding. Those that the file does not have are None."""

    all: tuple[float, ...] | None
    """for every context"""
    short: tuple[float, ...] | None
    """for contexts of up to the original length"""
    long: tuple[float, ...] | None
    """for longer contexts"""


def rope_from_gguf(config: Settings, family: Family, tensors: GGUFDivisors, context_len: int) -> RopeConfig:
    """Read the config from the keys of a GGUF file, and from its tensors."""
    rope = _without_query_scale(config, family, tensors, context_len)
    beta = number_from_0(config, QUERY_SCALE_KEYS[0])
    if beta == 0:
        return rope
    period = config.integer("rope.scaling.original_context_length", context_len)
    return dataclasses.replace(rope, query_scale=QueryScale(beta, period))


def _without_query_scale(config: Settings, family: Family, tensors: GGUFDivisors, context_len: int) -> RopeConfig:
    theta, divisors = config.number("rope.freq_base", DEFAULT_THETA, above=1), tensors.all
    attention_factor = config.number("rope.scaling.attn_factor", 1.0)
    if tensors.short is not None and tensors.long is not None:
        if (kind := config.text("rope.scaling.type")) not in (None, "longrope"):
            raise config.refusal("rope.scaling.type", "longrope with tensors rope_factors", kind)
        if (given := config.get("rope.scaling.yarn_attn_factor")) is not None:
            raise config.refusal("rope.scaling.yarn_attn_factor", "absent with tensors rope_factors", given)
        original = config.integer("rope.scaling.original_context_length", context_len)
        return RopeConfig(theta, LongRopeScaling(tensors.short, tensors.long, original, attention_factor))
    if tensors.short is not None or tensors.long is not None:
        raise ValueError(f"{config.source}: one of the tensors rope_factors_short and rope_factors_long is missing")
    # As in llama.cpp, a file without a type scales linearly. Files from before `rope.scaling.factor` have only the
    # linear scale.
    kind = config.text("rope.scaling.type") or "linear"
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise config.refusal("rope.scaling.type", "none, linear or yarn", kind)
    attention_factor = 1.0
    if kind == "yarn":
        mscale_all = number_from_0(config, YARN_LOG_MULTIPLIER)
        attention_factor = yarn_attention_factor(factor) / yarn_attention_factor(factor, mscale_all)
        if family.has_latents and mscale_all:
            attention_factor = 1.0  # the key has another unit, and both factors are equal
    _check_attention_factors(config, attention_factor)
    if kind == "none" or (kind == "linear" and factor == 1):
        return RopeConfig(theta, None if divisors is None else FrequencyDivisors(divisors))
    if divisors is not None:
        raise ValueError(
            f"{config.source}: rope.scaling.type {kind!r} together with a rope_freqs tensor is not supported"
        )
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(factor))
    scaling = yarn_scaling(
        config,
        factor,
        config.integer("rope.scaling.original_context_length", context_len),
        config.number("rope.scaling.yarn_beta_fast", 32.0),
        config.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor,
        # GGUF files have no key for this. llama.cpp always truncates, but GPT-OSS was trained without it.
        truncate=family.default_rope.get("truncate", True),
    )
    return RopeConfig(theta, scaling)


def _check_attention_factors(config: Settings, expected: float) -> None:
    """Raise ValueError if a GGUF file has a factor of cosines and sines that YaRN does not imply.

    Converters have written the whole factor to both keys. llama.cpp multiplies by the first one once more.
    """
    for key, allowed in (("attn_factor", {1.0, expected}), ("yarn_attn_factor", {expected})):
        given = config.number(f"rope.scaling.{key}", expected)
        if not any(math.isclose(given, factor, rel_tol=1e-6) for factor in allowed):
            names = " or ".join(f"{factor:.7g}" for factor in sorted(allowed))
            raise config.refusal(f"rope.scaling.{key}", f"{names} without tensors rope_factors", given)
