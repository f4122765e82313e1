"""New weights for a running model: read from disk, checked whole, and put in the place of the old ones.

Nothing of the running model changes before all new weights are in memory. So a failure leaves the old ones serving.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...srt.model_files.model_config import ModelConfig
from ..device.accelerator import Accelerator
from ..device.dtypes import dtype_name
from ..device.memory import Memory
from ..models.family import Model, Parameters
from ..weights.loader import load_parameters
from .recorded_steps import RecordedSteps
from .settings import RunnerSettings, resolve_linears, resolve_weights, weight_bytes

_MAY_DIFFER = frozenset(
    {
        "model_path", "load_format", "dtype", "quantization", "generation", "norm_offset", "embedding_scale",
        "num_extra_layers",
    }
)  # fmt: skip
"""Fields of a config that a running model does not depend on. The dtype of the engine stays.

`embedding_scale` has the rounding of the checkpoint's dtype. The epsilons of norms (`residual_norm_eps`) also depend on
it, but by far less than float32 shows.
"""
_MARGIN_BYTES = 64 << 20
"""Memory for what is read and packed at a time."""


class BuiltModel(NamedTuple):
    """A model with its recorded steps."""

    model: Model
    recorded: RecordedSteps | None


def check_same_model(old: ModelConfig, new: ModelConfig) -> None:
    """Raises ValueError, with the names of the fields, if the new weights are of another model."""
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in _MAY_DIFFER]
    different = [name for name in names if getattr(old, name) != getattr(new, name)]
    if old.embedding_factor != new.embedding_factor:
        different.append("embedding_scale")
    if different:
        name = different[0]
        more = f" (and {', '.join(different[1:])})" if different[1:] else ""
        raise ValueError(
            f"the new weights are of another model: {name} is {getattr(new, name)} instead of "
            f"{getattr(old, name)}{more}"
        )


class CopiedParameters(Mapping[str, Any]):
    """The parameters of another mapping, none of which shares memory with a file that may change later."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> Any:
        found = self._parameters[name]
        return found.clone() if isinstance(found, torch.Tensor) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class WeightUpdater:
    """Loads weights into a running model. It belongs to one runner."""

    def __init__(
        self,
        settings: RunnerSettings,
        config: ModelConfig,
        *,
        host_memory: Callable[[], Memory],
        build: Callable[[RunnerSettings, Parameters], BuiltModel],
        use: Callable[[BuiltModel], None],
        accelerator: Accelerator | None,
        in_place: Parameters,
    ) -> None:
        """`build`: makes a model from settings and parameters. `use`: puts it in the place of the old one. On a
        GPU, no model is built, because the device has no memory for both. The new weights are written to `in_place`,
        the tensors that the running model and its graphs read. `accelerator`: None on a CPU."""
        self._settings = settings
        self._config = config
        self._host_memory = host_memory
        self._build = build
        self._use = use
        self._accelerator = accelerator
        self._in_place = in_place

    @torch.inference_mode()
    def update(self, config: ModelConfig) -> RunnerSettings:
        """Loads the weights that `config` names. Returns the settings with the types of the new matrices.

        No step may be in flight, and no KV of the old weights may be used afterwards.

        Raises ValueError and OSError for weights that cannot be used, and if the memory does not suffice. Then
        nothing has changed.
        """
        if self._accelerator is not None and _has_copies(config):
            raise ValueError(
                "on a GPU, the weights of a model with latent attention, short convolutions or recurrent layers "
                "cannot be updated: restart the server"
            )
        settings = self.settings_for(config)
        needed, available = weight_bytes(settings, config) + _MARGIN_BYTES, self._host_memory().available
        if needed > available:
            raise ValueError(
                f"the new weights need {needed >> 20} MiB beside the old ones, but only {available >> 20} MiB of "
                "memory are available"
            )
        # No weight cache: it is for weights that are loaded again and again.
        stored = load_parameters(
            config,
            settings.dtype,
            torch.device("cpu"),
            seed=settings.seed,
            weight_dtype=settings.weight_dtype,
            forms=settings.weight_forms,
        )
        if self._accelerator is None:
            self._use(self._build(settings, CopiedParameters(stored)))
        else:
            self._overwrite(self._in_place, stored)
            self._accelerator.record_event().synchronize()
        return settings

    def settings_for(self, config: ModelConfig) -> RunnerSettings:
        """The settings with the types of the new matrices. Their file may store other types than the old one.

        Raises ValueError and OSError for weights that cannot be used.
        """
        check_same_model(self._config, config)
        settings = self._settings
        weights = resolve_weights(
            settings.dtype, config, settings.attention_backend, settings.quantization, settings.cpu_kernels
        )
        linears = resolve_linears(settings.cpu_kernels, settings.dtype, weights, config)
        return dataclasses.replace(
            settings,
            weight_dtype=weights.dtype,
            weight_forms=weights.forms,
            onednn=linears.onednn,
            compact=linears.compact,
        )

    def _overwrite(self, targets: Parameters, stored: Parameters) -> None:
        """Read all new weights to the host, and only then write the first one to the device."""
        sources = {name: stored[name].clone() for name in targets}
        for name, target in targets.items():
            found, wanted = _described(sources[name]), _described(target)
            if found != wanted:
                raise ValueError(f"{name} is {found}, but the running model reads {wanted}")
        for name, target in targets.items():
            for to, new in zip(_tensors(target), _tensors(sources[name]), strict=True):
                to.copy_(new)


def _has_copies(config: ModelConfig) -> bool:
    """Whether layers read copies of weights in other types and orders, which new weights would not reach."""
    return any(each is not None for each in (config.latent, config.convolutions, config.delta_net))


def _tensors(parameter: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a parameter: itself, or the values and scales of a quantized one."""
    return (parameter,) if isinstance(parameter, torch.Tensor) else tuple(parameter)


def _described(parameter: Any) -> str:
    """The types and shapes of a parameter's tensors."""
    tensors = _tensors(parameter)
    return " with ".join(f"{dtype_name(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors)
