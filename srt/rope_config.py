"""Rotary position embedding as a checkpoint describes it: the base and, if any, how its frequencies are scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth step between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp between interpolated and kept frequencies; cos and sin times
    `attention_factor`."""

    factor: float
    original_context_len: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True)
class FrequencyDivisors:
    """Each of the head_dim / 2 frequencies divided by a number of its own (GGUF's `rope_freqs` tensor)."""

    divisors: tuple[float, ...]


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


@dataclass(frozen=True)
class RopeConfig:
    theta: float = 10000.0
    scaling: RopeScaling | None = None

    @property
    def context_len(self) -> int:
        """Tokens that the scaling was made for where it says so itself, else 0."""
        if isinstance(self.scaling, YarnScaling):
            return int(self.scaling.original_context_len * self.scaling.factor)
        return 0


def rope_from_hf(config: Mapping[str, Any], context_len: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before) of a config.json, whose
    model has a context of `context_len`.

    Raises ValueError naming the rope type or key that is unknown or missing.
    """
    params: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ValueError(f"config.json: {key} must be an object, got {given!r}")
        if any(isinstance(value, Mapping) for value in given.values()):
            raise ValueError(f"config.json: {key} differs by layer type, which is not supported")
        params = {name: value for name, value in given.items() if value is not None}
        break
    old_type = params.pop("type", None)
    rope_type = params.pop("rope_type", None) or old_type or "default"
    theta = _number(params.pop("rope_theta", config.get("rope_theta")) or 10000.0, "rope_theta")
    for partial in (params.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0")
    if rope_type not in _FROM_HF:
        raise ValueError(f"config.json: rope type {rope_type!r} is not supported; supported: {', '.join(_FROM_HF)}")
    original = params.pop("original_max_position_embeddings", None)
    # At the top of the file it wins, as in transformers.
    original = config.get("original_max_position_embeddings") or original or context_len
    original_context_len = int(_number(original, "original_max_position_embeddings"))
    take = _Params(rope_type, params)
    scaling = _FROM_HF[rope_type](take, original_context_len)
    take.finish()
    return RopeConfig(theta, scaling)


def rope_from_gguf(
    metadata: Mapping[str, Any], architecture: str, divisors: tuple[float, ...] | None, context_len: int
) -> RopeConfig:
    """From `{architecture}.rope.*` of a GGUF file; `divisors` are the numbers of its `rope_freqs` tensor, if any."""
    prefix = f"{architecture}.rope."
    theta = _number(metadata.get(prefix + "freq_base", 10000.0), "rope.freq_base")
    kind = metadata.get(prefix + "scaling.type", "none")
    # Files from before `scaling.factor` carry a linear scale alone.
    factor = metadata.get(prefix + "scaling.factor", metadata.get(prefix + "scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{prefix}scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    if divisors is not None and kind != "none":
        raise ValueError(f"{prefix}scaling.type {kind!r} together with a rope_freqs tensor is not supported")
    if divisors is not None:
        return RopeConfig(theta, FrequencyDivisors(divisors))
    if kind == "linear" or (f"{prefix}scale_linear" in metadata and factor != 1):
        return RopeConfig(theta, LinearScaling(_number(factor, "rope.scaling.factor")))
    if kind == "yarn":
        original = int(metadata.get(prefix + "scaling.original_context_length", context_len))
        factor = _number(factor, "rope.scaling.factor")
        return RopeConfig(theta, YarnScaling(factor, original, 32.0, 1.0, _yarn_attention_factor(factor), True))
    return RopeConfig(theta)


class _Params:
    """Takes the keys of a rope dictionary one by one; `finish` refuses what nobody took."""

    def __init__(self, rope_type: str, values: dict[str, Any]) -> None:
        self.rope_type = rope_type
        self.values = values

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.pop(key, default)
        if value is None:
            raise ValueError(f"config.json: rope type {self.rope_type!r} needs {key}")
        return _number(value, key)

    def optional(self, key: str) -> float | None:
        value = self.values.pop(key, None)
        return None if value is None else _number(value, key)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.values.pop(key, default))

    def finish(self) -> None:
        if self.values:
            raise ValueError(
                f"config.json: rope type {self.rope_type!r} has settings that are not supported: "
                + ", ".join(f"{key}={value!r}" for key, value in self.values.items())
            )


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key} must be a positive number, got {value!r}")
    return float(value)


def _default(params: _Params, original_context_len: int) -> RopeScaling | None:
    # transformers keeps a factor beside the default type without using it
    params.optional("factor")
    return None


def _linear(params: _Params, original_context_len: int) -> RopeScaling:
    return LinearScaling(params.number("factor"))


def _llama3(params: _Params, original_context_len: int) -> RopeScaling:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if low == high:
        raise ValueError(f"config.json: low_freq_factor and high_freq_factor must differ, both are {low}")
    return Llama3Scaling(params.number("factor"), low, high, original_context_len)


def _yarn(params: _Params, original_context_len: int) -> RopeScaling:
    factor = params.number("factor")
    given = params.optional("attention_factor")
    mscale, mscale_all = params.optional("mscale"), params.optional("mscale_all_dim")
    if given is not None:
        attention_factor = given
    elif mscale and mscale_all:
        attention_factor = _yarn_attention_factor(factor, mscale) / _yarn_attention_factor(factor, mscale_all)
    else:
        attention_factor = _yarn_attention_factor(factor)
    return YarnScaling(
        factor,
        original_context_len,
        params.number("beta_fast", 32.0),
        params.number("beta_slow", 1.0),
        attention_factor,
        params.flag("truncate", True),
    )


def _yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# "dynamic" is missing on purpose: its frequencies change with the length, so cached keys would be rotated wrongly.
_FROM_HF: dict[str, Callable[[_Params, int], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
