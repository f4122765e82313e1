"""Which safetensors files a folder's model has: those that its index names, or all without an index."""

from __future__ import annotations

import os
from typing import NamedTuple

from .files import has_file, read_json_object
from .settings import Settings

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class SafetensorsFiles(NamedTuple):
    """The files of a model."""

    paths: list[str]
    index_path: str | None
    """None: there is no index"""
    tensors: frozenset[str]
    """the names of the tensors in the index"""


def find_safetensors(folder: str) -> SafetensorsFiles:
    """The files of the model in a folder.

    Raises OSError if the folder cannot be read or a file is missing, and ValueError for an index that is not valid and
    for a folder with pickle files only.
    """
    index_path = os.path.join(folder, _INDEX)
    if not has_file(index_path):
        return SafetensorsFiles([os.path.join(folder, name) for name in _without_index(folder)], None, frozenset())
    weight_map = _weight_map(index_path)
    paths = [os.path.join(folder, name) for name in sorted(set(weight_map.values()))]
    for path in paths:
        if not has_file(path):
            raise FileNotFoundError(f"{path!r} is missing, but {_INDEX} names it")
    return SafetensorsFiles(paths, index_path, frozenset(weight_map))


def _weight_map(index_path: str) -> dict[str, str]:
    """The file name of each tensor, from the index."""
    index = Settings(index_path, read_json_object(index_path))
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(filename, str) for filename in files.values()):
        raise index.refusal("weight_map", "an object of tensor names and file names", files)
    return files


def _without_index(folder: str) -> list[str]:
    present = sorted(os.listdir(folder))
    if _SINGLE in present:
        return [_SINGLE]
    # Mistral's directories also have "consolidated" files, in Mistral's own format with other tensor names.
    found = [name for name in present if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if found:
        return found
    pickled = [name for name in present if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        raise ValueError(
            f"{folder!r} has weights in pickle files only ({', '.join(pickled[:3])}), which may run code when loaded; "
            "only safetensors and GGUF are read: convert them first"
        )
    raise FileNotFoundError(f"{folder!r} has no *.safetensors file")
