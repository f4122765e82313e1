"""The functions that a request offers, as the readers of tool calls need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Functions:
    """The functions by name, each with the JSON Schema of its parameters."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any] | None]) -> None:
        self._parameters = dict(parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Any:
        return iter(self._parameters)

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of the parameters, which are an object. Without one, a function takes any object."""
        return {**(self._parameters[name] or {}), "type": "object"}

    def is_text(self, name: str, parameter: str) -> bool | None:
        """Whether a parameter is a string by its schema. None: the schema allows other types, or does not say."""
        properties = self.schema(name).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if not isinstance(kind, str):
            return None
        return kind == "string"
