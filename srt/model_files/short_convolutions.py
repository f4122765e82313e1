"""The config of short convolutions, which some layers of LFM2 have in place of attention (arXiv 2511.23404)."""

from __future__ import annotations

from typing import NamedTuple

from .settings import Settings

_CONVOLUTION, _ATTENTION = "conv", "full_attention"
MAX_WIDTH = 64
"""Most tokens that a convolution may cover. A kernel has a copy of its loop for each."""


class ShortConvolutions(NamedTuple):
    """The layers whose mixer is a gated short convolution.

    A linear layer makes three vectors from a token's input. The product of the first and the third is convolved, each
    channel with its own weights, over the token and those before it. The second one multiplies the result.
    """

    layers: tuple[int, ...]
    """in ascending order"""
    channels: int
    """components of each of the vectors"""
    width: int
    """how many tokens a convolution covers, the newest included"""
    has_bias: bool = False
    """whether the convolution and the linear layers around it have biases"""


def convolutions_from_hf(
    config: Settings, num_layers: int, attention: tuple[str, ...] = (_ATTENTION,)
) -> ShortConvolutions | None:
    """Read config.json. None: all layers have attention. Raises ValueError that names a key that is out of range.

    `attention`: the names of layers with attention in `layer_types`.
    """
    kinds = config.texts("layer_types")
    if kinds is None:
        with_attention = set(range(num_layers))
        if config.get("full_attn_idxs") is not None:
            with_attention = set(config.integers("full_attn_idxs"))
            if max(with_attention, default=0) >= num_layers:
                raise config.refusal("full_attn_idxs", f"layers below {num_layers}", sorted(with_attention))
        kinds = [_ATTENTION if layer in with_attention else _CONVOLUTION for layer in range(num_layers)]
    known = (_CONVOLUTION, *attention)
    if len(kinds) != num_layers or not set(known) >= set(kinds):
        raise config.refusal("layer_types", f"{' or '.join(map(repr, known))} for each of {num_layers} layers", kinds)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _CONVOLUTION)
    width, has_bias = config.integer("conv_L_cache", 3, maximum=MAX_WIDTH), config.flag("conv_bias")
    return ShortConvolutions(layers, config.integer("hidden_size"), width, has_bias) if layers else None
