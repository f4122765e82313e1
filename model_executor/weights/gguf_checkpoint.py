"""The Checkpoint of GGUF files: dequantised tensors with Hugging Face's names and order of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

import gguf
import numpy as np
import numpy.typing as npt
import torch

from ...srt.model_files.gguf_file import GGUFFile, GGUFTensor
from ...srt.model_files.model_config import ModelConfig
from ..layers.quantized_weight import QuantizedWeight

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


# Conversions from a GGML type to a form of quantization.py that holds the same values. The argument is the blocks of a
# tensor: uint8 [n, k / 32, bytes of a block].
_FORMS: dict[tuple[gguf.GGMLQuantizationType, str], Callable[[torch.Tensor], QuantizedWeight]] = {
    (gguf.GGMLQuantizationType.Q8_0, "int8"): lambda blocks: QuantizedWeight(
        blocks[..., 2:].flatten(1).view(torch.int8), _halves(blocks, 0), None
    ),
    (gguf.GGMLQuantizationType.Q4_0, "int8"): lambda blocks: QuantizedWeight(
        _nibbles(blocks[..., 2:]).flatten(1).view(torch.int8) - 8, _halves(blocks, 0), None
    ),
    (gguf.GGMLQuantizationType.Q4_0, "int4"): lambda blocks: QuantizedWeight(
        _nibbles(blocks[..., 2:]).flatten(1), _halves(blocks, 0), _halves(blocks, 0) * -8
    ),
    (gguf.GGMLQuantizationType.Q4_1, "int4"): lambda blocks: QuantizedWeight(
        _nibbles(blocks[..., 4:]).flatten(1), _halves(blocks, 0), _halves(blocks, 1)
    ),
}


class GGUFCheckpoint:
    """A Checkpoint of a GGUF file. Raises ValueError for a tensor that cannot be dequantised."""

    def __init__(self, config: ModelConfig) -> None:
        self._file = GGUFFile(config.model_path)
        self._tensors = {_hf_name(t.name): t for t in self._file.tensors if t.name not in _NOT_WEIGHTS}
        self.names = frozenset(self._tensors)
        permuted = self._file.metadata["general.architecture"] in _PERMUTED_ARCHITECTURES
        self._permuted_heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads} if permuted else {}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor called `name`, as float32, float16 or bfloat16."""
        return self._in_order(name)(self._dequantize(self._tensors[name]))

    def quantized(self, name: str, form: str) -> QuantizedWeight | None:
        """The tensor in `form`, with exactly the file's values. None if its type cannot be converted exactly."""
        info = self._tensors[name]
        kind, _, raw = self._blocks(info)
        make = _FORMS.get((kind, form))
        if make is None or len(info.shape) != 2:
            return None
        return make(torch.from_numpy(raw.copy()).view(*info.shape[:1], -1, raw.shape[1])).with_rows(
            self._in_order(name)
        )

    def _in_order(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that reorders the rows of a tensor from the file's order to Hugging Face's."""
        for projection, num_heads in self._permuted_heads.items():
            if projection in name:
                rows = self._tensors[name].shape[0]
                if rows % (2 * num_heads):
                    raise ValueError(f"tensor {name!r} must have pairs of rows for {num_heads} heads, got {rows} rows")
                return partial(unpermute, num_heads=num_heads)
        return lambda tensor: tensor

    def _blocks(self, info: GGUFTensor) -> tuple[gguf.GGMLQuantizationType, int, npt.NDArray[np.uint8]]:
        """The tensor's type, the number of values in a block, and the mapped blocks: uint8 [blocks, block bytes]."""
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
        return kind, block_len, raw.reshape(-1, block_bytes)

    def _dequantize(self, info: GGUFTensor) -> torch.Tensor:
        kind, block_len, blocks = self._blocks(info)
        if kind in _PLAIN:
            # A copy, because the mapping is read-only and torch has no read-only tensors.
            return torch.from_numpy(blocks.copy()).view(_PLAIN[kind]).view(info.shape)
        if kind in _FAST:
            out = torch.empty(len(blocks), block_len)
            for start in range(0, len(blocks), _CHUNK):
                out[start : start + _CHUNK] = _FAST[kind](torch.from_numpy(blocks[start : start + _CHUNK].copy()))
            return out.view(info.shape)
        try:
            values = gguf.dequantize(blocks.reshape(math.prod(info.shape[:-1]), -1), kind)
        except NotImplementedError:
            raise ValueError(
                f"tensor {info.name!r} is quantised as {kind.name}, which Tercet cannot dequantise"
            ) from None
        return torch.from_numpy(values).view(info.shape)


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head from llama.cpp's order (0, n/2, 1, n/2 + 1, ...) to (0, 1, ..., n - 1)."""
    pairs = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
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
