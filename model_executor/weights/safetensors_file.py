"""A safetensors file whose tensors are mapped one by one, so that a tensor without references takes no memory."""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...srt.model_files.files import open_file
from ...srt.model_files.settings import quote

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_MAX_DIMS = 64
"""of a tensor of torch"""
DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class SafetensorsFile(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, by name.

    A matrix is a view of the mapped file, whose pages are read on first access. A vector is a copy, because it is
    smaller than a page. Writing to a tensor does not change the file. If another program changes the file in place,
    matrices in use change, or the process is killed; replacing the file is safe.

    Raises ValueError if the path is not a regular file, if the file is not valid safetensors or is truncated, and for a
    tensor of an unknown type. Raises OSError if the file cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = open_file(self.path)  # stays open, because tensors are mapped later
        try:
            # Another program may have replaced the file at the path.
            with safe_open(f"/proc/self/fd/{self._file.fileno()}", framework="numpy"):
                pass  # this checks the header
        except SafetensorError as error:
            raise ValueError(f"{self.path!r} is not a valid safetensors file: {error}") from None
        length = self._file.read(8)
        self.header = length + self._file.read(int.from_bytes(length, "little"))
        """the bytes of the file before the data"""
        self._entries: dict[str, dict[str, Any]] = json.loads(self.header[8:])
        self._entries.pop("__metadata__", None)
        for name in self._entries:
            shape = self.shape(name)
            # The library allows any length beside a length of 0.
            if len(shape) > _MAX_DIMS or math.prod(max(length, 1) for length in shape) >= 2**63:
                raise ValueError(f"{self.path!r}: tensor {name!r} has shape {quote(shape)}, which torch does not allow")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor. Raises ValueError for a type that is not supported."""
        stored = self._entries[name]["dtype"]
        if stored not in _TYPES:
            raise ValueError(f"tensor {name!r} has dtype {stored}, supported: {', '.join(_TYPES)}")
        return _TYPES[stored]

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape = self.dtype(name), self.shape(name)
        begin, end = (len(self.header) + offset for offset in self._entries[name]["data_offsets"])
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        page_begin = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self._file.fileno(), end - page_begin, access=mmap.ACCESS_COPY, offset=page_begin)
        tensor = torch.frombuffer(pages, dtype=torch.uint8, offset=begin - page_begin).view(dtype).view(shape)
        return tensor if tensor.dim() > 1 else tensor.clone()  # a view keeps the mapping alive

    def data_crc32(self) -> int:
        """The CRC-32 of the data after the header."""
        with (
            mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
            memoryview(whole) as view,
            view[len(self.header) :] as data,
        ):
            return zlib.crc32(data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
