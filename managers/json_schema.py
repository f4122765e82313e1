"""What Tercet does with a JSON schema before a library compiles it.

A schema is closed: an object with `properties` gets no other properties, unless the schema mentions them. Dates are
days that exist. A schema is plain if it has only keywords that a fast library (xgrammar) is known to enforce
completely. That library ignores other keywords, so it must not get them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_PLAIN_CHARS = 1 << 14
"""A longer schema is not plain: the fast library would compile it too slowly."""
_MAX_PLAIN_DEPTH = 32
_LABELS = {"title", "description", "default", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly"}
_PLAIN = _LABELS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "$defs",
}
_SCALARS = {"string", "integer", "number", "boolean", "null"}
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_DATES = ("date", "date-time")
_OPENS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
"""Keywords that speak of further properties."""

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_REAL_DAY = (
    "^(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(?:0[13-9]|1[0-2]|02-(?:[01][0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
"""The start of a date in a year after 0000, and 29 February only in a leap year."""


def load_schema(text: str) -> Any:
    """Decode a schema. Raises ValueError."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a JSON schema must be an object, got {type(schema).__name__}")
    return {} if schema is True else schema


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in each object that has `properties` and nothing about others.

    An object whose `required` names a property without a schema stays open. A schema with `allOf` is returned as it is,
    because each of its parts must leave room for the others.
    """
    if any("allOf" in part for part in _walk(schema)):
        return schema
    copy = json.loads(json.dumps(schema))
    for part in _walk(copy):
        properties = part.get("properties")
        if not isinstance(properties, dict) or any(name in part for name in _OPENS):
            continue
        required = part.get("required")
        if not isinstance(required, list) or all(isinstance(name, str) and name in properties for name in required):
            part["additionalProperties"] = False
    return copy


def with_real_days(schema: Any) -> Any:
    """The schema with the formats `date` and `date-time` limited to days that exist.

    A library's own pattern of these formats allows 29 February in each year, and the year 0000, which Python's `date`
    and pydantic refuse.
    """
    if not any(part.get("format") in _DATES for part in _walk(schema)):
        return schema
    copy = json.loads(json.dumps(schema))
    for part in _walk(copy):
        others = part.get("allOf", [])
        if part.get("format") in _DATES and isinstance(others, list):
            part["allOf"] = [*others, {"pattern": _REAL_DAY}]
    return copy


def is_plain(schema: Any, text: str) -> bool:
    """Whether the schema, with this text, has only plain keywords."""
    if len(text) > MAX_PLAIN_CHARS or not isinstance(schema, dict):
        return False
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, dict) or any(
        not isinstance(one, dict) or "$ref" in one for one in definitions.values()
    ):
        return False
    places = {f"#/$defs/{name}" for name in definitions}
    parts = [*definitions.values(), {name: value for name, value in schema.items() if name != "$defs"}]
    return "$ref" not in schema and all(_is_plain(part, places, 0) for part in parts)


def is_any(schema: Any) -> bool:
    """Whether the schema takes any value or any object: that of JSON mode, and of a function that is not strict."""
    if not isinstance(schema, dict):
        return False
    limits = {name: value for name, value in schema.items() if name not in _LABELS}
    return limits in ({}, {"type": "object"})


def _is_plain(schema: Any, places: set[str], depth: int) -> bool:
    if not isinstance(schema, dict) or depth > _MAX_PLAIN_DEPTH or not schema.keys() <= _PLAIN or "$defs" in schema:
        return False
    keys = schema.keys() - _LABELS
    if "$ref" in keys:
        return keys == {"$ref"} and schema["$ref"] in places
    if "enum" in keys or "const" in keys:
        values = schema["enum"] if "enum" in keys else [schema["const"]]
        return len(keys) == 1 and isinstance(values, list) and bool(values) and all(map(_is_plain_text, values))
    if "anyOf" in keys:
        parts = schema["anyOf"]
        return keys == {"anyOf"} and isinstance(parts, list) and bool(parts) and _all_plain(parts, places, depth)
    kind = schema.get("type")
    if isinstance(kind, str) and kind in _SCALARS:
        return keys == {"type"}
    if kind == "array":
        return keys == {"type", "items"} and _is_plain(schema["items"], places, depth + 1)
    return kind == "object" and _is_plain_object(schema, keys, places, depth)


def _is_plain_object(schema: dict[str, Any], keys: set[str], places: set[str], depth: int) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        keys <= {"type", "properties", "required", "additionalProperties"}
        and schema.get("additionalProperties", False) is False
        and isinstance(properties, dict)
        and all(map(_is_plain_text, properties))
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and _all_plain(properties.values(), places, depth)
    )


def _all_plain(parts: Any, places: set[str], depth: int) -> bool:
    return all(_is_plain(part, places, depth + 1) for part in parts)


def _is_plain_text(value: Any) -> bool:
    """Whether a constant has one spelling in JSON that every library agrees on."""
    if isinstance(value, str):
        return value.isascii() and value.isprintable()
    return value is None or isinstance(value, bool | int)


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects of a schema that are schemas themselves. Needs no recursion, however deep the schema is."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _MAPS:
            if isinstance(part.get(name), dict):
                todo += part[name].values()
        for name in _LISTS:
            if isinstance(part.get(name), list):
                todo += part[name]
        for name in _SINGLES:
            inner = part.get(name)
            todo += inner if isinstance(inner, list) else [inner]
