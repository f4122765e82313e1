"""The settings of an engine and of its HTTP server, and what follows from them.

Each setting is one annotated field of a class in `settings/`. The command line, its help, the docs (command_line.py)
and the checks are made from these fields alone.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import msgspec

from .model_files.model_name import model_name
from .origins import parse_origins
from .settings.checks import check_settings
from .settings.device import DeviceSettings
from .settings.failures import FailureSettings
from .settings.http import HttpSettings
from .settings.model import ModelSettings
from .settings.observability import ObservabilitySettings
from .settings.prefix_cache import PrefixCacheSettings
from .settings.scheduler import SchedulerSettings
from .settings.setting import Setting


@dataclass(frozen=True, kw_only=True)
class ServerArgs(
    ModelSettings,
    HttpSettings,
    DeviceSettings,
    SchedulerSettings,
    PrefixCacheSettings,
    FailureSettings,
    ObservabilitySettings,
):
    """The settings of an engine. They are frozen: a change makes a new object (`dataclasses.replace`).

    Each base is a group of settings; the help and the docs have the groups in this order.

    Raises ValueError that names the flag, the given value and the allowed ones.
    """

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def honours_retention(self) -> bool:
        """Whether the prefix cache keeps retained prefixes longer than others."""
        return self.radix_eviction_policy == "value" and not self.disable_radix_cache

    def with_seed(self) -> ServerArgs:
        """The same settings with `random_seed` set. If it is None, a seed is drawn from the system."""
        if self.random_seed is not None:
            return self
        return dataclasses.replace(self, random_seed=secrets.randbits(32))

    @property
    def model_name(self) -> str:
        """The model's name in the API. It tells nothing of the server's folders."""
        return self.served_model_name or model_name(self.model_path)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that open the server; none without a key."""
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key)

    def without_secrets(self) -> dict[str, Any]:
        """All settings that may be shown, by their names."""
        declared = declarations()
        return {name: value for name, value in dataclasses.asdict(self).items() if not declared[name].secret}

    @property
    def origins(self) -> tuple[str, ...]:
        """The allowed origins; ("*",) for all."""
        return parse_origins(self.allowed_origins)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerArgs:
        """Make settings from keyword arguments or a parsed file. Raises ValueError for a wrong name or type."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown setting {', '.join(unknown)}; known settings: {', '.join(sorted(known))}")
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


def declarations() -> dict[str, Setting]:
    """What each setting says of itself, by its name."""
    hints = get_type_hints(ServerArgs, include_extras=True)
    return {field.name: get_args(hints[field.name])[1] for field in dataclasses.fields(ServerArgs)}
