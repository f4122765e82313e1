"""The setting `quantization`: its values, the parameters that it quantizes, and their size in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ...srt.errors import ModelNotSupported
from ...srt.model_files.model_config import ModelConfig
from ...srt.model_files.quantization_config import Fp8Config, IntegerConfig, Mxfp4Config, QuantizationConfig
from .. import cpu_extension
from ..device.dtypes import dtype_name
from ..layers.fp8_weight import FP8_FORMS, fp8_bytes
from ..layers.quantized_weight import GROUP, SUPER_BLOCK
from ..models.family import family_of
from ..models.gemma4 import INPUT_TABLE
from ..models.parameter import WHOLE, Parameter, Shard
from ..models.parameters import ROUTER_ENDING, SHARED_GATE_ENDING, is_expert

BITS_PER_WEIGHT = {"int8": 8 + 16 / GROUP, "int4": 4 + 2 * 16 / GROUP}
"""The forms that a CPU rounds weights to, and their bits per weight, with the scale and minimum of a group."""
STORED_BITS_PER_WEIGHT = BITS_PER_WEIGHT | {
    "e2m1": 4 + 16 / GROUP,
    "q4_k": 4 + 2 * 8 / GROUP + 2 * 16 / SUPER_BLOCK,
    "q6_k": 6 + 2 * 8 / GROUP + 16 / SUPER_BLOCK,
    "mixed_k": 6 + 4 * 8 / GROUP + 2 * 16 / SUPER_BLOCK,
    "mixed": 8 + 4 * 32 / GROUP,
}
"""Bits per weight of every form for a CPU, with scales, minima and factors. Only a file gives the other forms."""
FP8 = "fp8"
"""The value for 8-bit floating-point weights, which Triton layers have."""
HEAD_FORM = "int8"
"""The form of the output head for every setting, because its errors go directly into the logits."""


def check_quantization(quantization: str | None, attention_backend: str, device: torch.device) -> None:
    """Check the setting. Raises ValueError for an unknown name, and if this backend has no quantized layers."""
    if quantization is None:
        return
    if quantization not in (*BITS_PER_WEIGHT, FP8):
        raise ValueError(f"quantization must be {', '.join(BITS_PER_WEIGHT)}, {FP8} or none, got {quantization!r}")
    if quantization == FP8:
        if attention_backend != "triton":
            raise ValueError(
                "--quantization fp8 needs the attention backend triton, which a GPU has by default, but the device is "
                f"{device.type} and the attention backend is {attention_backend}. Checkpoints with fp8 weights need no "
                "--quantization; elsewhere their weights are widened to --dtype. A CPU has --quantization int8, with "
                "smaller errors"
            )
        return
    if attention_backend != "cpu":
        raise ValueError(
            f"--quantization {quantization} needs a CPU and the attention backend cpu with the compiled C++ kernels "
            "(pip install --no-build-isolation builds them with a C++ compiler), "
            f"but the device is {device.type} and the attention backend is {attention_backend}"
        )


def check_experts(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise ModelNotSupported for experts that no layers compute with integer weights and this type of activations."""
    if config.experts is not None and config.experts.gate is not None and not cpu_extension.multiplies(dtype):
        raise ModelNotSupported(
            f"--quantization with {dtype_name(dtype)} does not support the clamped gates of the experts of "
            f"{config.architecture}: use --dtype bfloat16"
        )


def quantized_forms(config: ModelConfig, quantization: str | None, shard: Shard = WHOLE) -> dict[str, str]:
    """The form ("int8", "int4" or "fp8") of each parameter that is quantized: all matrices of linear layers.

    Routers stay as they are, because a small error may choose another expert. So do gates of shared experts, which are
    small, and the output head with fp8.

    Raises ValueError if the length of a matrix's rows, or of the part of them that a rank has, is not a multiple of
    GROUP. fp8 has no such limit.
    """
    if quantization is None:
        return {}
    if quantization == FP8:
        return {parameter.name: FP8 for parameter in family_of(config).parameters(config) if is_linear(parameter)}
    forms = {}
    for parameter in family_of(config).parameters(config):
        name, shape = parameter.name, shard.shape(parameter)
        if name == ("embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"):
            forms[name] = HEAD_FORM
        elif is_linear(parameter):
            forms[name] = quantization
        if name in forms and shape[1] % GROUP:
            raise ValueError(
                f"quantization needs rows of a multiple of {GROUP} numbers, but rows of {name} have {shape[1]}"
                f"{f' on each of {shard.size} ranks' if shard.size > 1 else ''}"
            )
    return forms


def is_linear(parameter: Parameter) -> bool:
    """Whether a parameter is the matrix of a linear layer inside the decoder.

    Embeddings, output heads, routers and gates of shared experts are none.
    """
    is_other = parameter.name in ("embed_tokens.weight", "lm_head.weight", INPUT_TABLE) or parameter.name.endswith(
        (ROUTER_ENDING, SHARED_GATE_ENDING)
    )
    return len(parameter.shape) == 2 and not is_other


def is_multiplied(parameter: Parameter, config: ModelConfig) -> bool:
    """Whether a parameter is the matrix of a linear layer or of the output head, and not only a table of vectors."""
    is_embedding = parameter.name == "embed_tokens.weight" and not config.tie_word_embeddings
    is_table = is_embedding or parameter.name == INPUT_TABLE
    return len(parameter.shape) == 2 and not is_table


def fp8_form(config: Fp8Config) -> str:
    """The form of a checkpoint's 8-bit matrices."""
    return "fp8_block" if config.by_block else FP8


def dummy_form(config: QuantizationConfig, parameter: Parameter) -> str | None:
    """The form of a linear layer's matrix that the config describes. None: it is not quantized, or widened."""
    if isinstance(config, Fp8Config):
        return fp8_form(config)
    if isinstance(config, Mxfp4Config):
        return "e2m1" if is_expert(parameter.name) and parameter.shape[1] % GROUP == 0 else None
    return _dummy_integer_form(config, parameter.shape[1])


def _dummy_integer_form(config: IntegerConfig, row_len: int) -> str | None:
    """The form of a matrix of integers whose scales are numbers of float16."""
    whole_groups = row_len % GROUP == 0 and (config.group_size is None or config.group_size % GROUP == 0)
    if config.act_order or not whole_groups:
        return None
    return "int4" if config.bits == 4 else "int8"


def parameter_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    *,
    matrix_bytes: int,
    forms: Mapping[str, str],
) -> dict[str, int]:
    """The size of each parameter in bytes, as layers hold it.

    `dtype_bytes`: bytes of a number of a vector. `matrix_bytes`: bytes of a number of a matrix that is not quantized.
    `forms`: the quantized form of parameters by name.
    """

    has_float32_routers = config.experts is not None and config.experts.float32_router

    def num_bytes(name: str, shape: tuple[int, ...]) -> int:
        form = forms.get(name)
        if form in FP8_FORMS:
            return fp8_bytes(shape, form)
        if form is not None:
            return int(math.prod(shape) * STORED_BITS_PER_WEIGHT[form] / 8)
        if has_float32_routers and name.endswith(ROUTER_ENDING):
            return math.prod(shape) * torch.float32.itemsize
        return math.prod(shape) * (matrix_bytes if len(shape) == 2 else dtype_bytes)

    return {name: num_bytes(name, shape) for name, shape, *_ in family_of(config).parameters(config)}
