"""A safetensors file whose tensors are mapped one by one, so that a tensor nobody holds takes no memory."""

from __future__ import annotations

import errno
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...srt.model_files.files import open_file

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class SafetensorsFile(Mapping[str, torch.Tensor]):
    """Name -> tensor: a matrix is a view of the file's pages, which are read when they are touched; a vector is copied,
    being less than a page.

    A tensor may be written to, which changes it alone. A file that is changed in place, instead of being replaced,
    changes the matrices that are still in use, or ends the process. Raises ValueError for what is no regular file, not
    safetensors or not whole, and for a tensor that is not floating point; OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = open_file(self.path)  # open for as long as there may be tensors to map
        try:
            with safe_open(self.path, framework="pt"):
                pass  # every number in the header has been checked
        except SafetensorError as error:
            raise ValueError(f"{self.path!r} is not a valid safetensors file: {error}") from None
        except RuntimeError as error:  # torch opens it once more by its name, which may have gone meanwhile
            raise FileNotFoundError(errno.ENOENT, str(error), self.path) from None
        length = self._file.read(8)
        self.header = length + self._file.read(int.from_bytes(length, "little"))
        """all that comes before the data"""
        self._entries: dict[str, dict[str, Any]] = json.loads(self.header[8:])
        self._entries.pop("__metadata__", None)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Raises ValueError for a type that no weights of ours have."""
        stored = self._entries[name]["dtype"]
        if stored not in _TYPES:
            raise ValueError(f"tensor {name!r} has dtype {stored}: quantized weights are not supported")
        return _TYPES[stored]

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape = self.dtype(name), self.shape(name)
        begin, end = (len(self.header) + offset for offset in self._entries[name]["data_offsets"])
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        page_begin = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self._file.fileno(), end - page_begin, access=mmap.ACCESS_COPY, offset=page_begin)
        tensor = torch.frombuffer(pages, dtype=torch.uint8, offset=begin - page_begin).view(dtype).view(shape)
        return tensor if tensor.dim() > 1 else tensor.clone()  # the view holds the map

    def data_crc32(self) -> int:
        """Checksum of all that comes after the header."""
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
