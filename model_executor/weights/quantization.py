"""Weights of 8 or 4 bits: what the setting `quantization` may be, and how weights are rounded.

Every 32 weights along a row share a scale, and a minimum where they have 4 bits, as in ggml's types Q8_0 and Q4_1. What
they are multiplied with is rounded to 8 bits on the way, in groups of 32 as well (csrc/cpu/quantized.h): scales for
whole rows would cost several times the accuracy (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ...srt.model_files.model_config import ModelConfig
from ..models.family import family_of

GROUP = 32
"""weights along a row that share a scale"""
BITS_PER_WEIGHT = {"int8": 8 + 16 / GROUP, "int4": 4 + 2 * 16 / GROUP}
"""with their share of scales and minima, which are float16"""
HEAD_FORM = "int8"
"""of the output head, whatever the layers have: its errors are the logits' own"""
_CHUNK_ROWS = 4096
"""worked on at once: what is in between takes several times their memory"""


def check_quantization(quantization: str | None, attention_backend: str, device: torch.device) -> None:
    """Raises ValueError for a name that is not known, and where nothing can compute with such weights."""
    if quantization is None:
        return
    if quantization not in BITS_PER_WEIGHT:
        raise ValueError(f"quantization must be {', '.join(BITS_PER_WEIGHT)} or none, got {quantization!r}")
    if attention_backend != "cpu":
        raise ValueError(
            f"quantization {quantization} needs a CPU and the attention backend cpu with its compiled operations "
            "(built when tercet is installed where there is a C++ compiler (pip install --no-build-isolation)), "
            f"but the device is {device.type} and the attention backend {attention_backend}"
        )


def quantized_forms(config: ModelConfig, quantization: str | None) -> dict[str, str]:
    """Parameter -> "int8" or "int4": every matrix that something is multiplied with.

    Raises ValueError where rows are no multiple of GROUP.
    """
    if quantization is None:
        return {}
    forms = {}
    for name, shape, _ in family_of(config).parameters(config):
        if name == ("embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"):
            forms[name] = HEAD_FORM
        elif len(shape) == 2 and name != "embed_tokens.weight":
            forms[name] = quantization
        if name in forms and shape[1] % GROUP:
            raise ValueError(f"quantization needs rows of a multiple of {GROUP}, those of {name} have {shape[1]}")
    return forms


def parameter_bytes(config: ModelConfig, dtype_bytes: int, quantization: str | None = None) -> dict[str, int]:
    """Of each parameter as layers hold it; `dtype_bytes`: of a number of those that are not quantized."""
    forms = quantized_forms(config, quantization)
    return {
        name: int(math.prod(shape) * (BITS_PER_WEIGHT[forms[name]] / 8 if name in forms else dtype_bytes))
        for name, shape, _ in family_of(config).parameters(config)
    }


class QuantizedWeight(NamedTuple):
    """A matrix [n, k]: values * scales + minima, group by group; k is a multiple of GROUP."""

    values: torch.Tensor
    """[n, k]; int8: above -128; int4: uint8, below 16"""
    scales: torch.Tensor
    """float16 [n, k / GROUP]"""
    minima: torch.Tensor | None
    """the same; None: int8"""

    @property
    def bits(self) -> int:
        return 8 if self.minima is None else 4

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> torch.Tensor:
        """float32 [n, k]"""
        groups = self.values.unflatten(1, (-1, GROUP)) * self.scales.float()[..., None]
        if self.minima is not None:
            groups += self.minima.float()[..., None]
        return groups.flatten(1)

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """`change` moves, adds or removes rows of the tensor that it is given."""
        minima = None if self.minima is None else change(self.minima)
        return QuantizedWeight(change(self.values), change(self.scales), minima)


def quantize(weight: torch.Tensor, form: str) -> QuantizedWeight:
    """weight: [n, k], any floating dtype. Multiples of the scale that are nearest to it; the scale is such that the
    largest magnitude of a group, for int4 its extremes, can be had."""
    return stacked(_quantize(rows.float().unflatten(1, (-1, GROUP)), form) for rows in weight.split(_CHUNK_ROWS))


def stacked(weights: Iterable[QuantizedWeight]) -> QuantizedWeight:
    """Rows of all, of one form, one after the other."""
    values, scales, minima = zip(*weights, strict=True)
    return QuantizedWeight(torch.cat(values), torch.cat(scales), None if minima[0] is None else torch.cat(minima))


def _quantize(groups: torch.Tensor, form: str) -> QuantizedWeight:
    """groups: float32 [n, k / GROUP, GROUP]"""
    if form == "int8":
        scales = _float16_scales(groups.abs().amax(2) / 127)
        return QuantizedWeight(_steps(groups, scales).clamp_(-127, 127).to(torch.int8).flatten(1), scales, None)
    minima = groups.amin(2).half()
    scales = _float16_scales((groups.amax(2) - minima) / 15)
    steps = _steps(groups - minima[..., None], scales).clamp_(0, 15)
    return QuantizedWeight(steps.to(torch.uint8).flatten(1), scales, minima)


def _float16_scales(exact: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest float16, or to the next larger one where the nearest is much too small: no multiple of it
    would be near the largest weight of the group. That happens below 2**-14 only, where float16 has a fixed step."""
    nearest = exact.half()
    is_too_small = nearest.float() < exact * (1 - 2**-11)
    return (nearest.view(torch.int16) + is_too_small).view(torch.float16)


def _steps(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    scales = scales.float()[..., None]
    return torch.where(scales > 0, groups / scales, 0).round_()
