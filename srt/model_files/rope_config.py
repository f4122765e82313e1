"""The config of rotary position embedding (RoPE): the base, and the scaling of its frequencies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .family import Family
from .layer_windows import SlidingWindows
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
    """A divisor for each frequency, such as the tensor `rope_freqs` of GGUF files."""

    divisors: tuple[float, ...]
    attention_factor: float = 1.0
    """what cos and sin are multiplied by"""


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): divisors for contexts of up to `original_context_len` tokens, and for longer ones.

    transformers changes from one to the other when a request becomes long, but keeps the keys of its first tokens. Here
    the context length of the server decides, as in vLLM and llama.cpp, so all keys have the same frequencies.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context_len: int
    attention_factor: float


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors | LongRopeScaling


@dataclass(frozen=True)
class RopeConfig:
    """The base `theta` of rotary embedding, and the scaling of its frequencies, if any."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """Number of the first components of a head that are rotated; None: all. With 0, no position is encoded."""

    def for_context(self, context_len: int) -> RopeConfig:
        """The config for requests of at most `context_len` tokens. It has no LongRopeScaling."""
        scaling = self.scaling
        if not isinstance(scaling, LongRopeScaling):
            return self
        divisors = scaling.long if context_len > scaling.original_context_len else scaling.short
        return dataclasses.replace(self, scaling=FrequencyDivisors(divisors, scaling.attention_factor))

    @property
    def context_len(self) -> int:
        """The context length that the scaling defines, in tokens; 0 if it defines none."""
        if isinstance(self.scaling, YarnScaling):
            return int(self.scaling.original_context_len * self.scaling.factor)
        return 0


NO_ROTATION = RopeConfig(rotary_dim=0)
"""The config of a layer without rotary embedding."""


@dataclass(frozen=True)
class _Sizes:
    context_len: int
    """of the model"""
    original_context_len: int
    """before it was extended"""
    rotary_dim: int


def rope_from_hf(config: Settings, family: Family, context_len: int, head_dim: int) -> RopeConfig:
    """Read the config from config.json.

    transformers 5 writes the key `rope_parameters`, older versions `rope_theta` and `rope_scaling`. `context_len`: the
    model's context length. Raises ValueError that names a rope type or key that is unknown, missing or out of range.
    """
    # As in transformers, an empty object counts as absent. But empty `rope_parameters` do not stand for the default.
    given = {key: config.nested(key) for key in ("rope_scaling", "rope_parameters") if config.get(key) != {}}
    default = family.default_rope if config.get("rope_parameters") is None else {}
    params = given.get("rope_scaling") or given.get("rope_parameters") or Settings(config.source, default)
    if any(isinstance(value, Mapping) for value in params.unused().values()):
        raise ValueError(f"{config.source}: rope settings differ by layer type, which is not supported")
    return _rope_of(params, config, family, context_len, head_dim)


def ropes_from_hf(config: Settings, family: Family, context_len: int, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the configs of layers without and with a window, which differ.

    transformers 5 writes both in `rope_parameters`. Before, `rope_scaling` concerned the layers without a window.
    """
    given = config.nested("rope_parameters") or Settings(config.source, {})
    theta = local_theta = config.number("rope_theta", family.default_rope_theta, above=1)
    if family.local_rope_theta is not None:
        local_theta = config.number("rope_local_base_freq", family.local_rope_theta, above=1)
    elif theta != family.default_rope_theta:
        raise config.unsupported(
            f"rope_theta={theta:g} outside rope_parameters is not supported, because versions of transformers "
            f"interpret it differently; supported: {family.default_rope_theta:g}"
        )
    scalings = (None if config.get("rope_scaling") == {} else config.nested("rope_scaling")), None
    ropes = [
        _rope_of(
            (scaling or given.nested(layer_type) or Settings(config.source, {})).with_defaults({"rope_theta": theta}),
            config,
            family,
            context_len,
            head_dim,
        )
        for layer_type, theta, scaling in zip(
            ("full_attention", "sliding_attention"), (theta, local_theta), scalings, strict=True
        )
    ]
    if unknown := given.unused():
        raise config.unsupported(f"rope_parameters has settings that are not supported: {', '.join(unknown)}")
    return ropes[0], ropes[1]


