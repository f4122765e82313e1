"""The reader of GGUF headers: the metadata, and the table of tensors without their data.

The `gguf` package's reader makes Python objects of all elements of all arrays, which takes seconds for a vocabulary.
Three processes of a server read the header before the server is ready. So this reader skips arrays when it opens the
file, and decodes an array on first access.

Source: GGUF specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .files import open_file

MetadataValue: TypeAlias = "bool | int | float | str | list[str] | npt.NDArray[np.generic]"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# The struct format and the numpy dtype of each value type, little endian.
_SCALARS: dict[int, tuple[struct.Struct, np.dtype[np.generic]]] = {
    code: (struct.Struct("<" + fmt), np.dtype(dtype))
    for code, fmt, dtype in (
        (0, "B", "<u1"),
        (1, "b", "<i1"),
        (2, "H", "<u2"),
        (3, "h", "<i2"),
        (4, "I", "<u4"),
        (5, "i", "<i4"),
        (6, "f", "<f4"),
        (7, "?", "?"),
        (10, "Q", "<u8"),
        (11, "q", "<i8"),
        (12, "d", "<f8"),
    )
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a GGUF file. Its name ends in .gguf, or it begins as such files do.

    Ollama's files have no ending, and neither do those that links in Hugging Face's cache lead to. Raises OSError for a
    file that cannot be read.
    """
    path = os.fspath(path)
    if path.endswith(".gguf"):
        return not os.path.isdir(path)
    if not os.path.isfile(path):
        return False
    with open_file(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


class GGUFTensor(NamedTuple):
    """An entry of the table of tensors.

    shape: row-major, as in numpy and torch (a linear layer is [out, in]). The file has the reverse order.
    type: GGML quantisation type. offset: bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GGUFFile:
    """An open GGUF file.

    `metadata` maps a key to a Python scalar, a string, a `list[str]` (array of strings) or a numpy array (array of
    numbers). An array is decoded on first access and kept. `tensors` has the order of the file.

    Raises ValueError if the file is not GGUF, has another version or byte order, is truncated or is inconsistent.
    Raises OSError if it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._bytes = _MappedFile(self.path)
        self.metadata: Mapping[str, MetadataValue]
        self.tensors: list[GGUFTensor]
        try:
            self._read_header()
        except (struct.error, IndexError, OverflowError) as error:
            raise ValueError(f"{self.path} is cut short: its header runs past the end of the file") from error

    def _read_header(self) -> None:
        data = self._bytes.map
        if data[:4] != _MAGIC:
            raise ValueError(f"{self.path} is not a GGUF file: it starts with {data[:4]!r} instead of {_MAGIC!r}")
        (self.version,) = _U32.unpack_from(data, 4)
        if self.version not in _VERSIONS:
            swapped = int.from_bytes(data[4:8], "big") in _VERSIONS
            what = "is big endian" if swapped else f"has GGUF version {self.version}"
            raise ValueError(f"{self.path} {what}; little endian files of versions {_VERSIONS} are supported")
        (num_tensors,) = _U64.unpack_from(data, 8)
        (num_entries,) = _U64.unpack_from(data, 16)

        entries: dict[str, tuple[int, int]] = {}
        pos = 24
        for _ in range(num_entries):
            key, pos = self._bytes.string(pos)
            (value_type,) = _U32.unpack_from(data, pos)
            if key in entries:
                raise ValueError(f"{self.path} has the metadata key {key!r} twice")
            entries[key] = (value_type, pos + 4)
            pos = self._bytes.skip(key, value_type, pos + 4)
        self.metadata = _Metadata(self._bytes, entries)

        described: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, pos = self._bytes.string(pos)
            (num_dims,) = _U32.unpack_from(data, pos)
            if not 1 <= num_dims <= _MAX_DIMS:
                raise ValueError(f"{self.path}: tensor {name!r} must have 1 to {_MAX_DIMS} dimensions, got {num_dims}")
            dims = struct.unpack_from(f"<{num_dims}Q", data, pos + 4)
            pos += 4 + 8 * num_dims
            (tensor_type,) = _U32.unpack_from(data, pos)
            (offset,) = _U64.unpack_from(data, pos + 4)
            pos += 12
            described.append((name, tuple(reversed(dims)), tensor_type, offset))
        if len({name for name, *_ in described}) != len(described):
            raise ValueError(f"{self.path} names a tensor twice")

        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"{self.path}: general.alignment is {alignment!r}, it must be a power of two")
        start = -(-pos // alignment) * alignment
        self.tensors = [GGUFTensor(name, shape, kind, start + offset) for name, shape, kind, offset in described]
        for tensor in self.tensors:
            if tensor.offset > len(data):
                raise ValueError(f"{self.path} is cut short: tensor {tensor.name!r} lies past the end of the file")

    def tensor_bytes(self, tensor: GGUFTensor, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A tensor's data: a read-only view, uint8 [num_bytes]. Raises ValueError if the file ends before its end."""
        if tensor.offset + num_bytes > len(self._bytes.map):
            raise ValueError(f"{self.path} is cut short: tensor {tensor.name!r} runs past the end of the file")
        return np.frombuffer(self._bytes.map, np.uint8, num_bytes, tensor.offset)


class _MappedFile:
    """The mapped bytes of a file, and methods that read values from them.

    The methods take a position. `string` and `skip` also return the position after the value.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise ValueError(f"{path} is not a GGUF file: it is shorter than a header")
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def string(self, pos: int) -> tuple[str, int]:
        end = self._end_of_string(pos)
        try:
            return self.map[pos + 8 : end].decode("utf-8"), end
        except UnicodeDecodeError as error:
            raise self._not_text(pos, error) from None

    def _not_text(self, pos: int, error: UnicodeDecodeError) -> ValueError:
        return ValueError(f"{self.path}: the string at byte {pos} must be UTF-8: {error}")

    def _end_of_string(self, pos: int) -> int:
        return self._inside(pos + 8 + _U64.unpack_from(self.map, pos)[0])

    def _inside(self, end: int) -> int:
        if end > len(self.map):
            raise IndexError(end)
        return end

    def skip(self, key: str, value_type: int, pos: int) -> int:
        data = self.map
        if value_type == _STRING:
            return self._end_of_string(pos)
        if value_type != _ARRAY:
            return self._inside(pos + self._scalar(key, value_type)[0].size)
        (item_type,) = _U32.unpack_from(data, pos)
        (count,) = _U64.unpack_from(data, pos + 4)
        pos += 12
        if item_type == _STRING:
            unpack = _U64.unpack_from
            for _ in range(count):
                pos += 8 + unpack(data, pos)[0]
            return self._inside(pos)
        return self._inside(pos + count * self._scalar(key, item_type)[0].size)

    def _scalar(self, key: str, value_type: int) -> tuple[struct.Struct, np.dtype[np.generic]]:
        if value_type not in _SCALARS:
            raise ValueError(f"{self.path}: metadata key {key!r} has value type {value_type}, which is not supported")
        return _SCALARS[value_type]

    def decode(self, key: str, value_type: int, pos: int) -> MetadataValue:
        data = self.map
        if value_type == _STRING:
            return self.string(pos)[0]
        if value_type != _ARRAY:
            value = self._scalar(key, value_type)[0].unpack_from(data, pos)[0]
            assert isinstance(value, bool | int | float)
            return value
        (item_type,) = _U32.unpack_from(data, pos)
        (count,) = _U64.unpack_from(data, pos + 4)
        pos += 12
        if item_type != _STRING:
            # A copy, because a view would keep the whole file mapped while the array is in use.
            return np.frombuffer(data, self._scalar(key, item_type)[1], count, pos).copy()
        strings = []
        unpack = _U64.unpack_from
        try:
            for _ in range(count):
                end = pos + 8 + unpack(data, pos)[0]
                strings.append(data[pos + 8 : end].decode("utf-8"))
                pos = end
        except UnicodeDecodeError as error:
            raise self._not_text(pos, error) from None
        return strings


class _Metadata(Mapping[str, MetadataValue]):
    """The metadata of a file, decoded on access. It has no reference to the GGUFFile: a cycle would delay the unmap."""

    def __init__(self, file: _MappedFile, entries: dict[str, tuple[int, int]]) -> None:
        self._file = file
        self._entries = entries
        self._decoded: dict[str, MetadataValue] = {}

    def __getitem__(self, key: str) -> MetadataValue:
        if key not in self._decoded:
            self._decoded[key] = self._file.decode(key, *self._entries[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        # Mapping's own method would decode the value.
        return key in self._entries
