"""The Checkpoint of GGUF files: dequantised tensors with Hugging Face's names and order of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch

from ...srt.model_files.gguf_file import GGUFFile, GGUFTensor
from ...srt.model_files.model_config import ModelConfig
from ..layers.quantized_weight import QuantizedWeight
from ..models.parameters import Region

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# ModelConfig.rope has the values of rope_freqs.
_NOT_WEIGHTS = ("rope_freqs.weight",)
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL_NAME = re.compile(r"(\w+)\.(weight|bias)")
# Only llama.cpp's "llama" architecture rotates neighbouring components together, and reorders rows for that.
_PERMUTED_ARCHITECTURES = ("llama",)


_PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


# The gguf package dequantises all types, but with numpy and 16 rows at a time, which takes seconds even for the
# smallest models. So the common types are dequantised here, many blocks at a time, to the same bits. Each function
# takes uint8 [n, bytes of a block] and returns float32 [n, values of a block]. Source of the layouts: ggml-common.h.
_CHUNK = 1024
"""Blocks that are dequantised at once: few enough to stay in the CPU's cache and to need no other torch threads."""


def _scales(blocks: torch.Tensor, count: int) -> torch.Tensor:
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()  # [n, count]


def _halves(blocks: torch.Tensor, index: int) -> torch.Tensor:
    """The float16 value number `index` of each block."""
    return blocks[..., 2 * index : 2 * index + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8) * _scales(blocks, 1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _scales(blocks, 1)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scales = _scales(blocks, 2)
    return _nibbles(blocks[:, 4:]) * scales[:, :1] + scales[:, 1:]


_FAST = {
    gguf.GGMLQuantizationType.Q8_0: _q8_0,
    gguf.GGMLQuantizationType.Q4_0: _q4_0,
    gguf.GGMLQuantizationType.Q4_1: _q4_1,
}


def _values_of_5_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Values of 5 bits of a block, int8: 4 bytes with the highest bit of each, and 16 with the other bits of two."""
    bits = high[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (_nibbles(low) | bits.flatten(-2) << 4).view(torch.int8)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and minima of a row. A block begins with two float16, then has 6 bits of 8 scales and 8 minima."""
    low, high, rest = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, rest & 15 | low >> 2 & 48), -1) * _halves(blocks, 0).float()[..., None]
    minima = torch.cat((high & 63, rest >> 4 | high >> 2 & 48), -1) * -_halves(blocks, 1).float()[..., None]
    return scales.flatten(1), minima.flatten(1)


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: as `_k_scales`, then 4 times 32 bytes with two values each."""
    return QuantizedWeight(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: as `_k_scales`, then 32 bytes with the highest bits of 8 values each, then as in `_q4_k`."""
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return QuantizedWeight((low | high << 4).view(torch.int8).flatten(1), *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    """A block: the lower 4 bits of 256 values, their upper 2 bits, 16 scales of 8 bits, a float16."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    values = (low | (upper & 3) << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _halves(blocks, 104).float()[..., None]
    return QuantizedWeight(values.flatten(1), scales.flatten(1), None)


def _mixed_k(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers in the form "mixed_k"."""
    values, scales, minima = weight
    if minima is None:
        return QuantizedWeight(values, scales, torch.zeros_like(scales))
    return QuantizedWeight(values.view(torch.int8), scales.repeat_interleave(2, 1), minima.repeat_interleave(2, 1))


# Conversions from a GGML type to a form of quantization.py that holds the same values. The argument is the blocks of a
# tensor: uint8 [n, blocks of a row, bytes of a block].
_FORMS: dict[tuple[gguf.GGMLQuantizationType, str], Callable[[torch.Tensor], QuantizedWeight]] = {
    (gguf.GGMLQuantizationType.Q8_0, "int8"): lambda blocks: QuantizedWeight(
        blocks[..., 2:].flatten(1).view(torch.int8), _halves(blocks, 0), None
    ),
    (gguf.GGMLQuantizationType.Q4_0, "int8"): lambda blocks: QuantizedWeight(
        _nibbles(blocks[..., 2:]).flatten(1).view(torch.int8) - 8, _halves(blocks, 0), None
    ),
    (gguf.GGMLQuantizationType.Q5_0, "int8"): lambda blocks: QuantizedWeight(
        _values_of_5_bits(blocks[..., 2:6], blocks[..., 6:]).flatten(1) - 16, _halves(blocks, 0), None
    ),
    (gguf.GGMLQuantizationType.Q4_0, "int4"): lambda blocks: QuantizedWeight(
        _nibbles(blocks[..., 2:]).flatten(1), _halves(blocks, 0), _halves(blocks, 0) * -8
    ),
    (gguf.GGMLQuantizationType.Q4_1, "int4"): lambda blocks: QuantizedWeight(
        _nibbles(blocks[..., 4:]).flatten(1), _halves(blocks, 0), _halves(blocks, 1)
    ),
    (gguf.GGMLQuantizationType.Q4_K, "q4_k"): _q4_k,
    (gguf.GGMLQuantizationType.Q6_K, "q6_k"): _q6_k,
    (gguf.GGMLQuantizationType.Q5_1, "mixed_k"): lambda blocks: _mixed_k(
        QuantizedWeight(
            _values_of_5_bits(blocks[..., 4:8], blocks[..., 8:]).flatten(1),
            _halves(blocks, 0).float(),
            _halves(blocks, 1).float(),
        )
    ),
    (gguf.GGMLQuantizationType.Q4_K, "mixed_k"): lambda blocks: _mixed_k(_q4_k(blocks)),
    (gguf.GGMLQuantizationType.Q5_K, "mixed_k"): lambda blocks: _mixed_k(_q5_k(blocks)),
    (gguf.GGMLQuantizationType.Q6_K, "mixed_k"): lambda blocks: _mixed_k(_q6_k(blocks)),
}


class GGUFCheckpoint:
    """A Checkpoint of a GGUF file. Raises ValueError for a tensor that cannot be dequantised."""

    def __init__(self, config: ModelConfig) -> None:
        self._file = GGUFFile(config.model_path)
        self._tensors = {_hf_name(t.name): t for t in self._file.tensors if t.name not in _NOT_WEIGHTS}
        self.names = frozenset(self._tensors)
        permuted = self._file.metadata["general.architecture"] in _PERMUTED_ARCHITECTURES
        self._permuted_heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads} if permuted else {}

    def dtype(self, name: str) -> torch.dtype | None:
        return {int(kind): dtype for kind, dtype in _PLAIN.items()}.get(self._tensors[name].type)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        """The tensor called `name`, or a region of it, as float32, float16 or bfloat16.

        The region of a permuted projection consists of whole heads.
        """
        info = self._tensors[name]
        if len(info.shape) != 2:
            whole = self._in_order(name)(_dequantize(info.name, self._blocks(info), info.shape))
            return whole if region is None else whole[region]
        rows, columns = region or _all_of(info.shape)
        blocks, within = self._blocks(info).cut(info.shape, rows, columns)
        num_rows = rows.stop - rows.start
        found = _dequantize(info.name, blocks, (num_rows, blocks.num_values // num_rows))[:, within]
        return self._in_order(name)(found)

    def has_form(self, name: str, form: str) -> bool:
        info = self._tensors[name]
        return (info.type, form) in _FORMS and len(info.shape) == 2

    def quantized(self, name: str, form: str, region: Region | None = None) -> QuantizedWeight | None:
        """The tensor, or a region of it, in `form`, with exactly the file's values. None if that is not possible.

        The region consists of whole groups and, of a permuted projection, of whole heads.
        """
        info = self._tensors[name]
        blocks = self._blocks(info)
        if not self.has_form(name, form):
            return None
        make = _FORMS[blocks.kind, form]
        rows, columns = region or _all_of(info.shape)
        blocks, within = blocks.cut(info.shape, rows, columns)
        raw = torch.from_numpy(blocks.raw.copy()).view(rows.stop - rows.start, -1, blocks.raw.shape[1])
        return make(raw).with_columns(within).with_rows(self._in_order(name))

    def _in_order(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that reorders the rows of whole heads from the file's order to Hugging Face's."""
        for projection, num_heads in self._permuted_heads.items():
            if projection in name:
                return partial(unpermute, head_dim=self._tensors[name].shape[0] // num_heads)
        return lambda tensor: tensor

    def _blocks(self, info: GGUFTensor) -> _Blocks:
        """The mapped blocks of a tensor."""
        try:
            kind = gguf.GGMLQuantizationType(info.type)
            block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ValueError(f"tensor {info.name!r} has the unknown GGML type {info.type}") from None
        if info.shape[-1] % block_len:
            raise ValueError(
                f"tensor {info.name!r} has rows of {info.shape[-1]}; {kind.name} needs a multiple of {block_len}"
            )
        raw = self._file.tensor_bytes(info, math.prod(info.shape) // block_len * block_bytes)
        return _Blocks(kind, block_len, raw.reshape(-1, block_bytes))


def _all_of(shape: tuple[int, ...]) -> Region:
    return tuple(slice(0, length) for length in shape)


class _Blocks(NamedTuple):
    """Blocks of a tensor, in row-major order."""

    kind: gguf.GGMLQuantizationType
    length: int
    """number of values in a block"""
    raw: npt.NDArray[np.uint8]
    """[blocks, bytes of a block]"""

    @property
    def num_values(self) -> int:
        return len(self.raw) * self.length

    def cut(self, shape: tuple[int, ...], rows: slice, columns: slice) -> tuple[_Blocks, slice]:
        """The blocks that contain a region of a matrix, and the place of the region in the columns of these blocks."""
        first, last = columns.start // self.length, -(-columns.stop // self.length)
        begin = first * self.length
        raw = self.raw.reshape(shape[0], -1, self.raw.shape[1])[rows, first:last].reshape(-1, self.raw.shape[1])
        return self._replace(raw=raw), slice(columns.start - begin, columns.stop - begin)


def _dequantize(name: str, blocks: _Blocks, shape: tuple[int, ...]) -> torch.Tensor:
    """Dequantise blocks to a tensor of `shape`. `name`: the tensor in the file."""
    kind, block_len, raw = blocks
    if kind in _PLAIN:
        # A copy, because the mapping is read-only and torch has no read-only tensors.
        return torch.from_numpy(raw.copy()).view(_PLAIN[kind]).view(shape)
    if kind in _FAST:
        out = torch.empty(len(raw), block_len)
        for start in range(0, len(raw), _CHUNK):
            out[start : start + _CHUNK] = _FAST[kind](torch.from_numpy(raw[start : start + _CHUNK].copy()))
        return out.view(shape)
    try:
        values = gguf.dequantize(raw.reshape(math.prod(shape[:-1]), -1), kind)
    except NotImplementedError:
        raise ValueError(f"tensor {name!r} is quantised as {kind.name}, which Tercet cannot dequantise") from None
    return torch.from_numpy(values).view(shape)


def unpermute(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head from llama.cpp's order (0, n/2, 1, n/2 + 1, ...) to (0, 1, ..., n - 1)."""
    pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor. An unknown name is returned unchanged, and later reported as unexpected."""
    if match := _BLOCK_NAME.fullmatch(name):
        block, stem, kind = match.groups()
        return f"model.layers.{block}.{_NAMES[stem]}.{kind}" if stem in _NAMES else name
    if match := _GLOBAL_NAME.fullmatch(name):
        stem, kind = match.groups()
        return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name
    return name
