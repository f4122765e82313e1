"""The weight cache: dequantised weights on disk. A GGUF file is dequantised once, and later starts map the result.

An entry is a safetensors file with all parameters, in the order of the family's table. Its name has a hash of the
content of the GGUF files, the dtypes and LAYOUT. Its header follows from these and from the checksum of the data. So an
entry is valid if its header equals the header computed with its checksum. An invalid entry is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from ...srt.model_files.files import open_file
from ..device.dtypes import dtype_name
from ..models.parameter import Parameter
from ..models.parameters import ParameterDtypes
from .cache_folder import PREFIX, CacheFolder, Entry
from .safetensors_file import DTYPE_NAMES, SafetensorsFile

logger = logging.getLogger(__name__)

LAYOUT = 1
"""The version of the entries. Raise it when the same GGUF file gives other parameters or other values."""
_ALIGNMENT = 64


class WeightCache:
    """The entries of dequantised weights in a folder."""

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder

    def parameters(
        self,
        sources: Iterable[str],
        table: Sequence[Parameter],
        dtypes: ParameterDtypes,
        make: Callable[[], Mapping[str, torch.Tensor]],
    ) -> Mapping[str, torch.Tensor]:
        """The parameters of the GGUF files `sources`, mapped from their entry, which is made from `make()` if needed.

        `table` lists the parameters. If no entry can be written, logs a warning and returns the result of `make()`.
        Raises OSError if a file cannot be read.
        """
        digest, source_bytes = hashlib.sha256(), 0
        for source in sources:
            with open_file(source) as read:
                hashlib.file_digest(read, lambda: digest)
                source_bytes += read.tell()
        file = _File(self._folder.path, digest.hexdigest(), table, dtypes)
        entry = Entry(
            file.path,
            "dequantised weights",
            file.num_bytes,
            source_bytes,
            file.open,
            lambda unfinished: file.write(make(), unfinished),
        )
        found = self._folder.open_or_write(entry)
        return make() if found is None else found


class _File:
    """The file of an entry, which may not exist yet."""

    def __init__(self, folder: Path, digest: str, table: Sequence[Parameter], dtypes: ParameterDtypes) -> None:
        self._table = table
        self._dtypes = dtypes
        names = (dtype_name(dtype) for dtype in dict.fromkeys(dtypes))
        self._key = f"{PREFIX}{digest}-{'-'.join(names)}-{LAYOUT}"
        self._data_start = len(self._header(0))
        self.path = folder / f"{self._key}.safetensors"
        self.num_bytes = self._data_start + sum(map(self._bytes_of, table))

    def open(self) -> SafetensorsFile | None:
        """Open the entry. Returns None if there is no file, or if it is truncated, damaged or invalid (logged)."""
        try:
            file = SafetensorsFile(self.path)
            if file.header == self._header(file.data_crc32()):
                return file
            logger.warning("%s is damaged; writing it again", self.path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("Writing %s again: %s", self.path, error)
        return None

    def write(self, parameters: Mapping[str, torch.Tensor], file: BinaryIO) -> None:
        """Write the entry, one parameter after the other. Raises OSError."""
        file.write(self._header(0))
        checksum = 0
        for parameter in self._table:
            data = parameters[parameter.name].contiguous().flatten().view(torch.uint8).numpy().data
            checksum = zlib.crc32(data, checksum)
            file.write(data)
        file.seek(0)
        file.write(self._header(checksum))

    def _bytes_of(self, parameter: Parameter) -> int:
        return math.prod(parameter.shape) * self._dtypes.of(parameter).itemsize

    def _header(self, checksum: int) -> bytes:
        """The header for a checksum of the data. Its length is the same for every checksum."""
        entries: dict[str, object] = {"__metadata__": {"tercet": self._key, "crc32": f"{checksum:08x}"}}
        begin = 0
        for parameter in self._table:
            end = begin + self._bytes_of(parameter)
            dtype = DTYPE_NAMES[self._dtypes.of(parameter)]
            entries[parameter.name] = {"dtype": dtype, "shape": parameter.shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text
