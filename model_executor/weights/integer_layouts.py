"""How files store matrices of 4-bit or 8-bit integers: the names, shapes and order of their tensors.

In every layout a matrix [n, k] is (values - zero points) * scales. Sources of the layouts: AutoGPTQ and GPTQModel for
"gptq", AutoAWQ for "awq", compressed-tensors for "pack-quantized" and "int-quantized".
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...srt.model_files.quantization_config import LayoutName
from ..models.parameter import Region

_WORD_BITS = 32
_CHUNK_VALUES = 1 << 22
"""Values that are dequantized at once. The intermediate tensors take several times their memory."""


class Layout(NamedTuple):
    """The tensors of a matrix [n, k] whose rows have scales for G groups of columns.

    Integers are packed into words of int32 along one dimension. The lowest bits of a word are its first integer.
    """

    values: str
    """the end of the name of the integers; the other names have the ends below"""
    scales: str
    zeros: str
    group_index: str
    """of the group of each column: a tensor that not every file has"""
    is_transposed: bool
    """whether matrices are stored as [k, n] and [G, n]; else as [n, k] and [n, G]"""
    packed_dims: tuple[int, int] | None
    """the stored dimensions along which values and zero points are packed; None: they are int8, and not packed"""
    order: tuple[int, ...] | None = None
    """the places in a word of its integers 0, 1, 2, ...; None: the same numbers"""
    zero_offset: int = 0
    """what is added to the stored zero points"""

    @property
    def integer_type(self) -> torch.dtype:
        """The type of the tensors of values and zero points."""
        return torch.int8 if self.packed_dims is None else torch.int32

    def stored_shape(self, shape: tuple[int, int], bits: int, packed_dim: int | None) -> tuple[int, int]:
        """The shape that a tensor of [n, k] or [n, G] has in the file. `packed_dim`: of `packed_dims`, if packed."""
        dims = list(reversed(shape)) if self.is_transposed else list(shape)
        if packed_dim is not None:
            dims[packed_dim] = -(-dims[packed_dim] * bits // _WORD_BITS)
        return dims[0], dims[1]

    def matrix_shape(self, stored: tuple[int, ...], bits: int) -> tuple[int, int]:
        """[n, k] of a tensor of values. A last word that is incomplete counts as complete."""
        dims = list(stored)
        if self.packed_dims is not None:
            dims[self.packed_dims[0]] *= _WORD_BITS // bits
        return (dims[1], dims[0]) if self.is_transposed else (dims[0], dims[1])

    def values_of(self, stored: torch.Tensor, bits: int, region: Region) -> torch.Tensor:
        """Values, unsigned: uint8, of a region of [n, k]."""
        return self._unpacked(stored, bits, None if self.packed_dims is None else self.packed_dims[0], region)

    def zeros_of(self, stored: torch.Tensor, bits: int, region: Region) -> torch.Tensor:
        """Zero points of unsigned values: int16, of a region of [n, G]."""
        # GPTQModel subtracts the offset from whole words: a 0 borrows from the next integer. So it is added to words.
        offset = sum(self.zero_offset << shift for shift in range(0, _WORD_BITS, bits))
        stored = stored + offset if offset else stored
        packed_dim = None if self.packed_dims is None else self.packed_dims[1]
        return self._unpacked(stored, bits, packed_dim, region).short()

    def scales_of(self, stored: torch.Tensor, region: Region) -> torch.Tensor:
        """Scales of a region of [n, G]."""
        return (stored.t() if self.is_transposed else stored)[region]

    def _unpacked(self, stored: torch.Tensor, bits: int, packed_dim: int | None, region: Region) -> torch.Tensor:
        wanted = list(reversed(region)) if self.is_transposed else list(region)
        if packed_dim is None:
            return stored[tuple(wanted)].contiguous().view(torch.uint8) ^ 128
        per_word, part = _WORD_BITS // bits, wanted[packed_dim]
        words = list(wanted)
        words[packed_dim] = slice(part.start // per_word, -(-part.stop // per_word))
        wanted = [slice(None), slice(None)]
        wanted[packed_dim] = slice(part.start % per_word, part.start % per_word + part.stop - part.start)
        integers = _integers(stored[tuple(words)], bits)
        if self.order is not None:
            integers = integers[..., self.order]
        unpacked = integers.flatten(1) if packed_dim else integers.transpose(1, 2).flatten(0, 1)
        cut = unpacked[tuple(wanted)]
        return (cut.t() if self.is_transposed else cut).contiguous()


def _integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers of words, the lowest bits first: int32 [a, b] -> uint8 [a, b, integers of a word]."""
    as_bytes = words.contiguous()[..., None].view(torch.uint8)
    return as_bytes if bits == 8 else torch.stack((as_bytes & 15, as_bytes >> 4), -1).flatten(-2)


_COMPRESSED = (".weight_scale", ".weight_zero_point", ".weight_g_idx")
_GPTQ = Layout(".qweight", ".scales", ".qzeros", ".g_idx", True, (0, 1))
LAYOUTS: dict[LayoutName, Layout] = {
    "gptq": _GPTQ._replace(zero_offset=1),
    "gptq_v2": _GPTQ,
    "awq": _GPTQ._replace(packed_dims=(1, 1), order=(0, 4, 1, 5, 2, 6, 3, 7)),
    "pack-quantized": Layout(".weight_packed", *_COMPRESSED, False, (1, 0)),
    "int-quantized": Layout(".weight", *_COMPRESSED, False, None),
}
WEIGHT_SHAPE = ".weight_shape"
"""The end of the name of [n, k] in "pack-quantized", where the last word of a row may be incomplete."""


class Integers(NamedTuple):
    """A matrix [n, k] of (values - zeros) * scales. `width` columns in succession share a scale and a zero point."""

    values: torch.Tensor
    """uint8 [n, k]"""
    scales: torch.Tensor
    """of a floating type [n, k / width]"""
    zeros: torch.Tensor
    """int16 [n, k / width]"""

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32 [n, k]."""
        n, k = self.values.shape
        made = torch.empty(n, k, device=self.values.device)
        step = max(_CHUNK_VALUES // max(k, 1), 1)
        for first in range(0, n, step):
            values, scales, zeros = (x[first : first + step] for x in self)
            groups = values.unflatten(1, (scales.shape[1], -1)) - zeros[..., None]
            made[first : first + step] = (groups * scales.float()[..., None]).flatten(1)
        return made
