"""The config of rotary position embedding (RoPE): the base, and the scaling of its frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .settings import Settings, quote

MAX_POSITIONS = 2**31 - 1
"""Most positions of a context, because positions are sent to the device as int32."""
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: all frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a ramp between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): low frequencies are divided by `factor`, high ones kept, with a ramp between them.

    cos and sin are multiplied by `attention_factor`.
    """

    factor: float
    original_context_len: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True)
class FrequencyDivisors:
    """A divisor for each of the head_dim / 2 frequencies (the tensor `rope_freqs` of GGUF files)."""

    divisors: tuple[float, ...]


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


@dataclass(frozen=True)
class RopeConfig:
    """The base `theta` of rotary embedding, and the scaling of its frequencies, if any."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    @property
    def context_len(self) -> int:
        """The context length that the scaling defines, in tokens; 0 if it defines none."""
        if isinstance(self.scaling, YarnScaling):
            return int(self.scaling.original_context_len * self.scaling.factor)
        return 0


def rope_from_hf(config: Settings, context_len: int) -> RopeConfig:
    """Read the config from config.json.

    transformers 5 writes the key `rope_parameters`, older versions `rope_theta` and `rope_scaling`. `context_len`: the
    model's context length. Raises ValueError that names a rope type or key that is unknown, missing or out of range.
    """
    # As in transformers, an empty object counts as absent.
    given = {key: config.nested(key) for key in ("rope_scaling", "rope_parameters") if config.get(key) != {}}
    params = given.get("rope_scaling") or given.get("rope_parameters") or Settings(config.source, {})
    if any(isinstance(value, Mapping) for value in params.unused().values()):
        raise ValueError(f"{config.source}: rope settings differ by layer type, which is not supported")
    old_type = params.text("type")
    rope_type = params.text("rope_type") or old_type or "default"
    theta_of = params if params.get("rope_theta") is not None else config
    theta = theta_of.number("rope_theta", _DEFAULT_THETA, above=1)
    for settings in (params, config):
        if settings.number("partial_rotary_factor", 1.0) != 1:
            raise settings.refusal("partial_rotary_factor", "1", settings.get("partial_rotary_factor"))
    if rope_type not in _FROM_HF:
        raise ValueError(f"{config.source}: rope type {rope_type!r} is not supported; supported: {', '.join(_FROM_HF)}")
    # As in transformers, the key at the top level of the file takes precedence.
    original = params.integer("original_max_position_embeddings", context_len)
    original = config.integer("original_max_position_embeddings", original)
    scaling = _FROM_HF[rope_type](params, original)
    if unknown := params.unused():
        raise ValueError(
            f"{config.source}: rope type {rope_type!r} has settings that are not supported: "
            + ", ".join(f"{key}={quote(value)}" for key, value in unknown.items())
        )
    return RopeConfig(theta, scaling)


def rope_from_gguf(config: Settings, divisors: tuple[float, ...] | None, context_len: int) -> RopeConfig:
    """Read the config from the keys `rope.*` of a GGUF file. `divisors`: values of its `rope_freqs` tensor, if any."""
    theta = config.number("rope.freq_base", _DEFAULT_THETA, above=1)
    # As in llama.cpp, a file without a type scales linearly. Files from before `rope.scaling.factor` have only the
    # linear scale.
    kind = config.text("rope.scaling.type") or "linear"
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise config.refusal("rope.scaling.type", "none, linear or yarn", kind)
    if kind == "none" or (kind == "linear" and factor == 1):
        return RopeConfig(theta, None if divisors is None else FrequencyDivisors(divisors))
    if divisors is not None:
        raise ValueError(
            f"{config.source}: rope.scaling.type {kind!r} together with a rope_freqs tensor is not supported"
        )
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(factor))
    original = config.integer("rope.scaling.original_context_length", context_len)
    return RopeConfig(theta, _yarn_scaling(config, factor, original))


def _default(params: Settings, original_context_len: int) -> RopeScaling | None:
    # transformers accepts a factor with the default type, and ignores it.
    params.optional_number("factor")
    return None


def _linear(params: Settings, original_context_len: int) -> RopeScaling:
    return LinearScaling(params.number("factor"))


def _llama3(params: Settings, original_context_len: int) -> RopeScaling:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if low >= high:
        raise params.refusal("high_freq_factor", f"above low_freq_factor ({low:g})", high)
    return Llama3Scaling(params.number("factor"), low, high, original_context_len)


def _yarn(params: Settings, original_context_len: int) -> RopeScaling:
    factor = params.number("factor")
    given = params.optional_number("attention_factor")
    mscale, mscale_all = params.optional_number("mscale"), params.optional_number("mscale_all_dim")
    if given is None and mscale and mscale_all:
        given = _yarn_attention_factor(factor, mscale) / _yarn_attention_factor(factor, mscale_all)
    return _yarn_scaling(
        params,
        factor,
        original_context_len,
        params.number("beta_fast", 32.0),
        params.number("beta_slow", 1.0),
        given,
        params.flag("truncate", True),
    )


def _yarn_scaling(
    source: Settings,
    factor: float,
    original_context_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    truncate: bool = True,
) -> YarnScaling:
    context_len = original_context_len * factor
    if not 1 <= context_len <= MAX_POSITIONS:
        raise ValueError(
            f"{source.source}: YaRN must extend the context to at most {MAX_POSITIONS} tokens, got a factor of "
            f"{factor:g} and an original context of {original_context_len}"
        )
    attention_factor = attention_factor or _yarn_attention_factor(factor)
    if not math.isfinite(attention_factor):
        raise ValueError(f"{source.source}: YaRN's mscale must give a finite factor, got {attention_factor}")
    return YarnScaling(factor, original_context_len, beta_fast, beta_slow, attention_factor, truncate)


def _yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# There is no "dynamic": its frequencies depend on the length, so cached keys would have the wrong rotation.
_FROM_HF: dict[str, Callable[[Settings, int], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
