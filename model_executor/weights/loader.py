"""The loader of parameters, from a checkpoint or random.

On a CPU a parameter is read when a layer asks for it, and only that layer holds it. A layer that packs its weight keeps
no part of the checkpoint in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from ...srt.model_files.families import FAMILIES
from ...srt.model_files.fingerprint import weight_files
from ...srt.model_files.model_config import ModelConfig
from ...srt.model_files.quantization_config import Fp8Config, IntegerConfig, Mxfp4Config
from ...srt.model_files.settings import some_of
from ..device.dtypes import DTYPES, dtype_name
from ..layers.fp8_weight import FP8_FORMS, Fp8Weight, quantize_fp8, stack_fp8
from ..layers.packing import COMPACT_BITS
from ..layers.quantized_weight import GROUP, QuantizedWeight, quantize, stacked
from ..models.family import family_of
from ..models.gemma4 import unread_tensors
from ..models.parameter import WHOLE, Parameter, Part, Region, Shard, Split
from ..models.parameters import EMBEDDING, LM_HEAD, ParameterDtypes, check_shard, is_expert
from .cache_folder import CacheFolder
from .fp8_checkpoint import Fp8Checkpoint
from .integer_checkpoint import IntegerCheckpoint
from .joined_experts import JoinedExperts
from .packed_cache import PackedParameters
from .quantization import STORED_BITS_PER_WEIGHT, dummy_form, fp8_form, is_linear, is_multiplied
from .safetensors_checkpoint import SafetensorsCheckpoint
from .stacked_checkpoint import StackedCheckpoint
from .weight_cache import WeightCache

logger = logging.getLogger(__name__)

# Tensors of old checkpoints that are computed instead of loaded.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_DUMMY_STD = 0.02
_CPU = torch.device("cpu")
_UNQUANTIZED: Mapping[str, str] = MappingProxyType({})


class Checkpoint(Protocol):
    """The tensors of a model's files, by their Hugging Face names."""

    names: frozenset[str]

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype that a tensor is stored in; None if it is quantized."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Read a tensor, or a region of it, of any floating dtype. Raises ValueError for another dtype."""

    def has_form(self, name: str, form: str) -> bool:
        """Whether `quantized` returns the tensor in this form."""

    def quantized(self, name: str, form: str, region: Region | None = None) -> QuantizedWeight | Fp8Weight | None:
        """Read a matrix, or a region of it, in the quantized `form`, with the stored values.

        The columns of the region are whole groups, in the K forms whole super-blocks. Returns None if the matrix is
        stored in another form.
        """


def checkpoint_dtype(config: ModelConfig) -> str | None:
    """The dtype in the config, or else that of the stored embedding. None without files (dummy weights)."""
    if config.dtype is not None or config.load_format != "safetensors":
        return config.dtype
    checkpoint = _open(config)
    dtype = checkpoint.dtype(EMBEDDING) if EMBEDDING in checkpoint.names else None
    return None if dtype is None else dtype_name(dtype)


def stored_matrix_dtype(config: ModelConfig) -> torch.dtype | None:
    """The dtype that all matrices of a checkpoint are stored in. None if they differ or are quantized.

    Dummy weights have the values of a file in the config's dtype. Raises as `load_parameters` does.
    """
    if config.load_format == "dummy":
        return None if config.dtype is None else DTYPES.get(config.dtype)
    matrices = _matrices(config)
    checkpoint = _open_checked(config, matrices)
    dtypes = {checkpoint.dtype(part.name) for parameter in matrices for part in parameter.parts}
    return dtypes.pop() if len(dtypes) == 1 else None


