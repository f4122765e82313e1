"""The cache of packed weights: matrices in the layout of the compiled CPU operations, in files that servers share.

An entry is a PackedFile with all parameters of a model. Its name has a hash of all that the parameters depend on
(`_key`), so an entry of other weights, settings or code is not found. The design is in docs/performance.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...srt.model_files.fingerprint import weight_fields, weight_files
from ...srt.model_files.model_config import ModelConfig
from .. import cpu_extension
from ..layers.packing import PackedWeight, gated_panels_of, panels_of
from ..models.family import family_of
from ..models.gemma4 import INPUT_TABLE
from ..models.parameters import ParameterDtypes
from .cache_folder import PREFIX, CacheFolder, Entry
from .packed_file import PackedFile, write_packed
from .quantization import is_multiplied, parameter_bytes

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]
_CODE = ("model_executor/layers", "model_executor/models", "model_executor/weights", "srt/model_files")
"""Folders of the code that reads, converts and packs parameters."""
_EMBEDDING = "embed_tokens.weight"
_BITS = {"int8": 8, "int4": 4, "e2m1": 4, "q4_k": 4, "q6_k": 6, "mixed_k": 6, "mixed": 8}


class PackedParameters(Mapping[str, Any]):
    """The parameters of a model for compiled layers: PackedWeights of what is multiplied or quantized, else tensors.

    They are read on the first access. If no entry can be written, they are those of the checkpoint.
    """

    def __init__(
        self,
        folder: CacheFolder,
        config: ModelConfig,
        dtypes: ParameterDtypes,
        forms: Mapping[str, str],
        stored: Callable[[], Mapping[str, Any]],
        *,
        compact: bool,
    ) -> None:
        """`forms`: quantized form of parameters by name. `stored`: reads the parameters of the checkpoint. `compact`:
        weights of bfloat16 are compact, as `panels_of` says."""
        self._folder = folder
        self._config = config
        self._dtypes = dtypes
        self._forms = forms
        self._stored = stored
        self._compact = compact
        self._table = {parameter.name: parameter for parameter in family_of(config).parameters(config)}

    def __getitem__(self, name: str) -> Any:
        found = self._found[name]
        if not isinstance(self._found, PackedFile) or not self._is_packed(name):
            return found
        return PackedWeight(found, torch.Size(self._table[name].shape), _BITS.get(self._forms.get(name, "")))

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def _is_packed(self, name: str) -> bool:
        if name in self._forms:
            return True
        return is_multiplied(self._table[name], self._config) and cpu_extension.multiplies(self._dtypes.matrices)

    @functools.cached_property
    def _found(self) -> Mapping[str, Any]:
        key = _key(self._config, self._dtypes, self._forms, self._compact)
        path = self._folder.path / f"{PREFIX}{key}.packed"
        entry = Entry(
            path,
            "packed weights",
            self._num_bytes(),
            sum(os.path.getsize(name) for name in weight_files(self._config)),
            lambda: self._open(path, key),
            lambda file: write_packed(file, key, self._packed(self._stored())),
        )
        found = self._folder.open_or_write(entry)
        return self._stored() if found is None else found

    def _open(self, path: Path, key: str) -> PackedFile | None:
        """Open the entry. Returns None if there is no file, or if it is truncated, damaged or invalid (logged).

        Raises OSError if it cannot be read.
        """
        try:
            # Few rows of an embedding are read, unless it is the output head.
            tables = (INPUT_TABLE,) if self._config.tie_word_embeddings else (_EMBEDDING, INPUT_TABLE)
            file = PackedFile(path, key, tables)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            logger.warning("Writing %s again: %s", path, error)
            return None
        if file.is_mapped:
            logger.info("Mapped the packed weights from %s", path)
        else:
            logger.info("Copied the packed weights from %s, because the file is not on huge pages", path)
        return file

    def _packed(self, stored: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._table:
            found = stored[name]
            if self._is_packed(name):
                pack = gated_panels_of if name.endswith("gate_up_proj.weight") else panels_of
                found = pack(found, compact=self._compact)
            yield name, found

    def _num_bytes(self) -> int:
        """About the size of the entry, or more: without the padding, and of weights that are not compact."""
        bytes_of_vectors, bytes_of_matrices = self._dtypes.vectors.itemsize, self._dtypes.matrices.itemsize
        sizes = parameter_bytes(self._config, bytes_of_vectors, matrix_bytes=bytes_of_matrices, forms=self._forms)
        return sum(sizes.values())


def _key(config: ModelConfig, dtypes: ParameterDtypes, forms: Mapping[str, str], compact: bool) -> str:
    """A hash of all that packed parameters depend on. Raises as `weight_files`."""
    variant = cpu_extension.load()
    assert variant is not None
    stamp = cpu_extension.stamp(variant)
    described = {
        "files": [_identity(path) for path in weight_files(config)],
        "config": weight_fields(config),
        "dtypes": [str(dtype) for dtype in dtypes],
        "forms": dict(forms),
        "compact": compact,
        "build": variant.name,
        "operations": None if stamp is None else stamp.sources,
        "code": _code_digest(),
        "versions": [__version__, torch.__version__],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def _identity(path: str) -> tuple[int, int, int, int]:
    """What changes with any change of a file's content: a program can set the time of the content, but not the last.

    A digest of the content would take as long as packing.
    """
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.cache
def _code_digest() -> str:
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_PACKAGE / folder).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
