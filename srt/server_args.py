"""The settings of an engine and of its HTTP server, and what follows from them.

Each setting is one annotated field of a class in `settings/`. The command line, its help, the docs (command_line.py)
and the checks are made from these fields alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from .adapters import parse_lora_paths
from .model_files.model_name import model_name
from .origins import parse_origins
from .settings.checks import check_settings
from .settings.device import DeviceSettings
from .settings.failures import FailureSettings
from .settings.http import HttpSettings
from .settings.lora import LoraSettings
from .settings.model import ModelSettings
from .settings.observability import ObservabilitySettings
from .settings.prefix_cache import PrefixCacheSettings
from .settings.scheduler import SchedulerSettings
from .settings.setting import Setting, flag_name


@dataclass(frozen=True, kw_only=True)
class ServerArgs(
    ModelSettings,
    LoraSettings,
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
        if self.lora_paths:
            object.__setattr__(self, "enable_lora", True)  # the only way to change a frozen object
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
    def adapter_paths(self) -> dict[str, str]:
        """The path of each adapter of --lora-paths by its name."""
        return parse_lora_paths(self.lora_paths)

    @property
    def model_name(self) -> str:
        """The model's name in the API. It tells nothing of the server's folders."""
        return self.served_model_name or model_name(self.model_path)

    def is_model(self, name: str) -> bool:
        """Whether a client that gives this name as its `model` means the model itself, without an adapter."""
        return name in (self.model_name, self.model_path, "default")

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
    def check_names(cls, names: Iterable[str]) -> None:
        """Raises ValueError for a name that no setting has."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in sorted(set(names) - known):
            near = difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(near)}?" if near else "docs/server_args.md lists all"
            raise ValueError(f"unknown setting {name}; {hint}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerArgs:
        """Make settings from keyword arguments or a parsed file. Raises ValueError for a wrong name or type."""
        cls.check_names(values)
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            if error.__cause__ is not None:  # of `check_settings`
                raise ValueError(str(error.__cause__)) from error
            name = str(error).partition(" - at `$.")[2].partition("`")[0].partition("[")[0]
            if name not in declarations():
                raise ValueError(str(error)) from error
            given = "a value of another type" if declarations()[name].secret else repr(values[name])
            raise ValueError(f"{flag_name(name)} must be {_allowed(name)}, got {given}") from error


def _allowed(name: str) -> str:
    """The values of a setting, for an error: types and words."""
    allowed: list[str] = []
    base = get_args(get_type_hints(ServerArgs, include_extras=True)[name])[0]
    for part in get_args(base) if isinstance(base, UnionType) or get_origin(base) is Union else (base,):
        if get_origin(part) is Literal:
            allowed += map(str, get_args(part))
        elif get_origin(part) is list:
            allowed.append(f"list of {get_args(part)[0].__name__}")
        else:
            allowed.append({NoneType: "null", bool: "true or false"}.get(part) or str(getattr(part, "__name__", part)))
    return allowed[0] if len(allowed) == 1 else f"{', '.join(allowed[:-1])} or {allowed[-1]}"


def declarations() -> dict[str, Setting]:
    """What each setting says of itself, by its name."""
    hints = get_type_hints(ServerArgs, include_extras=True)
    return {field.name: get_args(hints[field.name])[1] for field in dataclasses.fields(ServerArgs)}
