"""The parameters of a short convolution (LFM2, arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Iterator

from ...srt.model_files.short_convolutions import ShortConvolutions
from .parameter import LinearParts, Parameter, Part, Split, stacked


def convolution_linears(convolutions: ShortConvolutions, hidden: int) -> dict[str, LinearParts]:
    """The linear layers around a convolution, by the names of those around attention."""
    channels, has_bias = convolutions.channels, convolutions.has_bias
    return {
        "qkv_proj": LinearParts(stacked("conv.in_proj", *(channels,) * 3), hidden, has_bias, Split.COLUMNS),
        "o_proj": LinearParts((Part("conv.out_proj", (hidden,)),), channels, has_bias, Split.ROWS),
    }


def convolution(convolutions: ShortConvolutions, layer: int, source: str, *, is_gguf: bool) -> Iterator[Parameter]:
    """The weights of a convolution, [channels, 1, width], the oldest token's first, and its bias, if it has one.

    `source`: what the names of the layer's tensors begin with. The weights have three dimensions, because they are no
    matrix of a linear layer: they are not quantized and not packed.
    """
    channels, width = convolutions.channels, convolutions.width
    shape = (channels, 1, width)
    part = Part(f"{source}conv.conv.weight", (channels, width) if is_gguf else shape)
    yield Parameter(convolution_name(layer), shape, (part,), Split.COLUMNS)
    if convolutions.has_bias:
        bias = Part(f"{source}conv.conv.bias", (channels,))
        yield Parameter(convolution_bias_name(layer), bias.shape, (bias,), Split.COLUMNS)


def convolution_name(layer: int) -> str:
    """The name of the weights of a layer's convolution, [channels, 1, width]."""
    return f"layers.{layer}.convolution.weight"


def convolution_bias_name(layer: int) -> str:
    """The name of its bias, [channels]."""
    return f"layers.{layer}.convolution.bias"
