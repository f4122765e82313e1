"""LoRA adapters as all processes name them: the value of --lora-paths, references, and the messages that load them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

MAX_NAME_CHARS = 256
_MARK = "\0"


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """The adapter of a request. An adapter of the same name with another fingerprint computes other tokens."""

    name: str
    fingerprint: str
    """A hex digest of its config and its weights."""


class AdapterFacts(msgspec.Struct, frozen=True):
    """A loaded adapter."""

    name: str
    path: str
    fingerprint: str
    number: int
    """Adapters are numbered from 1 in the order of their loads. No number comes twice while the engine runs."""

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.name, self.fingerprint)


class LoadAdapterReq(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load an adapter. The answer is an AdapterReply."""

    call_id: int
    name: str
    path: str


class UnloadAdapterReq(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Unload an adapter when its last request has ended. The answer is an AdapterReply, and comes after that."""

    call_id: int
    name: str


class AdapterReply(msgspec.Struct, frozen=True, tag="adapter"):
    """The adapter is loaded or unloaded. With `refusal` or `failure` nothing has changed."""

    call_id: int
    adapter: AdapterFacts | None = None
    """The one that was loaded or unloaded."""
    refusal: str | None = None
    """Why the engine does not do it."""
    failure: str | None = None
    """What failed in the engine."""


def parse_lora_paths(given: Iterable[str] | None) -> dict[str, str]:
    """The path of each adapter by its name. Raises ValueError.

    `given`: NAME=PATH, PATH, whose name is the path, or JSON with `lora_name` and `lora_path`, as SGLang takes them.
    """
    paths: dict[str, str] = {}
    for text in given or ():
        name, path = _name_and_path(text)
        check_adapter_name(name, "--lora-paths")
        if not path:
            raise ValueError(f"--lora-paths {text}: the path of {name!r} is empty")
        if name in paths:
            raise ValueError(f"--lora-paths names {name!r} twice")
        paths[name] = path
    return paths


def written_lora_paths(paths: Mapping[str, str]) -> list[str]:
    """The value of --lora-paths that `parse_lora_paths` reads as `paths`."""
    return [json.dumps({"lora_name": name, "lora_path": path}) for name, path in paths.items()]


def check_adapter_name(name: str, what: str) -> None:
    """Raises ValueError for a name that no adapter may have. `what`: the flag or the field that has it."""
    if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
        raise ValueError(f"{what}: the name of an adapter must have 1 to {MAX_NAME_CHARS} printable characters")


def namespace_of(salt: str, adapter: AdapterRef | None) -> str:
    """The namespace of the prefixes of a request in the cache. K and V depend on the adapter.

    Other salts and other fingerprints give other namespaces, whatever a client sends as its salt.
    """
    if adapter is None and not salt.startswith(_MARK):
        return salt
    return f"{_MARK}{'' if adapter is None else adapter.fingerprint}{_MARK}{salt}"


def parts_of(namespace: str) -> tuple[str, str]:
    """The fingerprint of the adapter, or "", and the salt, of which `namespace_of` has made a namespace."""
    if not namespace.startswith(_MARK):
        return "", namespace
    fingerprint, _, salt = namespace[1:].partition(_MARK)
    return fingerprint, salt


def _name_and_path(text: str) -> tuple[str, str]:
    if text.startswith("{"):
        return _from_json(text)
    name, separator, path = text.partition("=")
    return (name, path) if separator else (text, text)


def _from_json(text: str) -> tuple[str, str]:
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"--lora-paths {text}: must be NAME=PATH, PATH or a JSON object")
    unknown = sorted(given.keys() - {"lora_name", "lora_path", "pinned"})  # pinned: all adapters stay in memory
    name, path = given.get("lora_name"), given.get("lora_path")
    if unknown or not isinstance(name, str) or not isinstance(path, str):
        raise ValueError(f"--lora-paths {text}: must have the texts lora_name and lora_path, and may have pinned")
    return name, path
