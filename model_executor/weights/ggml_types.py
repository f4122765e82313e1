"""GGML's block types: conversions to the forms of quantized weights and to float32, on any device.

The gguf package knows all types, but uses numpy on one thread. So the common types are converted here, to the same
bits. Source of the layouts: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ..layers.quantized_weight import E2M1_VALUES, GROUP, QuantizedWeight
from . import mxfp4

Kind = gguf.GGMLQuantizationType

PLAIN: dict[int, torch.dtype] = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
"""The types that torch has."""
_VALUES_AT_ONCE_ON_A_CPU, _VALUES_AT_ONCE_ON_A_GPU = 1 << 18, 1 << 24
"""Values that are dequantised at once: on a CPU few enough for its caches, on a GPU enough to keep it busy."""
_IQ4_VALUES = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
"""What the 4 bits of IQ4_NL and IQ4_XS stand for."""


class Blocks(NamedTuple):
    """The blocks of a matrix."""

    kind: Kind
    raw: npt.NDArray[np.uint8]
    """[rows, blocks of a row, bytes of a block]"""


def needs_a_cpu(kind: int) -> bool:
    """Whether values of the GGML type `kind` are dequantised by a CPU, whatever the device is."""
    return kind not in PLAIN and kind not in _TYPES


def has_form(kind: int, form: str) -> bool:
    """Whether weights of the GGML type `kind` can be converted to `form` with exactly the same values.

    Those of MXFP4 have the forms of mxfp4.py only if float16 has their scales.
    """
    if kind not in _TYPES:
        return False
    if form == "mixed_k":
        return kind in _K_TYPES
    return form in ("mixed", _TYPES[kind].form) or (kind, form) in _OTHER_FORMS


def quantized(blocks: Blocks, form: str) -> QuantizedWeight | None:
    """Convert blocks to a form that their type has (`has_form`). None: float16 lacks a scale of MXFP4."""
    kind, raw = blocks
    convert = _OTHER_FORMS.get((kind, form), _TYPES[kind].convert)
    copied = torch.from_numpy(raw.copy())  # because the file's mapping is read-only
    if kind == Kind.MXFP4 and form in mxfp4.FORMS and not mxfp4.has_forms(copied[..., 1:], copied[..., 0]):
        return None
    weight = convert(copied)
    if form == "mixed_k":
        return _mixed_k(weight)
    return _mixed(weight) if form == "mixed" else weight


def dequantized(blocks: Blocks, device: torch.device) -> torch.Tensor:
    """The values of blocks: [rows, values of a row] on `device`, in float32 or the plain type of the blocks.

    Raises NotImplementedError for a type that the gguf package cannot dequantise.
    """
    kind, raw = blocks
    if kind in PLAIN:
        return torch.from_numpy(raw.copy()).to(device).view(PLAIN[kind]).flatten(1)
    if needs_a_cpu(kind):
        return torch.from_numpy(gguf.dequantize(raw.reshape(len(raw), -1), kind)).to(device)
    row_len = raw.shape[1] * gguf.GGML_QUANT_SIZES[kind][0]
    out = torch.empty(len(raw), row_len, device=device)
    at_once = _VALUES_AT_ONCE_ON_A_CPU if device.type == "cpu" else _VALUES_AT_ONCE_ON_A_GPU
    step = max(at_once // max(row_len, 1), 1)
    convert = _TYPES[kind].convert
    for first in range(0, len(raw), step):
        part = torch.from_numpy(raw[first : first + step].copy()).to(device)
        out[first : first + step] = convert(part).dequantize()
    return out


_Conversion = Callable[[torch.Tensor], QuantizedWeight]
"""A conversion of blocks: uint8 [rows, blocks of a row, bytes of a block]."""


def _half(blocks: torch.Tensor, index: int) -> torch.Tensor:
    """The float16 number `index` of each block."""
    return blocks[..., 2 * index : 2 * index + 2].contiguous().view(torch.float16).squeeze(-1)


def _bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The numbers of `width` bits in bytes [..., n], the lowest bits first: [..., 8 / width, n]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return packed[..., None, :] >> shifts[:, None] & (1 << width) - 1


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


def _values_of_nibbles(table: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    places = _nibbles(packed)
    # Indexing by brackets would convert the places to 64 bits.
    return table.to(packed.device).index_select(0, places.flatten().int()).view(places.shape)


def _values_of_5_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Values of 5 bits of a block, int8: 4 bytes with the highest bit of each, and 16 with the other bits of two."""
    return (_nibbles(low) | _bits(high, 1).mT.flatten(-2) << 4).view(torch.int8)


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: a float16 scale, then 32 values."""
    return QuantizedWeight(blocks[..., 2:].flatten(1).view(torch.int8), _half(blocks, 0), None)


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: a float16 scale, then 16 bytes with two values each."""
    return QuantizedWeight(_nibbles(blocks[..., 2:]).flatten(1).view(torch.int8) - 8, _half(blocks, 0), None)


