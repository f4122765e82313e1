"""What Tercet does with a JSON schema before a library compiles it.

A schema is closed: an object with `properties` gets no other properties, unless the schema mentions them. Dates are
days that exist. Bounds of numbers are ones that a library does not round. A schema is plain if it has only keywords
that a fast library (xgrammar) is known to enforce completely. That library ignores other keywords, so it must not get
them.
"""

from __future__ import annotations

import json
import math
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

MAX_INTEGER = (1 << 63) - 1024
"""The largest integer of a schema, and minus the smallest: the last float64 that is a 64-bit integer."""
_FIRST_ROUNDED = 1 << 53
"""From here on, float64 does not hold every integer, and llguidance keeps numbers as float64."""
_BOUNDS = (("maximum", "exclusiveMaximum", 1), ("minimum", "exclusiveMinimum", -1))

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


def with_exact_numbers(schema: Any, *, may_round_constants: bool = False) -> Any:
    """The schema with bounds that llguidance does not round.

    A bound of at least 2**53 becomes the nearest one inside the range that float64 holds, at most MAX_INTEGER. So a
    maximum of 64 bits limits little, as it is meant to. Raises ValueError if a minimum is above MAX_INTEGER, a maximum
    below -MAX_INTEGER, or an integer of `enum` or `const` is one that float64 does not hold, unless it may be rounded.
    """
    copy = json.loads(json.dumps(schema))
    for part in _walk(copy):
        if not may_round_constants:
            _check_constants([part.get("enum"), part.get("const")])
        for name, excluding, sign in _BOUNDS:
            for key in (name, excluding):
                bound = part.get(key)
                if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) < _FIRST_ROUNDED:
                    continue
                kept = sign * _exact_maximum(sign * bound, key == excluding)
                if sign * kept < -MAX_INTEGER:
                    side = "at least -" if sign > 0 else "at most "
                    raise ValueError(f"{key} must be {side}{MAX_INTEGER}, got {bound!r:.40}")
                del part[key]
                other = part.get(name)
                has_other = isinstance(other, int | float) and sign * other < sign * kept
                part[name] = other if has_other else kept
    return copy


def _exact_maximum(bound: float, is_excluded: bool) -> int:
    """The largest integer that float64 holds and that this bound allows, at most MAX_INTEGER."""
    if bound > MAX_INTEGER:
        return MAX_INTEGER
    if bound < -MAX_INTEGER:
        return -MAX_INTEGER - 1
    kept = float(bound)
    if kept > bound or (is_excluded and kept == bound):
        kept = math.nextafter(kept, -math.inf)
    return int(kept)


def _check_constants(values: list[Any]) -> None:
    """Raises ValueError. Needs no recursion, however deep a value is."""
    todo = values
    while todo:
        value = todo.pop()
        if isinstance(value, int) and (abs(value) > MAX_INTEGER or int(float(value)) != value):
            raise ValueError(
                f"an integer of enum or const must be one that float64 holds, from -{MAX_INTEGER} to {MAX_INTEGER}; "
                f"got {value!r:.40}"
            )
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()


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
    return value is None or (isinstance(value, int) and abs(value) <= MAX_INTEGER)


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
