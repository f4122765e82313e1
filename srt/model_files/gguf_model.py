"""A model in the GGUF format: one file, or the parts that llama.cpp's gguf-split makes of it.

The parts are in one folder: NAME-00001-of-00003.gguf and so on. The first one has the metadata. Each part has its
number, which counts from 0 (`split.no`), the number of parts (`split.count`), and the number of tensors of all parts
together (`split.tensors.count`). A part may have no tensors.

Source: tools/gguf-split/gguf-split.cpp and src/llama-model-loader.cpp of llama.cpp.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .gguf_file import GGUFFile, GGUFTensor
from .settings import Settings, some_of

_MAX_PARTS = 2**16 - 1
_NAME_OF_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


class GGUFModel:
    """The open files of a model. It has the metadata of the first part, and the tensors of all parts.

    `path`: the first part. `paths`: all parts.

    Raises as GGUFFile does, FileNotFoundError for a missing part, and ValueError if `path` is a later part or if the
    parts are not those of one model. Parts of two models with the same tensors look like those of one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        first = open_first_part(path)
        split = _read_split(first)
        parts = [first] if split is None else [first, *_later_parts(first, split)]
        self.path = first.path
        self.paths = [part.path for part in parts]
        self.metadata = first.metadata
        self.tensors = [tensor for part in parts for tensor in part.tensors]
        self._part_of: dict[str, GGUFFile] = {}
        for part in parts:
            for tensor in part.tensors:
                other = self._part_of.setdefault(tensor.name, part)
                if other is not part:
                    raise ValueError(f"{other.path} and {part.path} both have the tensor {tensor.name!r}")
        if split is not None and len(self.tensors) != split.num_tensors:
            raise ValueError(
                f"{self.path}: the {split.num_parts} parts must have {split.num_tensors} tensors together, "
                f"got {len(self.tensors)}"
            )

    def tensor_bytes(self, tensor: GGUFTensor, num_bytes: int) -> npt.NDArray[np.uint8]:
        """As GGUFFile.tensor_bytes."""
        return self._part_of[tensor.name].tensor_bytes(tensor, num_bytes)


def open_first_part(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a whole model, or the first part of one. Raises as GGUFFile does, and ValueError for a later part."""
    file = GGUFFile(path)
    split = _read_split(file)
    if split is not None and split.number:
        first = split.path_of(0, file)
        raise ValueError(f"{file.path} is part {split.number + 1} of {split.num_parts}; give the first part, {first}")
    return file


def part_paths(path: str) -> list[str]:
    """The paths of all files of a model. `path`: the model, or its first part. Raises as GGUFModel does."""
    # Any part has such a name. A file of another name is not opened, because that takes tens of milliseconds.
    return GGUFModel(path).paths if _NAME_OF_PART.search(path) else [path]


def has_name_of_later_part(name: str) -> bool:
    """Whether gguf-split gives such a name to a part that is not the first one."""
    found = _NAME_OF_PART.search(name)
    return found is not None and int(found[1]) > 1


class _Split(NamedTuple):
    """What a part says of its model."""

    number: int
    """the part's own number, which counts from 0"""
    num_parts: int
    """of the model"""
    num_tensors: int
    """of all parts together"""

    def path_of(self, number: int, part: GGUFFile) -> str:
        """The path of another part than `part`, which says this."""
        return part.path.removesuffix(self._ending(self.number)) + self._ending(number)

    def check_name(self, part: GGUFFile) -> None:
        """Raise ValueError if the part has another name than gguf-split gives it."""
        if not part.path.endswith(self._ending(self.number)):
            raise ValueError(
                f"{part.path} is part {self.number + 1} of {self.num_parts}, so its name must end in "
                f"{self._ending(self.number)!r}"
            )

    def _ending(self, number: int) -> str:
        return f"-{number + 1:05d}-of-{self.num_parts:05d}.gguf"


def _read_split(file: GGUFFile) -> _Split | None:
    """What a part says of its model; None for a file that is a whole model. Raises ValueError if the name differs."""
    told = Settings(file.path, file.metadata)
    count = told.integer("split.count", 0, minimum=0, maximum=_MAX_PARTS)
    if count < 2:
        return None
    number = told.integer("split.no", minimum=0, maximum=count - 1)
    split = _Split(number, count, told.integer("split.tensors.count", minimum=0))
    split.check_name(file)
    return split


def _later_parts(first: GGUFFile, split: _Split) -> list[GGUFFile]:
    paths = [split.path_of(number, first) for number in range(1, split.num_parts)]
    if missing := [os.path.basename(path) for path in paths if not os.path.exists(path)]:
        raise FileNotFoundError(
            f"{first.path} is part 1 of {split.num_parts}, and its folder must have all parts; missing: "
            f"{some_of(missing, 3)}"
        )
    parts = list(map(GGUFFile, paths))
    for part in parts:
        found = _read_split(part)
        if found is None:
            raise ValueError(f"{part.path} is no part of a model, because it has no split.count above 1")
        # The names show that the other numbers agree.
        if found.num_tensors != split.num_tensors:
            raise ValueError(
                f"{part.path} and {first.path} are not parts of one model: split.tensors.count is {found.num_tensors} "
                f"and {split.num_tensors}"
            )
    return parts