def _q4_0_of_4_bits(blocks: torch.Tensor) -> QuantizedWeight:
    """The same with minima. Scales from 8,192 on would give infinite minima; those of models are far smaller."""
    return QuantizedWeight(_nibbles(blocks[..., 2:]).flatten(1), _half(blocks, 0), _half(blocks, 0) * -8)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: a float16 scale, a float16 minimum, then as in `_q4_0`."""
    return QuantizedWeight(_nibbles(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 1))


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: a float16 scale, then as `_values_of_5_bits`."""
    values = _values_of_5_bits(blocks[..., 2:6], blocks[..., 6:])
    return QuantizedWeight(values.flatten(1) - 16, _half(blocks, 0), None)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: a float16 scale, a float16 minimum, then as `_values_of_5_bits`."""
    values = _values_of_5_bits(blocks[..., 4:8], blocks[..., 8:])
    return QuantizedWeight(values.flatten(1), _half(blocks, 0), _half(blocks, 1))


def _iq4_nl(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: as in `_q4_0`, but the 4 bits stand for `_IQ4_VALUES`."""
    return QuantizedWeight(_values_of_nibbles(_IQ4_VALUES, blocks[..., 2:]).flatten(1), _half(blocks, 0), None)


def _iq4_xs(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: a float16, the upper 2 bits of 8 scales, their lower 4 bits, then 8 times the values of `_iq4_nl`."""
    scales = _bits(blocks[..., 4:8], 4).mT.flatten(-2) | _bits(blocks[..., 2:4], 2).mT.flatten(-2) << 4
    values = _values_of_nibbles(_IQ4_VALUES, blocks[..., 8:].unflatten(-1, (8, 16)))
    float_scales = (scales.view(torch.int8) - 32) * _half(blocks, 0).float()[..., None]
    return QuantizedWeight(values.flatten(1), float_scales.flatten(1), None)


def _mxfp4(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: the exponent of a scale, then as in `_q4_0`, but the 4 bits are a number of e2m1."""
    return QuantizedWeight(_values_of_nibbles(E2M1_VALUES, blocks[..., 1:]).flatten(1), _mxfp4_scales(blocks), None)


def _mxfp4_of_8_bits(blocks: torch.Tensor) -> QuantizedWeight:
    """The same with scales of float16."""
    weight = _mxfp4(blocks)
    return weight._replace(scales=mxfp4.float16_scales(weight.scales))


def _mxfp4_of_4_bits(blocks: torch.Tensor) -> QuantizedWeight:
    """The same with the 4 bits instead of the values."""
    return QuantizedWeight(_nibbles(blocks[..., 1:]).flatten(1), mxfp4.float16_scales(_mxfp4_scales(blocks)), None)


def _mxfp4_scales(blocks: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 128) of each block: float32, which is subnormal for the first two exponents."""
    exponents = blocks[..., 0].int()
    return torch.where(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23).view(torch.float32)


def _q2_k(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: 16 bytes with a scale and a minimum each, 64 with four values each, float16 for scales and minima."""
    scales, minima = _bits(blocks[..., :16], 4).unbind(-2)
    values = _bits(blocks[..., 16:80].unflatten(-1, (2, 32)), 2)
    return _k_weight(values.view(torch.int8), scales, minima, _half(blocks, 40), -_half(blocks, 41))


def _q3_k(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: 32 bytes with the highest bits of 8 values each, 64 with the lower bits of 4, 16 scales of 6 bits, a
    float16.
    """
    values = _bits(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3, -2) | _bits(blocks[..., :32], 1) << 2
    scales = _nibbles(blocks[..., 96:104]) | _bits(blocks[..., 104:108], 2).flatten(-2) << 4
    return _k_weight(values.view(torch.int8) - 4, scales.view(torch.int8) - 32, None, _half(blocks, 54))


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: as `_with_scales`, then 4 times 32 bytes with two values each."""
    return _with_scales(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), blocks)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: as `_with_scales`, then 32 bytes with the highest bits of 8 values each, then as in `_q4_k`."""
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return _with_scales((low | _bits(blocks[..., 16:48], 1) << 4).view(torch.int8), blocks)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: the lower 4 bits of 256 values, their upper 2 bits, 16 scales of 8 bits, a float16."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    values = low | _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2) << 4
    return _k_weight(values.view(torch.int8) - 32, blocks[..., 192:208], None, _half(blocks, 104))


def _with_scales(values: torch.Tensor, blocks: torch.Tensor) -> QuantizedWeight:
    """Values of blocks that begin with two float16, then 8 scales and 8 minima of 6 bits each."""
    low, high, rest = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, rest & 15 | low >> 2 & 48), -1)
    minima = torch.cat((high & 63, rest >> 4 | high >> 2 & 48), -1)
    return _k_weight(values, scales, minima, _half(blocks, 0), -_half(blocks, 1))


def _k_weight(
    values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, *factors: torch.Tensor
) -> QuantizedWeight:
    """A weight of a K type. All arguments begin with the dimensions [rows, blocks of a row]."""

    def integers(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.int8).flatten(1)

    return QuantizedWeight(
        values.flatten(1), integers(scales), None if minima is None else integers(minima), torch.stack(factors, -1)
    )


def _half_groups(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The scales or minima of a weight, for half groups."""
    return x.repeat_interleave(weight.shape[1] // (GROUP // 2) // x.shape[1], 1)


def _mixed_k(weight: QuantizedWeight) -> QuantizedWeight:
    """The numbers of a K type in the form "mixed_k"."""
    assert weight.factors is not None
    scales = _half_groups(weight.scales, weight)
    if weight.minima is None:
        minima, factors = torch.zeros_like(scales), F.pad(weight.factors, (0, 1))
    else:
        minima, factors = _half_groups(weight.minima, weight), weight.factors
    return QuantizedWeight(weight.values.view(torch.int8), scales, minima, factors)


def _mixed(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers in the form "mixed"."""
    scales, minima = (x if x is None else _half_groups(x, weight) for x in weight.float_scales())
    assert scales is not None
    return QuantizedWeight(
        weight.values.view(torch.int8), scales, torch.zeros_like(scales) if minima is None else minima
    )


class _Type(NamedTuple):
    convert: _Conversion
    form: str
    """A form of quantization.py that has the values of the type. `_OTHER_FORMS` may name another one."""


_TYPES: dict[int, _Type] = {
    Kind.Q8_0: _Type(_q8_0, "int8"),
    Kind.Q4_0: _Type(_q4_0, "int8"),
    Kind.Q4_1: _Type(_q4_1, "int4"),
    Kind.Q5_0: _Type(_q5_0, "int8"),
    Kind.Q5_1: _Type(_q5_1, "mixed"),
    Kind.IQ4_NL: _Type(_iq4_nl, "int8"),
    Kind.IQ4_XS: _Type(_iq4_xs, "mixed"),
    Kind.MXFP4: _Type(_mxfp4, "mixed"),
    Kind.Q2_K: _Type(_q2_k, "mixed_k"),
    Kind.Q3_K: _Type(_q3_k, "q6_k"),
    Kind.Q4_K: _Type(_q4_k, "q4_k"),
    Kind.Q5_K: _Type(_q5_k, "mixed_k"),
    Kind.Q6_K: _Type(_q6_k, "q6_k"),
}
"""The form "mixed" has the values of all these types. A conversion may return fewer scales than that form has."""
_K_TYPES = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
"""The types whose values "mixed_k" has."""
_OTHER_FORMS: dict[tuple[int, str], _Conversion] = {
    (Kind.Q4_0, "int4"): _q4_0_of_4_bits,
    (Kind.MXFP4, "e2m1"): _mxfp4_of_4_bits,
    (Kind.MXFP4, "int8"): _mxfp4_of_8_bits,
}
