"""The settings of `tercet.Engine` and `tercet.LocalEngine`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .model_files.default_model import default_model_settings
from .server_args import ServerArgs, declarations
from .settings.checks import check_tokenizer_settings


def engine_settings(
    model_path: str | os.PathLike[str] | None,
    server_args: ServerArgs | None,
    settings: Mapping[str, Any],
    *,
    refused: Mapping[str, str],
) -> ServerArgs:
    """Return `server_args`, or make them of `model_path` and `settings`. Without both: the default model.

    A path may be a text or an `os.PathLike`.
    `refused`: setting -> its owner, for settings that this engine does not accept. Raises ValueError.
    """
    if server_args is not None:
        if model_path is not None or settings:
            raise ValueError("give either server_args, or model_path and settings, not both")
        if not isinstance(server_args, ServerArgs):
            raise ValueError(f"server_args must be tercet.ServerArgs, got {type(server_args).__name__}")
        return server_args
    for name in sorted(set(settings) & refused.keys()):
        raise ValueError(f"{name} is a setting of {refused[name]}; this engine does not accept it")
    model = default_model_settings() if model_path is None else {"model_path": model_path}
    values = {**model, **settings}
    made = ServerArgs.from_dict(
        {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    )
    check_tokenizer_settings(made)
    return made


def http_settings() -> dict[str, str]:
    """The settings that only the HTTP server reads, as an argument `refused` of `engine_settings`."""
    names = [name for name, setting in declarations().items() if setting.server_only]
    return dict.fromkeys(names, "the HTTP server")