def _rope_of(params: Settings, config: Settings, family: Family, context_len: int, head_dim: int) -> RopeConfig:
    """Read one config. `params`: its settings. `config`: the file, which may have some of them at its top level."""
    old_type = params.text("type")
    rope_type = params.text("rope_type") or old_type or "default"
    theta_of = params if params.get("rope_theta") is not None else config
    theta = theta_of.number("rope_theta", family.default_rope_theta, above=1)
    rotary_dim = _rotary_dim(params, config, head_dim, family.partial_rotary)
    if rope_type not in _FROM_HF:
        raise ValueError(f"{config.source}: rope type {rope_type!r} is not supported; supported: {', '.join(_FROM_HF)}")
    # As in transformers, the key at the top level of the file takes precedence.
    original = params.integer("original_max_position_embeddings", context_len)
    original = config.integer("original_max_position_embeddings", family.default_original_context_len or original)
    scaling = _FROM_HF[rope_type](params, _Sizes(context_len, original, rotary_dim))
    if unknown := params.unused():
        raise ValueError(
            f"{config.source}: rope type {rope_type!r} has settings that are not supported: "
            + ", ".join(f"{key}={quote(value)}" for key, value in unknown.items())
        )
    return RopeConfig(theta, scaling, None if rotary_dim == head_dim else rotary_dim)


def _rotary_dim(params: Settings, config: Settings, head_dim: int, partial: bool) -> int:
    # As in transformers, the nested key takes precedence.
    source = params if params.get("partial_rotary_factor") is not None else config
    factor = source.number("partial_rotary_factor", 1.0)
    if not partial:
        for settings in (params, config):
            if settings.number("partial_rotary_factor", 1.0) != 1:
                raise settings.refusal("partial_rotary_factor", "1", settings.get("partial_rotary_factor"))
    if factor == 1:
        return head_dim
    rotary_dim = int(head_dim * factor) if factor < 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        raise source.refusal(
            "partial_rotary_factor",
            f"at most 1, and give an even number of the {head_dim} components of a head",
            factor,
        )
    return rotary_dim


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
    """Read the config from the keys `rope.*` of a GGUF file, and from its tensors."""
    theta, divisors = config.number("rope.freq_base", _DEFAULT_THETA, above=1), tensors.all
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
    _check_attention_factors(config, _yarn_attention_factor(factor) if kind == "yarn" else 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        return RopeConfig(theta, None if divisors is None else FrequencyDivisors(divisors))
    if divisors is not None:
        raise ValueError(
            f"{config.source}: rope.scaling.type {kind!r} together with a rope_freqs tensor is not supported"
        )
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(factor))
    scaling = _yarn_scaling(
        config,
        factor,
        config.integer("rope.scaling.original_context_length", context_len),
        config.number("rope.scaling.yarn_beta_fast", 32.0),
        config.number("rope.scaling.yarn_beta_slow", 1.0),
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


def ropes_of_windows(windows: SlidingWindows, rope: RopeConfig, local_rope: RopeConfig) -> tuple[RopeConfig, ...]:
    """`ModelConfig.layer_ropes` of a model whose layers with a window have `local_rope`."""
    return tuple(rope if window is None else local_rope for window in windows)


def layer_ropes(family: Family, config: Settings, rope: RopeConfig, windows: SlidingWindows) -> tuple[RopeConfig, ...]:
    """`ModelConfig.layer_ropes` of a model whose rotated layers have `rope`."""
    if family.rotated_layers is None:
        return ()
    return tuple(rope if rotated else NO_ROTATION for rotated in family.rotated_layers(config, windows))


def _default(params: Settings, sizes: _Sizes) -> RopeScaling | None:
    # transformers accepts a factor with the default type, and ignores it.
    params.optional_number("factor")
    return None


def _linear(params: Settings, sizes: _Sizes) -> RopeScaling:
    return LinearScaling(params.number("factor"))


def _llama3(params: Settings, sizes: _Sizes) -> RopeScaling:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if low >= high:
        raise params.refusal("high_freq_factor", f"above low_freq_factor ({low:g})", high)
    return Llama3Scaling(params.number("factor"), low, high, sizes.original_context_len)


def _longrope(params: Settings, sizes: _Sizes) -> RopeScaling:
    count, original = sizes.rotary_dim // 2, sizes.original_context_len
    factor = params.number("factor", sizes.context_len / original)
    given = params.optional_number("attention_factor")
    return LongRopeScaling(
        params.numbers("short_factor", count),
        params.numbers("long_factor", count),
        original,
        given or _longrope_attention_factor(factor, original),
    )


def _longrope_attention_factor(factor: float, original_context_len: int) -> float:
    if factor <= 1 or original_context_len == 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_context_len))


def _yarn(params: Settings, sizes: _Sizes) -> RopeScaling:
    factor = params.number("factor")
    given = params.optional_number("attention_factor")
    mscale, mscale_all = params.optional_number("mscale"), params.optional_number("mscale_all_dim")
    if given is None and mscale and mscale_all:
        given = _yarn_attention_factor(factor, mscale) / _yarn_attention_factor(factor, mscale_all)
    return _yarn_scaling(
        params,
        factor,
        sizes.original_context_len,
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
_FROM_HF: dict[str, Callable[[Settings, _Sizes], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its first name
}