def stored_forms(config: ModelConfig, dtype: torch.dtype) -> dict[str, str]:
    """The quantized form of each matrix of a GGUF file, of integers or of MXFP4 that has the stored values.

    The result is by parameter. `dtype`: the type of the activations. A form takes fewer bits a weight than this type,
    and than a compact weight if the matrix may be compact. Matrices without such a form are left out. Dummy weights
    have the form that the config describes. Raises as `load_parameters` does.
    """
    if config.load_format != "gguf" and not isinstance(config.quantization, IntegerConfig | Mxfp4Config):
        return {}
    if config.load_format == "dummy":
        return _dummy_forms(config)
    matrices = _matrices(config)
    checkpoint = _open_checked(config, matrices)
    forms: dict[str, str] = {}
    for parameter in matrices:
        name, shape, parts, _ = parameter
        may_be_compact = dtype == torch.bfloat16 and is_multiplied(parameter, config)
        max_bits = COMPACT_BITS if may_be_compact else 8 * dtype.itemsize
        found = [
            form
            for form, bits in STORED_BITS_PER_WEIGHT.items()
            if bits < max_bits and shape[1] % GROUP == 0 and all(checkpoint.has_form(part.name, form) for part in parts)
        ]
        if found:
            forms[name] = min(found, key=STORED_BITS_PER_WEIGHT.__getitem__)
    return forms


def stored_fp8_forms(config: ModelConfig) -> dict[str, str]:
    """The form of each linear layer whose matrices are all 8 bits wide in the checkpoint, by parameter.

    Experts have a form only if all experts of their layer have it, because a kernel computes all of them. Dummy weights
    have the forms that the config describes. Raises as `load_parameters` does.
    """
    assert isinstance(config.quantization, Fp8Config)
    if config.load_format == "dummy":
        return _without_mixed_experts(_dummy_forms(config), config)
    form = fp8_form(config.quantization)
    parameters = [parameter for parameter in family_of(config).parameters(config) if is_linear(parameter)]
    checkpoint = _open_checked(config, parameters)
    found = {p.name: form for p in parameters if all(checkpoint.has_form(part.name, form) for part in p.parts)}
    return _without_mixed_experts(found, config)


def _without_mixed_experts(forms: dict[str, str], config: ModelConfig) -> dict[str, str]:
    """The forms without those of experts in whose layer an expert has none."""
    experts = [p.name for p in family_of(config).parameters(config) if is_linear(p) and is_expert(p.name)]
    layers = {name: name.partition(".experts.")[0] for name in experts}
    mixed = {layer for name, layer in layers.items() if name not in forms}
    return {name: form for name, form in forms.items() if layers.get(name) not in mixed}


def _dummy_forms(config: ModelConfig) -> dict[str, str]:
    """The form of each linear layer that the config describes as quantized, by parameter."""
    forms: dict[str, str] = {}
    assert config.quantization is not None
    for parameter in filter(is_linear, family_of(config).parameters(config)):
        modules = [part.name.removesuffix(".weight") for part in parameter.parts]
        form = dummy_form(config.quantization, parameter)
        if form is not None and not any(map(config.quantization.excludes, modules)):
            forms[parameter.name] = form
    return forms


def load_parameters(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    cache: CacheFolder | None = None,
    shard: Shard = WHOLE,
    weight_dtype: torch.dtype | None = None,
    forms: Mapping[str, str] = _UNQUANTIZED,
    packed: bool = False,
    compact: bool = False,
) -> Mapping[str, Any]:
    """Load the family's parameters, by name: tensors, or QuantizedWeights and Fp8Weights for the names in `forms`.

    `seed`: seed of dummy weights. `cache`: folder of dequantised and of packed weights. `shard`: the rank whose part of
    each parameter is loaded. `weight_dtype`: the type of matrices that are not quantized, `dtype` by default. `forms`:
    the quantized form of parameters by name. `packed`: all layers are compiled CPU operations; then matrices from the
    cache are PackedWeights. `compact`: those of bfloat16 are compact, as layers/packing.py says.

    Raises ValueError for missing and unexpected tensors, for a tensor whose shape differs from the config's or whose
    type is not supported, and if the ranks cannot divide the model. On a CPU, a wrong type raises it when the parameter
    is read. With a cache, the checkpoint is checked only if it is read because the cache has no entry; with
    `packed`, on the first access.
    """
    check_shard(config, shard)
    matrices = weight_dtype or dtype
    has_float32_routers = config.experts is not None and config.experts.float32_router
    dtypes = ParameterDtypes(dtype, matrices, torch.float32 if has_float32_routers else matrices)
    if config.load_format == "dummy":
        return _dummy(config, dtypes, device, seed, forms, shard)

    def stored(on: torch.device = _CPU) -> StoredParameters:
        return StoredParameters(_open(config, on), config, dtypes, forms, shard)

    if packed and cache is not None and shard == WHOLE:
        return PackedParameters(cache, config, dtypes, forms, stored, compact=compact)
    # This cache keeps whole tensors that are not quantized. Others are read from the checkpoint itself.
    if cache is not None and not forms and shard == WHOLE and _is_dequantised_by_a_cpu(config, device):
        table = family_of(config).parameters(config)
        parameters = WeightCache(cache).parameters(weight_files(config), table, dtypes, stored)
    else:
        parameters = stored(device)
    return parameters if device.type == "cpu" else {name: tensor.to(device) for name, tensor in parameters.items()}


