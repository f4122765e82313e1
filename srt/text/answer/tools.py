"""The functions that a request offers, as the readers of tool calls need them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NAME = re.compile(r"[\w.\-]+")
"""A run of characters of names: of functions, of calls and of arguments."""
KINDS: dict[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}
"""JSON Schema's names for the type of a value."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Functions:
    """The functions by name, each with the JSON Schema of its parameters."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any] | None]) -> None:
        self._parameters = dict(parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Any:
        return iter(self._parameters)

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of the parameters, which are an object. Without one, a function has no parameters."""
        parameters = self._parameters[name]
        return _NO_PARAMETERS if parameters is None else {**parameters, "type": "object"}

    def is_text(self, name: str, parameter: str) -> bool:
        """Whether the schema says that a parameter is a string and nothing else."""
        return self._parameter(name, parameter).get("type") == "string"

    def kinds(self, name: str, parameter: str) -> frozenset[str]:
        """The types that the schema allows for a parameter, in JSON Schema's names; empty if it does not say."""
        return _kinds(self._parameter(name, parameter), self.schema(name))

    def _parameter(self, name: str, parameter: str) -> Mapping[str, Any]:
        """The schema of a parameter; empty if there is none."""
        properties = self.schema(name).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}


def _kinds(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    """The types of a schema: `type` is one or a list of them, `enum` and `const` have values, `anyOf` and `oneOf` have
    alternatives, and `$ref` names another part of the whole schema, `root`.

    There is no recursion, because a client chooses the depth.
    """
    kinds: set[str] = set()
    followed: set[str] = set()
    alternatives: list[Any] = [schema]
    while alternatives:
        one = alternatives.pop()
        if not isinstance(one, Mapping):
            return frozenset()
        values = [one["const"]] if "const" in one else one.get("enum")
        if isinstance(values, list):
            kinds.update(kind for value in values for kind in KINDS[type(value)])
            continue
        kind = one.get("type")
        ref = one.get("$ref")
        if kind is None and isinstance(ref, str):
            if ref not in followed:  # it may lead back to itself
                followed.add(ref)
                alternatives.append(_part(root, ref))
            continue
        if kind is None:
            further = one.get("anyOf", one.get("oneOf"))
            if not isinstance(further, list) or not further:
                return frozenset()
            alternatives += further
            continue
        named = kind if isinstance(kind, list) else [kind]
        if not all(isinstance(name, str) for name in named):
            return frozenset()
        kinds.update(named)
    return frozenset(kinds)


def _part(root: Mapping[str, Any], ref: str) -> Any:
    """The part of a schema that a `$ref` such as `#/$defs/Day` names; None if there is none."""
    part: Any = root
    for key in ref.removeprefix("#/").split("/"):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part
