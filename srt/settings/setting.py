"""The annotation of a setting, from which its flag, its help and the docs table are made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """The annotation of a field: its line of help, and whether only the HTTP server has it.

    `secret`: no answer and no log shows its value. `repeatable`: the flag may be given several times. `several`: it may
    also have several values. `aliases`: other flags of the same setting.
    """

    help: str
    server_only: bool = False
    secret: bool = False
    repeatable: bool = False
    several: bool = False
    aliases: tuple[str, ...] = ()


def server_setting(text: str, *, secret: bool = False, repeatable: bool = False) -> Setting:
    """The annotation of a field that only the HTTP server has."""
    return Setting(text, server_only=True, secret=secret, repeatable=repeatable)


def flag_name(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")
