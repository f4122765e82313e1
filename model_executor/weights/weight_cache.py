"""The weight cache: dequantised weights on disk. A GGUF file is dequantised once, and later starts map the result.

An entry is a safetensors file with all parameters, in the order of the family's table. Its name has a hash of the GGUF
file's content, the dtypes and LAYOUT. Its header follows from these and from the checksum of the data. So an entry is
valid if its header equals the header computed with its checksum. An invalid entry is made again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ...srt import env
from ...srt.model_files.files import open_file
from ..models.parameters import Parameter, ParameterDtypes
from .safetensors_file import DTYPE_NAMES, SafetensorsFile

logger = logging.getLogger(__name__)

LAYOUT = 1
"""The version of the entries. Raise it when the same GGUF file gives other parameters or other values."""
MAX_BYTES = 32 << 30
"""Most bytes of all entries together. The least recently used entries are removed first."""
_PREFIX = "tercet-"
_SUFFIX = ".safetensors"
_UNFINISHED = ".tmp"
_ABANDONED_S = 24 * 3600
"""An unfinished file of this age is abandoned: its writer has died."""
_ALIGNMENT = 64


def open_weight_cache(setting: str) -> WeightCache | None:
    """Open the cache of the setting --weight-cache: auto, off or a folder. Returns None if there is no cache."""
    if setting == "off":
        return None
    folder = env.cache_folder() if setting == "auto" else Path(setting)
    return None if folder is None else WeightCache(folder)


class WeightCache:
    """A folder of entries. The folder need not exist, and several processes may use it at once."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def parameters(
        self,
        source: str,
        table: Sequence[Parameter],
        dtypes: ParameterDtypes,
        make: Callable[[], Mapping[str, torch.Tensor]],
    ) -> Mapping[str, torch.Tensor]:
        """The parameters of the GGUF file `source`, mapped from its entry, which is made from `make()` if needed.

        `table` lists the parameters. If no entry can be written, logs a warning and returns the result of `make()`.
        Raises OSError if `source` cannot be read.
        """
        with open_file(source) as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        entry = _Entry(self._folder, content, table, dtypes)
        kept = entry.open()
        if kept is not None:
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(entry.path)
            return kept
        made = make()
        try:
            self._make_room(entry.num_bytes)
            entry.write(made)
            logger.info("Cached the dequantised weights in %s", entry.path)
            return SafetensorsFile(entry.path)
        except OSError as error:
            logger.warning("Could not cache the dequantised weights in %s: %s", self._folder, error.strerror or error)
            return made

    def _make_room(self, num_bytes: int) -> None:
        """Remove abandoned files and the least recently used entries. Raises OSError if that does not make room."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f"{_PREFIX}*{_UNFINISHED}"):
            if _age_s(path) > _ABANDONED_S:
                path.unlink(missing_ok=True)
        if num_bytes <= self._max_bytes:
            left = self._max_bytes - num_bytes
            for path in sorted(self._folder.glob(f"{_PREFIX}*{_SUFFIX}"), key=_age_s):
                left -= _size(path)
                if left < 0:
                    path.unlink(missing_ok=True)
        room = min(self._max_bytes, shutil.disk_usage(self._folder).free // 2)
        if num_bytes > room:
            raise OSError(errno.ENOSPC, f"they take {num_bytes >> 20} MiB, but only {room >> 20} MiB are available")


class _Entry:
    """An entry of the cache, whose file may not exist yet."""

    def __init__(self, folder: Path, content: str, table: Sequence[Parameter], dtypes: ParameterDtypes) -> None:
        self._table = table
        self._dtypes = dtypes
        names = (str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        self._key = f"{_PREFIX}{content}-{'-'.join(names)}-{LAYOUT}"
        self._data_start = len(self._header(0))
        self.path = folder / f"{self._key}{_SUFFIX}"
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

    def write(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Write the entry, one parameter after the other. The file appears only when it is complete. Raises OSError."""
        descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, _PREFIX, self.path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(self._header(0))
                checksum = 0
                for parameter in self._table:
                    data = parameters[parameter.name].contiguous().flatten().view(torch.uint8).numpy().data
                    checksum = zlib.crc32(data, checksum)
                    file.write(data)
                file.seek(0)
                file.write(self._header(checksum))
            os.replace(unfinished, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

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


def _age_s(path: Path) -> float:
    """Seconds since the file was written or used. Infinite if the file no longer exists."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
