"""The Checkpoint of safetensors files with matrices of 4-bit or 8-bit integers.

srt/model_files/quantization_config.py reads what config.json says about them.
"""

from __future__ import annotations

import functools

import torch

from ...srt.model_files.quantization_config import IntegerConfig
from ..device.dtypes import dtype_name
from ..layers.quantized_weight import GROUP, QuantizedWeight
from ..models.parameter import Region
from .integer_layouts import LAYOUTS, WEIGHT_SHAPE, Integers
from .safetensors_checkpoint import SafetensorsCheckpoint

_CPU = torch.device("cpu")
_INDEX_TYPES = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class IntegerCheckpoint:
    """A Checkpoint whose matrices of integers are read in a quantized form, or widened to float32.

    Raises ValueError for a matrix that the config excludes, and for a tensor that is missing or has another type or
    shape than the config implies.
    """

    def __init__(self, folder: str, config: IntegerConfig, device: torch.device = _CPU) -> None:
        """`device`: where tensors are widened."""
        self._device = device
        self._files = SafetensorsCheckpoint(folder, (torch.int8, *_INDEX_TYPES))
        self._matrices: dict[str, _Matrix] = {}
        layout = LAYOUTS[config.layout]
        for name in sorted(self._files.names):
            if name.endswith(layout.values) and self._files.dtype(name) == layout.integer_type:
                matrix = _Matrix(self._files, name.removesuffix(layout.values), config)
                self._matrices[matrix.name] = matrix
        used = {tensor for matrix in self._matrices.values() for tensor in matrix.tensors}
        plain = self._files.names - used
        if twice := sorted(plain & self._matrices.keys()):
            raise ValueError(f"tensor {twice[0]!r} is in the checkpoint twice: as it is, and as integers")
        self.names = plain | self._matrices.keys()

    def dtype(self, name: str) -> torch.dtype | None:
        if name in self._matrices:
            return None
        dtype = self._files.dtype(name)
        if not dtype.is_floating_point:
            raise ValueError(f"tensor {name!r} has integers, but quantization_config describes no such tensor")
        return dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._matrices[name].shape if name in self._matrices else self._files.shape(name)

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        if self.dtype(name) is None:
            return self._matrices[name].integers(region, self._device).dequantize()
        return self._files.tensor(name, region).to(self._device)

    def has_form(self, name: str, form: str) -> bool:
        return name in self._matrices and form in self._matrices[name].forms

    def quantized(self, name: str, form: str, region: Region | None = None) -> QuantizedWeight | None:
        """As in Checkpoint. The minima of "int4" are rounded to float16, as `_Matrix.forms` says."""
        return self._matrices[name].in_form(form, region) if self.has_form(name, form) else None