def _is_dequantised_by_a_cpu(config: ModelConfig, device: torch.device) -> bool:
    """Whether a CPU dequantises tensors of a GGUF file for `device`. That takes seconds to minutes."""
    if config.load_format != "gguf":
        return False
    if device.type == "cpu":
        return True
    from .gguf_checkpoint import GGUFCheckpoint  # importing gguf takes a tenth of a second

    return GGUFCheckpoint(config).needs_a_cpu


def _open(config: ModelConfig, device: torch.device = _CPU) -> Checkpoint:
    if config.load_format == "gguf":
        from .gguf_checkpoint import GGUFCheckpoint  # importing gguf takes a tenth of a second
        from .gguf_latents import GGUFLatents  # as above

        checkpoint = GGUFCheckpoint(config, device)
        return checkpoint if config.latent is None else GGUFLatents(checkpoint, config.latent)
    if isinstance(config.quantization, Mxfp4Config) or FAMILIES[config.architecture].stacked_experts:
        assert not isinstance(config.quantization, Fp8Config | IntegerConfig)
        return StackedCheckpoint(config.model_path, config.quantization, device)
    if isinstance(config.quantization, Fp8Config):
        return Fp8Checkpoint(config.model_path, config.quantization)
    if config.quantization is not None:
        return IntegerCheckpoint(config.model_path, config.quantization, device)
    if FAMILIES[config.architecture].joined_experts:
        return JoinedExperts(config.model_path)
    return SafetensorsCheckpoint(config.model_path)


def _open_checked(config: ModelConfig, parameters: Iterable[Parameter]) -> Checkpoint:
    """The checkpoint, after a check of the tensors of these parameters."""
    checkpoint = _open(config)
    _check_tensors(checkpoint, parameters)
    return checkpoint


def _matrices(config: ModelConfig) -> list[Parameter]:
    return [parameter for parameter in family_of(config).parameters(config) if len(parameter.shape) == 2]


