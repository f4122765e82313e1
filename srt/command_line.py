"""The command line of an engine: flags, YAML file and docs tables, all generated from the fields of ServerArgs."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from . import env
from .model_files.default_model import DEFAULT_MODEL_NAME, default_model_settings
from .server_args import ServerArgs
from .settings.setting import Setting, flag_name


@dataclass(frozen=True)
class _Flag:
    """A field in the form that argparse and the docs table need."""

    name: str
    type: type
    choices: tuple[str, ...] | None
    words: tuple[str, ...]
    """Values beside those of `type`."""
    optional: bool
    default: Any
    setting: Setting


def _groups() -> dict[str, list[_Flag]]:
    """The flags of each base of ServerArgs, by its title."""
    return {vars(group)["TITLE"]: _flags(group) for group in ServerArgs.__bases__}


def _flags(group: type) -> list[_Flag]:
    hints = typing.get_type_hints(group, include_extras=True)
    flags = []
    for field in dataclasses.fields(group):
        annotated = hints[field.name]
        base, setting = get_args(annotated)
        optional, words = False, ()
        if get_origin(base) in (types.UnionType, typing.Union):  # `Literal[...] | None` is a typing.Union
            optional = type(None) in get_args(base)
            base, *others = (arg for arg in get_args(base) if arg is not type(None))
            words = next((get_args(arg) for arg in others if get_origin(arg) is Literal), ())
        if get_origin(base) is list:  # the flag takes its items
            (base,) = get_args(base)
        choices = get_args(base) if get_origin(base) is Literal else None
        default = None if field.default is dataclasses.MISSING else field.default
        flags.append(_Flag(field.name, str if choices else base, choices, words, optional, default, setting))
    return flags


def add_arguments(parser: argparse.ArgumentParser, hidden: Collection[str] = ()) -> None:
    """Add a flag for each setting, and `--config FILE`: a YAML file of settings, which flags override.

    `hidden`: names of settings that the help does not show.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; the command line overrides it")
    for title, flags in _groups().items():
        group = parser.add_argument_group(title)
        for flag in flags:
            options = _argument(flag)
            if flag.name in hidden:
                options["help"] = argparse.SUPPRESS
            names = (flag_name(flag.name), *flag.setting.aliases)
            group.add_argument(*names, dest=flag.name, default=argparse.SUPPRESS, **options)


def _argument(flag: _Flag) -> dict[str, Any]:
    """The keywords for `add_argument`."""
    text = flag.setting.help.replace("%", "%%")
    if flag.type is bool:
        return {"action": "store_true", "help": text}
    name = flag.type.__name__.upper()
    if flag.setting.several:
        return {"action": "extend", "nargs": "+", "metavar": name, "help": text}
    if flag.setting.repeatable:
        return {"action": "append", "metavar": name, "help": text}
    shown = "" if flag.default is None else f" (default: {flag.default})"
    return {
        "type": _parser(flag),
        "choices": flag.choices,
        "metavar": None if flag.choices else "|".join((name, *flag.words)),
        "help": text + shown,
    }


def _parser(flag: _Flag) -> Callable[[str], Any]:
    """Converts the text after a flag."""
    if not flag.words:
        return flag.type

    def parse(text: str) -> Any:
        if text in flag.words:
            return text
        try:
            return flag.type(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be a {flag.type.__name__}, or one of {', '.join(flag.words)}; got {text!r}"
            ) from None

    return parse


def from_namespace(
    namespace: argparse.Namespace, default_model: Callable[[], dict[str, str]] = default_model_settings
) -> ServerArgs:
    """Make settings from parsed arguments. If neither they nor the file name a model, `default_model` returns it.

    Raises ValueError as ServerArgs and `default_model` do.
    """
    known = {field.name for field in dataclasses.fields(ServerArgs)}
    values: dict[str, Any] = {}
    if getattr(namespace, "config", None):
        values.update(_read_config(namespace.config))
        try:
            ServerArgs.check_names(values)
        except ValueError as error:
            raise ValueError(f"--config {namespace.config}: {error}") from error
    values.update({key: value for key, value in vars(namespace).items() if key in known})
    if "model_path" not in values:
        values = {**default_model(), **values}
    if "api_key" not in values:
        values["api_key"] = env.api_key()
    # A key from a file usually ends with a line break.
    if isinstance(values["api_key"], str):
        values["api_key"] = values["api_key"].strip()
    elif isinstance(values["api_key"], list):
        keys = [key.strip() if isinstance(key, str) else key for key in values["api_key"]]
        values["api_key"] = keys[0] if len(keys) == 1 else keys
    return ServerArgs.from_dict(values)


def _read_config(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        root = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    except Exception as error:  # PyYAML raises any error for deep nesting, and for a value that does not fit its tag
        raise ValueError(f"--config {path} is not valid YAML: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must contain a YAML mapping of settings, got {type(content).__name__}")
    names = [str(key.value).replace("-", "_") for key, _ in root.value]
    for name in names:
        if names.count(name) > 1:  # YAML itself takes the last one
            raise ValueError(f"--config {path} has the setting {name} {names.count(name)} times")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def docs_tables() -> str:
    """The tables of docs/server_args.md, one for each group of settings."""
    return "\n".join(f"## {title}\n\n{_docs_table(flags)}" for title, flags in _groups().items())


def _docs_table(flags: Sequence[_Flag]) -> str:
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for flag in flags:
        values = " \\| ".join(flag.choices or (flag.type.__name__, *flag.words))
        default = "-" if flag.default is None else f"`{flag.default}`"
        default = DEFAULT_MODEL_NAME if flag.name == "model_path" else default
        kind = "" if flag.type is bool else f" {values}"
        rows.append(f"| `{flag_name(flag.name)}`{kind} | {default} | {flag.setting.help} |")
    return "\n".join(rows) + "\n"