class _Matrix:
    """A matrix of integers in a file."""

    def __init__(self, files: SafetensorsCheckpoint, module: str, config: IntegerConfig) -> None:
        """Raises ValueError as `IntegerCheckpoint` does. `module`: such as "model.layers.0.mlp.up_proj"."""
        self._files = files
        self._bits = config.bits
        self._layout = layout = LAYOUTS[config.layout]
        self._group_size = config.group_size
        self.name = f"{module}.weight"
        self._values, self._scales = module + layout.values, module + layout.scales
        self._zeros = None if config.symmetric else module + layout.zeros
        index = module + layout.group_index
        is_indexed = config.act_order or (config.layout in ("gptq", "gptq_v2") and index in files.names)
        self._group_index = index if is_indexed else None
        self._act_order = config.act_order
        if config.excludes(module):
            raise ValueError(f"tensor {self._values!r} has integers, but quantization_config excludes {module!r}")
        self.tensors = {x for x in (self._values, self._scales, self._zeros, self._group_index) if x is not None}
        """the names of its tensors in the file"""
        if missing := sorted(self.tensors - files.names):
            raise ValueError(f"tensor {self._values!r} needs {missing[0]!r}, which is missing")
        self.shape = self._shape_of(module)
        n, k = self.shape
        self._num_groups = 1 if self._group_size is None else -(-k // self._group_size)
        self._check_tensors(n, k)

    @functools.cached_property
    def forms(self) -> frozenset[str]:
        """The forms of quantized weights that have the values of the matrix.

        The scales must be numbers of float16. "int4" has minima of -zero point * scale, which are rounded to float16:
        by less than 0.0074 of a scale. The other forms are exact.
        """
        if self._width(slice(0, self.shape[1])) != GROUP:
            return frozenset()
        scales, zeros = self._scales_and_zeros(_all_of(self.shape), _CPU)
        if not scales.isfinite().all():
            return frozenset()
        forms = set()
        is_centred = self._bits == 4 or bool((zeros == 128).all())
        if is_centred or scales.dtype != torch.float32:  # else a minimum would be rounded
            forms.add("mixed")
        if bool((scales.half() == scales).all()):
            if is_centred:
                forms.add("int8")
            if self._bits == 4 and bool(_minima(scales, zeros).isfinite().all()):
                forms.add("int4")
        return frozenset(forms)

    def integers(self, region: Region | None, device: torch.device = _CPU) -> Integers:
        """The matrix, or a region of it, on `device`."""
        region = region or _all_of(self.shape)
        values = self._layout.values_of(self._files.tensor(self._values).to(device), self._bits, region)
        scales, zeros = self._scales_and_zeros(region, device)
        return Integers(values, scales, zeros)

    def in_form(self, form: str, region: Region | None) -> QuantizedWeight:
        """The matrix, or a region of it, in one of its forms. The columns of the region are whole groups."""
        values, scales, zeros = self.integers(region)
        if form == "int4":
            return QuantizedWeight(values, scales.half(), _minima(scales, zeros))
        if self._bits == 4 or form == "int8":
            centred = (values.unflatten(1, (scales.shape[1], -1)) - zeros[..., None]).to(torch.int8).flatten(1)
            minima = torch.zeros_like(scales, dtype=torch.float32)
        else:
            centred, minima = (values ^ 128).view(torch.int8), (128 - zeros) * scales.float()
        if form == "int8":
            return QuantizedWeight(centred, scales.half(), None)
        return QuantizedWeight(centred, *(x.float().repeat_interleave(2, 1) for x in (scales, minima)))

    def _scales_and_zeros(self, region: Region, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points of a region, as `Integers` has them."""
        rows, columns = region
        of_all = (rows, slice(0, self._num_groups))
        scales = self._layout.scales_of(self._scale_matrix().to(device), of_all)
        if self._zeros is None:
            zeros = torch.full_like(scales, 1 << self._bits - 1, dtype=torch.int16)
        else:
            zeros = self._layout.zeros_of(self._files.tensor(self._zeros).to(device), self._bits, of_all)
        groups = self._groups[columns][:: self._width(columns)].to(device)
        return scales.index_select(1, groups), zeros.index_select(1, groups)

    def _scale_matrix(self) -> torch.Tensor:
        scales = self._files.tensor(self._scales)
        return scales if scales.dim() == 2 else scales[:, None]

    def _width(self, columns: slice) -> int:
        """The number of columns in succession that share a scale: GROUP, or 1 if GROUP is too many somewhere."""
        groups = self._groups[columns]
        if len(groups) % GROUP:
            return 1
        runs = groups.view(-1, GROUP)
        return GROUP if torch.equal(runs, runs[:, :1].expand_as(runs)) else 1

    @functools.cached_property
    def _groups(self) -> torch.Tensor:
        """The group of each column: int64 [k]. Raises ValueError for an index that names other groups."""
        k = self.shape[1]
        consecutive = torch.arange(k) // (self._group_size or max(k, 1))
        if self._group_index is None:
            return consecutive
        given = self._files.tensor(self._group_index).long()
        # compressed-tensors writes -1, and some writers of GPTQ write 0, for columns in order.
        if bool((given == -1).all()) or (not self._act_order and not given.any()):
            return consecutive
        if not 0 <= int(given.min()) <= int(given.max()) < self._num_groups:
            raise ValueError(
                f"tensor {self._group_index!r} must name groups from 0 to {self._num_groups - 1}, got "
                f"{int(given.min())} to {int(given.max())}"
            )
        return given

    def _shape_of(self, module: str) -> tuple[int, int]:
        stored = self._files.shape(self._values)
        if len(stored) != 2:
            raise ValueError(f"tensor {self._values!r} must have 2 dimensions, got {stored}")
        n, k = self._layout.matrix_shape(stored, self._bits)
        name = module + WEIGHT_SHAPE
        if name in self._files.names:
            self.tensors.add(name)
            if self._files.dtype(name) not in _INDEX_TYPES or self._files.shape(name) != (2,):
                raise ValueError(f"tensor {name!r} must have two integers")
            n, k = self._files.tensor(name).tolist()
        return n, k

    def _check_tensors(self, n: int, k: int) -> None:
        layout, bits = self._layout, self._bits
        packed_values, packed_zeros = layout.packed_dims or (None, None)
        groups = (n, self._num_groups)
        self._check(self._values, (layout.integer_type,), [layout.stored_shape((n, k), bits, packed_values)])
        vector = [] if layout.is_transposed or self._num_groups > 1 else [(n,)]
        self._check(self._scales, _FLOATS, [layout.stored_shape(groups, bits, None), *vector])
        if self._zeros is not None:
            self._check(self._zeros, (layout.integer_type,), [layout.stored_shape(groups, bits, packed_zeros)])
        if self._group_index is not None:
            self._check(self._group_index, _INDEX_TYPES, [(k,)])

    def _check(self, name: str, types: tuple[torch.dtype, ...], shapes: list[tuple[int, ...]]) -> None:
        dtype, shape = self._files.dtype(name), self._files.shape(name)
        if dtype not in types or shape not in shapes:
            raise ValueError(
                f"tensor {name!r} has shape {shape} and type {dtype_name(dtype)}, but quantization_config implies "
                f"{' or '.join(map(str, shapes))} and {' or '.join(map(dtype_name, types))}"
            )


def _minima(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The values that 0 stands for, in float16."""
    return (scales.float() * -zeros).half()


def _all_of(shape: tuple[int, int]) -> Region:
    return slice(0, shape[0]), slice(0, shape[1])
