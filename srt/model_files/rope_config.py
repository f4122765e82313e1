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
DEFAULT_THETA = 10000.0
_MAX_FACTOR = 1000.0
"""Most of what `number_from_0` reads. Published files have numbers up to 1."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: all frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `rotated` frequencies of a head are kept, and divided by `factor`. The others are 0.

    So the kept ones are those of a whole head, unlike those of `RopeConfig.rotary_dim`.
    """

    rotated: int
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


RopeScaling: TypeAlias = (
    LinearScaling | ProportionalScaling | Llama3Scaling | YarnScaling | FrequencyDivisors | LongRopeScaling
)


class QueryScale(NamedTuple):
    """What the query of a position is multiplied by: 1 + beta * log(1 + floor(position / period))."""

    beta: float
    period: int


@dataclass(frozen=True)
class RopeConfig:
    """The base `theta` of rotary embedding, and the scaling of its frequencies, if any."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """Number of the first components of a head that are rotated; None: all. With 0, no position is encoded."""
    query_scale: QueryScale | None = None
    head_dim: int | None = None
    """components of a head, in a model whose layers differ in it; None: those of the model"""

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
    # Empty `rope_parameters` do not stand for the default.
    default = family.default_rope if config.get("rope_parameters") is None else {}
    params = rope_settings(config) or Settings(config.source, default)
    if any(isinstance(value, Mapping) for value in params.unused().values()):
        raise ValueError(f"{config.source}: rope settings differ by layer type, which is not supported")
    return _rope_of(params, config, family, context_len, head_dim)


def rope_settings(config: Settings) -> Settings | None:
    """The settings of config.json that concern all layers; None if it has none.

    As in transformers, an empty object counts as absent.
    """
    given = {key: config.nested(key) for key in ("rope_scaling", "rope_parameters") if config.get(key) != {}}
    return given.get("rope_scaling") or given.get("rope_parameters")


def ropes_from_hf(
    config: Settings, family: Family, context_len: int, head_dims: tuple[int, int]
) -> tuple[RopeConfig, RopeConfig]:
    """Read the configs of layers without and with a window, which differ. `head_dims`: components of their heads.

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
        for layer_type, theta, scaling, head_dim in zip(
            ("full_attention", "sliding_attention"), (theta, local_theta), scalings, head_dims, strict=True
        )
    ]
    if unknown := given.unused():
        raise config.unsupported(f"rope_parameters has settings that are not supported: {', '.join(unknown)}")
    if head_dims[0] != head_dims[1]:
        ropes = [dataclasses.replace(rope, head_dim=dim) for rope, dim in zip(ropes, head_dims, strict=True)]
    return ropes[0], ropes[1]


def _rope_of(params: Settings, config: Settings, family: Family, context_len: int, head_dim: int) -> RopeConfig:
    """Read one config. `params`: its settings. `config`: the file, which may have some of them at its top level."""
    old_type = params.text("type")
    rope_type = params.text("rope_type") or old_type or "default"
    theta_of = params if params.get("rope_theta") is not None else config
    theta = theta_of.number("rope_theta", family.default_rope_theta, above=1)
    rotary_dim = head_dim
    if rope_type != "proportional":  # it keeps frequencies of the whole head
        rotary_dim = _rotary_dim(params, config, head_dim, family.partial_rotary)
    is_stretched = family.has_rope_alpha and rope_type == "dynamic"
    if is_stretched:
        theta *= _stretch(params, head_dim)
    elif rope_type not in _FROM_HF:
        raise ValueError(f"{config.source}: rope type {rope_type!r} is not supported; supported: {', '.join(_FROM_HF)}")
    # As in transformers, the key at the top level of the file takes precedence.
    original = params.integer("original_max_position_embeddings", context_len)
    original = config.integer("original_max_position_embeddings", family.default_original_context_len or original)
    scaling = None if is_stretched else _FROM_HF[rope_type](params, _Sizes(context_len, original, rotary_dim))
    query_scale = _query_scale(params, context_len) if family.has_query_scale else None
    if unknown := params.unused():
        raise ValueError(
            f"{config.source}: rope type {rope_type!r} has settings that are not supported: "
            + ", ".join(f"{key}={quote(value)}" for key, value in unknown.items())
        )
    return RopeConfig(theta, scaling, None if rotary_dim == head_dim else rotary_dim, query_scale)


def _stretch(params: Settings, head_dim: int) -> float:
    """What `alpha` multiplies the base by. Published configs have keys of YaRN beside it, which are not read."""
    for key in ("beta_fast", "beta_slow"):
        params.optional_number(key)
    for key in ("mscale", "mscale_all_dim"):
        number_from_0(params, key)
    if (factor := params.number("factor", 1.0)) != 1:
        raise params.refusal("factor", "1 beside alpha", factor)
    if (alpha := params.number("alpha")) > MAX_POSITIONS:
        raise params.refusal("alpha", f"at most {MAX_POSITIONS}", alpha)
    if head_dim <= 2:
        raise params.unsupported(f"alpha needs heads of more than 2 components, got {head_dim}")
    return math.pow(alpha, head_dim / (head_dim - 2))


def _query_scale(params: Settings, context_len: int) -> QueryScale:
    if (given := params.integer("max_position_embeddings", context_len)) != context_len:
        raise params.refusal("max_position_embeddings", f"{context_len}, as at the top level of the file", given)
    return QueryScale(params.number("llama_4_scaling_beta"), params.integer("original_max_position_embeddings"))


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


def _proportional(params: Settings, sizes: _Sizes) -> RopeScaling:
    part = params.number("partial_rotary_factor", 1.0)
    if part > 1:
        raise params.refusal("partial_rotary_factor", "at most 1", part)
    return ProportionalScaling(int(part * sizes.rotary_dim // 2), params.number("factor", 1.0))


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
    # As in transformers, 0 counts as absent.
    mscale, mscale_all = number_from_0(params, "mscale"), number_from_0(params, "mscale_all_dim")
    if given is None and mscale and mscale_all:
        given = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all)
    return yarn_scaling(
        params,
        factor,
        sizes.original_context_len,
        params.number("beta_fast", 32.0),
        params.number("beta_slow", 1.0),
        given,
        params.flag("truncate", True),
    )


def yarn_scaling(
    source: Settings,
    factor: float,
    original_context_len: int,
    beta_fast: float,
    beta_slow: float,
    attention_factor: float | None,
    truncate: bool,
) -> YarnScaling:
    """YaRN. `attention_factor`: None: that of the paper. Raises ValueError for a context that is too long."""
    context_len = original_context_len * factor
    if not 1 <= context_len <= MAX_POSITIONS:
        raise ValueError(
            f"{source.source}: YaRN must extend the context to at most {MAX_POSITIONS} tokens, got a factor of "
            f"{factor:g} and an original context of {original_context_len}"
        )
    attention_factor = attention_factor or yarn_attention_factor(factor)
    return YarnScaling(factor, original_context_len, beta_fast, beta_slow, attention_factor, truncate)


def number_from_0(config: Settings, key: str) -> float:
    """A number of at least 0; 0 if it is absent."""
    number = config.number(key, 0.0, above=-math.inf)
    if not 0 <= number <= _MAX_FACTOR:
        raise config.refusal(key, f"a number from 0 to {_MAX_FACTOR:g}", number)
    return number


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# There is no "dynamic": its frequencies depend on the length, so cached keys would have the wrong rotation.
_FROM_HF: dict[str, Callable[[Settings, _Sizes], RopeScaling | None]] = {
    "default": _default,
    "proportional": _proportional,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its first name
}
