"""What computed data of a model depends on: fields of its config, and fingerprints of its files.

Fingerprints show changed weights without reading them all. A fingerprint covers the size of a file, and 4 KiB of each
MiB. A change that leaves all of these bytes as they were is not noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from typing import Any

from .files import open_file
from .gguf_model import part_paths
from .model_config import ModelConfig
from .safetensors_files import find_safetensors

_SAMPLE_BYTES = 4 << 10
_SAMPLE_EVERY = 1 << 20
_NOT_IN_WEIGHTS = {"model_path", "generation", "eos_token_ids", "bos_token_id", "context_len"}


def weight_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of the config that packed weights depend on. KV depends on no others."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_IN_WEIGHTS}


def weight_fingerprints(config: ModelConfig) -> Iterator[str]:
    """One for each file of the weights. Raises as `weight_files`."""
    return map(fingerprint, weight_files(config))


def weight_files(config: ModelConfig) -> Iterator[str]:
    """The paths of the files of the weights, and of what names them.

    Raises OSError for an unreadable model, and ValueError for a split GGUF file or an index that is not valid.
    """
    if config.load_format == "gguf":
        yield from part_paths(config.model_path)
        return
    files = find_safetensors(config.model_path)
    yield from files.paths
    if files.index_path is not None:
        yield files.index_path


def fingerprint(path: str) -> str:
    """The fingerprint of one file. Raises OSError."""
    digest = hashlib.blake2b(digest_size=32)
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        for start in (*range(0, size, _SAMPLE_EVERY), max(size - _SAMPLE_BYTES, 0)):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
    return digest.hexdigest()
