"""The parameters of a Gated DeltaNet (arXiv 2412.06464) as in Qwen 3.5."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ...srt.model_files.delta_net_config import DeltaNetConfig
from .parameter import LinearParts, Parameter, Part, Split

_PREFIX = "linear_attn."
FLOAT32_ENDINGS = (".delta_net.decay_log", ".delta_net.decay_bias")
"""What the names of parameters end with that are float32 in a model of any type: decays of all tokens multiply."""


def delta_net_linears(sizes: DeltaNetConfig, hidden: int) -> dict[str, LinearParts]:
    """The linear layers around a Gated DeltaNet, by the names of those around attention."""
    parts = _parts_by_head(sizes) if sizes.stored_by_head else _parts(sizes)
    return {
        "qkv_proj": LinearParts(parts, hidden, False, Split.COLUMNS),
        "o_proj": LinearParts((Part(f"{_PREFIX}out_proj", (hidden,)),), sizes.value_size, False, Split.ROWS),
    }


def _parts(sizes: DeltaNetConfig) -> tuple[Part, ...]:
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return tuple(Part(_PREFIX + name, (size,)) for name, size in zip(names, sizes.projected_sizes, strict=True))


def _parts_by_head(sizes: DeltaNetConfig) -> tuple[Part, ...]:
    """The same from tensors that have the rows of one key head, with its value heads, after those of another."""
    heads, group = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    tensors = {
        "in_proj_qkvz": (sizes.key_dim, sizes.key_dim, group * sizes.value_dim, group * sizes.value_dim),
        "in_proj_ba": (group, group),
    }
    parts: list[Part] = []
    for name, of_head in tensors.items():
        for size, first in zip(of_head, itertools.accumulate(of_head, initial=0), strict=False):
            order = tuple(range(first, first + size))
            parts.append(Part(_PREFIX + name, (heads * size,), head_order=order, head_rows=sum(of_head)))
    return tuple(parts)


def delta_net(sizes: DeltaNetConfig, layer: int, source: str) -> Iterator[Parameter]:
    """The weights of a Gated DeltaNet between its linear layers, in the order of `delta_net_names`.

    `source`: what the names of the layer's tensors begin with. The weights of the convolution have three dimensions,
    because they are no matrix of a linear layer: they are not quantized and not packed.
    """
    stored = {
        "conv1d.weight": (sizes.channels, 1, sizes.width),
        "A_log": (sizes.num_value_heads,),
        "dt_bias": (sizes.num_value_heads,),
        "norm.weight": (sizes.value_dim,),
    }
    for name, (tensor, shape) in zip(delta_net_names(layer), stored.items(), strict=True):
        yield Parameter(name, shape, (Part(f"{source}{_PREFIX}{tensor}", shape),), Split.REPLICATED)


def delta_net_names(layer: int) -> tuple[str, str, str, str]:
    """The names of the weights of a layer: the fields of DeltaNetWeights."""
    prefix = f"layers.{layer}.delta_net."
    return f"{prefix}convolution", f"{prefix}decay_log", f"{prefix}decay_bias", f"{prefix}norm.weight"