class StoredParameters(Mapping[str, Any]):
    """The parameters of a checkpoint. Each access reads the parameter, and none is kept.

    A parameter that is one mapped tensor of the right dtype is a view of the file. Others are converted and put
    together from their parts.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtypes: ParameterDtypes,
        forms: Mapping[str, str],
        shard: Shard,
    ) -> None:
        """`forms`: quantized form of each parameter that is quantized. `shard`: the part of each that is read."""
        self._checkpoint = checkpoint
        self._dtypes = dtypes
        self._forms = forms
        self._shard = shard
        self._parameters = {parameter.name: parameter for parameter in family_of(config).parameters(config)}
        _check_tensors(checkpoint, self._parameters.values())
        needed = {part.name for parameter in self._parameters.values() for part in parameter.parts}
        if FAMILIES[config.architecture].has_text_config:
            logger.info("Only text is served: the weights for images in %s are not read", config.model_path)
        ignored = *_extra_layers(config), *unread_tensors(config)
        extra = {name for name in checkpoint.names - needed if not name.endswith(_IGNORED_SUFFIXES)}
        extra = {name for name in extra if not name.startswith(ignored)}
        # GPTQ checkpoints often have a bias of zeros for each layer.
        extra -= {name for name in extra if name.endswith(".bias") and not checkpoint.tensor(name).any()}
        if config.tie_word_embeddings and LM_HEAD in extra:
            # Some programs save the tied matrix twice. If the copies differ, the config is wrong.
            if not torch.equal(checkpoint.tensor(LM_HEAD), checkpoint.tensor(EMBEDDING)):
                raise ValueError(f"tie_word_embeddings is set, but the checkpoint's {LM_HEAD} differs from {EMBEDDING}")
            extra.discard(LM_HEAD)
        _refuse("unexpected", extra)

    def __getitem__(self, name: str) -> Any:
        parameter = self._parameters[name]
        dtype = self._dtypes.of(parameter)
        if parameter.split is Split.FIRST_RANK and self._shard.rank:
            return torch.zeros(parameter.shape, dtype=dtype)
        parts = [(part, self._shard.region(part.shape, parameter.split)) for part in parameter.parts]
        if name in self._forms:
            return _stacked([self._quantized(part, region, self._forms[name]) for part, region in parts])
        tensors = [self._tensor(part, region).to(dtype) for part, region in parts]
        whole = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
        return whole.view(self._shard.shape(parameter))

    def _tensor(self, part: Part, region: Region) -> torch.Tensor:
        numbers = part.computed(part.in_order(self._checkpoint.tensor(part.name, part.within_tensor(region))))
        return numbers[0] if part.is_only_row else numbers

    def _quantized(self, part: Part, region: Region, form: str) -> QuantizedWeight | Fp8Weight:
        as_stored = self._checkpoint.quantized(part.name, form, part.within_tensor(region))
        return _rounded(self._tensor(part, region), form) if as_stored is None else as_stored.with_rows(part.in_order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _extra_layers(config: ModelConfig) -> tuple[str, ...]:
    """What the names of tensors that predict further tokens begin with. Some keep their names of GGUF files. ERNIE and
    Qwen 3.5 have names of their own for them."""
    layers = range(config.num_layers, config.num_layers + config.num_extra_layers)
    return "model.mtp_", "mtp.", *(f"{prefix}.{layer}." for layer in layers for prefix in ("model.layers", "blk"))


def _rounded(weight: torch.Tensor, form: str) -> QuantizedWeight | Fp8Weight:
    return quantize_fp8(weight, form) if form in FP8_FORMS else quantize(weight, form)


def _stacked(weights: list[Any]) -> QuantizedWeight | Fp8Weight:
    return stack_fp8(weights) if isinstance(weights[0], Fp8Weight) else stacked(weights)


def _check_tensors(checkpoint: Checkpoint, parameters: Iterable[Parameter]) -> None:
    """Raises ValueError for tensors that are missing, and for one with another shape than the config implies."""
    parts = [part for parameter in parameters for part in parameter.parts]
    _refuse("missing", {part.name for part in parts} - checkpoint.names)
    for part in parts:
        actual = checkpoint.shape(part.name)
        if actual != part.tensor_shape:
            raise ValueError(f"tensor {part.name!r} has shape {actual}, the config implies {part.tensor_shape}")


def _dummy(
    config: ModelConfig,
    dtypes: ParameterDtypes,
    device: torch.device,
    seed: int,
    forms: Mapping[str, str],
    shard: Shard,
) -> dict[str, Any]:
    """Random parameters. A rank's part has the same numbers as that part of the whole parameter.

    Matrices are rounded to the config's dtype, as those of a file are.
    """
    generator = torch.Generator(device).manual_seed(seed)
    stored = stored_matrix_dtype(config)
    made: dict[str, Any] = {}
    for parameter in family_of(config).parameters(config):
        tensor = torch.empty(parameter.shape, dtype=dtypes.vectors, device=device)
        if parameter.name.endswith(("norm.weight", ".factor")):
            tensor = tensor.fill_(parameter.parts[0].factor).to(dtypes.of(parameter))
        elif parameter.name.endswith(".bias"):
            tensor.zero_()
        else:
            tensor.normal_(0, _DUMMY_STD, generator=generator)
            if stored is not None and stored.itemsize < tensor.itemsize:
                tensor = tensor.to(stored)
            tensor = tensor.to(dtypes.of(parameter))
        if shard != WHOLE:
            tensor = _part_of(tensor, parameter, shard)
        form = forms.get(parameter.name)
        made[parameter.name] = tensor if form is None else _rounded(tensor, form)
    return made


def _part_of(whole: torch.Tensor, parameter: Parameter, shard: Shard) -> torch.Tensor:
    """A rank's part of a parameter: its regions of the stacked tensors."""
    stack = whole.split([part.shape[0] for part in parameter.parts])
    return torch.cat([tensor[shard.region(tuple(tensor.shape), parameter.split)] for tensor in stack])


def _refuse(what: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        raise ValueError(f"tensors {what}: {some_of(found, 5)}")
