"""The Checkpoint of a Hugging Face directory with safetensors files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch

from ...srt.model_files.safetensors_files import find_safetensors
from ..device.dtypes import dtype_name
from ..models.parameter import Region
from ..models.parameters import EMBEDDING, LM_HEAD
from .safetensors_file import SafetensorsFile

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGER_ENDINGS = (".qweight", ".weight_packed")
"""What the names of matrices of integers end with, in the formats whose names differ from those of other matrices."""
STACKED_ENDINGS = (".experts.gate_up_proj", ".experts.down_proj")
"""What the names of the matrices of all experts in one tensor end with. transformers has them so in memory."""
_ROWS_OF_EXPERTS_ENDINGS = (".input_linear.weight", ".output_linear.weight")
"""What the names of tensors [experts, rows, columns] end with that are read as one matrix with the rows of all experts
(Granite)."""
_PREFIX = "model."
"""What the names of all tensors but the output head begin with, unless the model was saved without an output head."""
_IN_LANGUAGE_MODEL = re.compile(r"language_model\.(model\.|(?P<head>lm_head\.))|model\.language_model\.")
"""What names of a language model begin with in a model that also takes images. The second form is transformers 5's."""
_PARTS_FOR_IMAGES = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
    "model.visual.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.",
)  # fmt: skip
"""What the names of parts for images begin with, and in Gemma 4 of those for sound."""


class SafetensorsCheckpoint:
    """A Checkpoint of safetensors files, whose tensors are mapped. Raises ValueError and FileNotFoundError.

    `_file_of` has the names in the files, and `_stored_name` has them by the names of a model with an output head.
    """

    def __init__(
        self, folder: str, quantized_types: Collection[torch.dtype] = (), *, stacked_experts: bool = False
    ) -> None:
        """`quantized_types`: types of tensors that stand for numbers only together with others, such as scales. They
        are refused unless they are given. So are tensors with the matrices of all experts, unless `stacked_experts`."""
        self._types = {*_TYPES, *quantized_types}
        self._file_of: dict[str, SafetensorsFile] = {}
        files = find_safetensors(folder)
        for path in files.paths:
            file = SafetensorsFile(path)
            for name in file:
                if self._file_of.setdefault(name, file) is not file:
                    raise ValueError(f"tensor {name!r} is in both {self._file_of[name].path!r} and {path!r}")
        if missing := sorted(files.tensors - self._file_of.keys()):
            raise ValueError(f"tensors missing from the files that the index names: {', '.join(missing[:5])}")
        if not quantized_types and (integers := sorted(x for x in self._file_of if x.endswith(_INTEGER_ENDINGS))):
            raise ValueError(f"tensor {integers[0]!r} has integers, but config.json has no quantization_config for it")
        stacked = sorted(name for name in self._file_of if name.endswith(STACKED_ENDINGS))
        if stacked and not stacked_experts:
            raise ValueError(
                f"tensor {stacked[0]!r} has the matrices of all experts, but each expert must have tensors of its own, "
                "as save_pretrained of transformers writes them"
            )
        names = _names_of_language_model(self._file_of)
        # Embedding models are often saved without an output head.
        prefix = _PREFIX if EMBEDDING.removeprefix(_PREFIX) in names else ""
        self._stored_name = {name if name == LM_HEAD else f"{prefix}{name}": stored for name, stored in names.items()}
        self.names = frozenset(self._stored_name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._file(name).shape(self._stored_name[name])
        return (shape[0] * shape[1], shape[2]) if self._has_rows_of_experts(name) else shape

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        self.dtype(name)
        tensor = self._file(name)[self._stored_name[name]]
        if self._has_rows_of_experts(name):
            tensor = tensor.flatten(0, 1)
        return tensor if region is None else tensor[region]

    def has_form(self, name: str, form: str) -> bool:
        return False

    def quantized(self, name: str, form: str, region: Region | None = None) -> None:
        """None: safetensors files have no quantized form."""

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._file(name).dtype(self._stored_name[name])
        if dtype not in self._types:
            raise ValueError(
                f"tensor {name!r} is {dtype_name(dtype)}, but config.json has no quantization_config for it"
            )
        return dtype

    def _has_rows_of_experts(self, name: str) -> bool:
        return name.endswith(_ROWS_OF_EXPERTS_ENDINGS) and len(self._file(name).shape(self._stored_name[name])) == 3

    def _file(self, name: str) -> SafetensorsFile:
        return self._file_of[self._stored_name[name]]


def in_language_model(name: str) -> str:
    """The name that a tensor or a module of a language model has in a model for text only."""
    match = _IN_LANGUAGE_MODEL.match(name)
    return name if match is None else f"{match['head'] or _PREFIX}{name[match.end() :]}"


def is_for_images(name: str) -> bool:
    """Whether a tensor or a module of a model that also takes images serves only images. No text passes through it."""
    return name.startswith(_PARTS_FOR_IMAGES)


def _names_of_language_model(names: Iterable[str]) -> dict[str, str]:
    """The names in the files, by the names of a model for text only.

    A model that also takes images has its language model under a name of its own, beside its other parts. Raises
    ValueError for a tensor that is there by two names.
    """
    given = list(names)
    if not any(map(_IN_LANGUAGE_MODEL.match, given)):
        return {name: name for name in given}
    found: dict[str, str] = {}
    for name in given:
        if is_for_images(name):
            continue
        known = in_language_model(name)
        if known in found:
            raise ValueError(f"tensors {found[known]!r} and {name!r} are both {known}")
        found[known] = name
    return found
