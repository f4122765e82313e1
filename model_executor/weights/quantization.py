"""The setting `quantization`: its values, the parameters that it quantizes, and their size in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ...srt.model_files.model_config import ModelConfig
from ..layers.quantized_weight import GROUP
from ..models.family import family_of
from ..models.parameters import WHOLE, Shard

BITS_PER_WEIGHT = {"int8": 8 + 16 / GROUP, "int4": 4 + 2 * 16 / GROUP}
"""Bits per weight, including the float16 scale and minimum of its group."""
HEAD_FORM = "int8"
"""The form of the output head for every setting, because its errors go directly into the logits."""


def check_quantization(quantization: str | None, attention_backend: str, device: torch.device) -> None:
    """Check the setting. Raises ValueError for an unknown name, and if this backend has no quantized layers."""
    if quantization is None:
        return
    if quantization not in BITS_PER_WEIGHT:
        raise ValueError(f"quantization must be {', '.join(BITS_PER_WEIGHT)} or none, got {quantization!r}")
    if attention_backend != "cpu":
        raise ValueError(
            f"--quantization {quantization} needs a CPU and the attention backend cpu with the compiled C++ kernels "
            "(pip install --no-build-isolation builds them with a C++ compiler), "
            f"but the device is {device.type} and the attention backend is {attention_backend}"
        )


def quantized_forms(config: ModelConfig, quantization: str | None, shard: Shard = WHOLE) -> dict[str, str]:
    """The form ("int8" or "int4") of each parameter that is quantized: all matrices of linear layers.

    Raises ValueError if the length of a matrix's rows, or of the part of them that a rank has, is not a multiple of
    GROUP.
    """
    if quantization is None:
        return {}
    forms = {}
    for parameter in family_of(config).parameters(config):
        name, shape = parameter.name, shard.shape(parameter)
        if name == ("embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"):
            forms[name] = HEAD_FORM
        elif len(shape) == 2 and name != "embed_tokens.weight":
            forms[name] = quantization
        if name in forms and shape[1] % GROUP:
            raise ValueError(
                f"quantization needs rows of a multiple of {GROUP} numbers, but rows of {name} have {shape[1]}"
                f"{f' on each of {shard.size} ranks' if shard.size > 1 else ''}"
            )
    return forms


def parameter_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    quantization: str | None = None,
    *,
    matrix_bytes: int | None = None,
    forms: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """The size of each parameter in bytes, as layers hold it.

    `dtype_bytes`: bytes of an unquantized value. `matrix_bytes`: those of matrices, if they differ. `forms`: the
    quantized form of parameters by name, by default the `quantized_forms` of `quantization`.
    """
    if forms is None:
        forms = quantized_forms(config, quantization)

    def bytes_per_value(name: str, shape: tuple[int, ...]) -> float:
        if name in forms:
            return BITS_PER_WEIGHT[forms[name]] / 8
        return (matrix_bytes or dtype_bytes) if len(shape) == 2 else dtype_bytes

    return {
        name: int(math.prod(shape) * bytes_per_value(name, shape))
        for name, shape, *_ in family_of(config).parameters(config)
    }
