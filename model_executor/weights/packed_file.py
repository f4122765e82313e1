"""A file of tensors that processes share: the tensors are read from the mapped file itself.

    data: the tensors in order, each at a multiple of 64 bytes, zeros up to a multiple of a huge page
    footer: JSON with the key, the place of each tensor and the CRC-32 of each 32 MiB of the data
    tail: length of the footer (8 bytes), CRC-32 of the footer (4 bytes), _MAGIC

The data begins at offset 0 and is written in pieces of 32 MiB, so that the page cache can hold it in huge pages.
"""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ...srt.machine.cores import usable_cpus
from ...srt.machine.huge_pages import HUGE_PAGE, Arena, Bytes
from ...srt.machine.mapped_file import bytes_on_huge_pages, lock, map_file
from ...srt.model_files.files import open_file
from ..device.dtypes import dtype_name

_PIECE = 32 << 20
_ALIGNMENT = 64
_MAGIC = b"tpk1"
_TAIL = struct.Struct("<QI4s")
_Place = tuple[str, list[int], int]
"""Type and shape of a tensor, and where it begins in the data."""
_MIN_HUGE = 0.9
"""A file is used where it is mapped if this share of it is on huge pages. Otherwise its tensors are copied there."""


class PackedFile(Mapping[str, torch.Tensor]):
    """The tensors of a file, by name. They must not be written to.

    They are views of the mapped file if it is on huge pages. Otherwise they are copied to huge pages of this process,
    because a step of a CPU reads all weights, and is slower on small pages. The whole file is read and compared with
    its checksums.

    Raises ValueError if the file is damaged, or if its key is another one. Raises OSError if it cannot be read.
    """

    def __init__(self, path: Path, key: str, never_copied: Container[str] = ()) -> None:
        """`never_copied`: names of tensors that stay mapped, because only few rows of them are read."""
        with open_file(path) as file:
            footer, data_bytes = _footer(file, key)
            memory = map_file(file, data_bytes)
        pieces = [memory[start : start + _PIECE] for start in range(0, data_bytes, _PIECE)]
        with ThreadPoolExecutor(min(usable_cpus(), len(pieces))) as pool:
            if list(pool.map(zlib.crc32, pieces)) != footer["crc32"]:
                raise ValueError(f"{path} is damaged")
            self.is_mapped = bytes_on_huge_pages(memory) >= _MIN_HUGE * data_bytes
            """whether all tensors are in memory that other processes share"""
            contents = dict(_contents(memory, footer["tensors"]))
            if self.is_mapped:
                lock(memory)
            else:
                arena = Arena()
                copies = {name: arena.take(len(data)) for name, data in contents.items() if name not in never_copied}
                list(pool.map(np.copyto, copies.values(), [contents[name] for name in copies]))
                contents |= copies
        places: dict[str, _Place] = footer["tensors"]
        self._tensors = {name: _tensor(contents[name], dtype, shape) for name, (dtype, shape, _) in places.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def write_packed(file: BinaryIO, key: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a PackedFile. `tensors` may make each tensor when it is asked for it. Raises OSError."""
    places: dict[str, _Place] = {}
    data = _DataWriter(file)
    for name, tensor in tensors:
        places[name] = dtype_name(tensor.dtype), list(tensor.shape), data.num_bytes
        data.add(tensor.contiguous().flatten().view(torch.uint8).numpy())
    data.finish()
    footer = json.dumps({"key": key, "tensors": places, "crc32": data.checksums}).encode()
    file.write(footer + _TAIL.pack(len(footer), zlib.crc32(footer), _MAGIC))


class _DataWriter:
    """Writes the data in whole pieces."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._piece = np.zeros(_PIECE, np.uint8)
        self.num_bytes = 0
        """of the data so far, with padding"""
        self.checksums: list[int] = []

    def add(self, data: Bytes) -> None:
        """Add the bytes of a tensor, and zeros up to the place of the next one."""
        for part in (data, np.zeros(-len(data) % _ALIGNMENT, np.uint8)):
            while len(part):
                at = self.num_bytes % _PIECE
                taken, part = part[: _PIECE - at], part[_PIECE - at :]
                self._piece[at : at + len(taken)] = taken
                self.num_bytes += len(taken)
                if self.num_bytes % _PIECE == 0:
                    self._write(_PIECE)

    def finish(self) -> None:
        """Write the last piece. A file without tensors has a page of zeros, because nothing cannot be mapped."""
        at = self.num_bytes % _PIECE
        if at or not self.num_bytes:
            size = max(math.ceil(at / HUGE_PAGE), 1) * HUGE_PAGE
            self._piece[at:size] = 0
            self._write(size)

    def _write(self, size: int) -> None:
        piece = self._piece[:size].data
        self.checksums.append(zlib.crc32(piece))
        self._file.write(piece)


def _footer(file: BinaryIO, key: str) -> tuple[dict[str, Any], int]:
    """The footer of a file and the number of bytes before it. Raises ValueError if there is none with this key."""
    size = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), _TAIL.size, max(size - _TAIL.size, 0))
    if len(tail) == _TAIL.size:
        length, checksum, magic = _TAIL.unpack(tail)
        data_bytes = size - _TAIL.size - length
        if magic == _MAGIC and data_bytes > 0:
            footer = os.pread(file.fileno(), length, data_bytes)
            found = json.loads(footer) if zlib.crc32(footer) == checksum else None
            if isinstance(found, dict) and found.get("key") == key:
                return found, data_bytes
    raise ValueError(f"{file.name} is damaged or incomplete, or has another key")


def _contents(memory: Bytes, places: Mapping[str, _Place]) -> Iterator[tuple[str, Bytes]]:
    for name, (dtype, shape, begin) in places.items():
        yield name, memory[begin : begin + math.prod(shape) * getattr(torch, dtype).itemsize]


def _tensor(content: Bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    if not len(content):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(content).view(getattr(torch, dtype)).view(shape)
