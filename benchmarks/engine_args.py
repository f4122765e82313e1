"""The flags for the engine under test: the settings of `tercet serve`, except those of the HTTP server.

`--model-path` also accepts the name of a preset. If neither it nor `--config` names a model, the default model is used,
or its shape alone (a preset) if a benchmark needs no more. Such a benchmark runs without an installed model. A model
that is only a config.json gets random weights. Prompts are token ids, so no tokenizer is loaded.
"""

from __future__ import annotations

import argparse

from ..srt import command_line as settings
from ..srt.engine_settings import http_settings
from ..srt.model_files.default_model import default_model_settings
from ..srt.model_files.lora_limits import with_lora_limits
from ..srt.server_args import ServerArgs
from .presets import DEFAULT_PRESET, model_path


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser, hidden=http_settings())  # `engine_args` refuses these


def engine_args(
    parser: argparse.ArgumentParser, namespace: argparse.Namespace, *, needs_only_shape: bool = False
) -> ServerArgs:
    """The engine's settings. Exits through `parser.error` for invalid settings.

    `needs_only_shape`: the benchmark reads neither the weights nor the tokenizer of its model.
    """
    for name in sorted(http_settings().keys() & set(vars(namespace))):
        parser.error(f"{name} is a setting of the HTTP server, which this benchmark does not start")
    defaults = {"skip_tokenizer_init": True, "log_level": "warning"}
    try:
        if hasattr(namespace, "model_path"):
            defaults["model_path"] = path = model_path(namespace.model_path)
            if path.endswith(".json"):
                defaults.setdefault("load_format", getattr(namespace, "load_format", "dummy"))
        given = argparse.Namespace(**{**vars(namespace), **_missing(namespace, defaults)})
        args = settings.from_namespace(given, _default_shape if needs_only_shape else default_model_settings)
        return with_lora_limits(args)
    except ValueError as error:
        parser.error(str(error))


def _default_shape() -> dict[str, str]:
    return {"model_path": model_path(DEFAULT_PRESET), "load_format": "dummy"}


def _missing(namespace: argparse.Namespace, defaults: dict[str, object]) -> dict[str, object]:
    """The default settings that the command line does not give, and the path in place of a preset's name."""
    return {name: value for name, value in defaults.items() if name == "model_path" or not hasattr(namespace, name)}
