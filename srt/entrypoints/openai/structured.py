"""Turns the fields of the OpenAI dialects that constrain the output into sampling parameters."""

from __future__ import annotations

import re
from typing import Any

from ...errors import InvalidRequest
from .protocol import OpenAIBody
from .structured_protocol import ResponseFormat, StructuredOutputs

ANY_OBJECT = '{"type":"object"}'
"""The schema of JSON mode."""
MAX_CHOICES = 1000

_FIELDS = ("response_format", "regex", "ebnf", "json_schema", "structural_tag", "structured_outputs")
_VLLM_NAMES = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}


def grammar_field(body: OpenAIBody) -> str | None:
    """The body's field that constrains the output. Raises InvalidRequest if there are several."""
    given = [name for name in _FIELDS if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.type == "text":
        _check_format(body.response_format)
        given.remove("response_format")
    if len(given) > 1:
        raise InvalidRequest(f"only one of {', '.join(_FIELDS)} is allowed, got {' and '.join(given)}", param=given[1])
    return given[0] if given else None


def grammar_of(body: OpenAIBody) -> dict[str, Any]:
    """The sampling parameter that a body's constraint means; empty without one. Raises InvalidRequest."""
    field = grammar_field(body)
    if field is None:
        return {}
    value = getattr(body, field)
    if isinstance(value, ResponseFormat):
        return _of_response_format(value)
    if isinstance(value, StructuredOutputs):
        return _of_structured_outputs(value)
    return {field: value}


def _of_response_format(given: ResponseFormat) -> dict[str, Any]:
    _check_format(given)
    if given.type == "json_object":
        return {"json_schema": ANY_OBJECT}
    if given.type == "json_schema":
        if given.json_schema is None:
            raise InvalidRequest(
                "response_format.json_schema is required with type json_schema", param="response_format.json_schema"
            )
        schema = given.json_schema.schema
        return {"json_schema": ANY_OBJECT if schema is None else schema}
    parts = {name: getattr(given, name) for name in ("structures", "triggers", "format")}
    return {"structural_tag": {"type": given.type, **{name: part for name, part in parts.items() if part is not None}}}


def _check_format(given: ResponseFormat) -> None:
    """Raises InvalidRequest for a field that belongs to another type of format."""
    for name, owner in (
        ("json_schema", "json_schema"),
        ("structures", "structural_tag"),
        ("triggers", "structural_tag"),
        ("format", "structural_tag"),
    ):
        if getattr(given, name) is not None and given.type != owner:
            param = f"response_format.{name}"
            raise InvalidRequest(f"{param} is allowed only with type {owner}, got type {given.type}", param=param)


def _of_structured_outputs(given: StructuredOutputs) -> dict[str, Any]:
    wishes: dict[str, Any] = {
        ours: getattr(given, theirs) for theirs, ours in _VLLM_NAMES.items() if getattr(given, theirs) is not None
    }
    count = len(wishes)
    if given.json_object:
        wishes["json_schema"] = ANY_OBJECT
        count += 1
    if given.choice is not None:
        wishes["regex"] = _one_of(given.choice)
        count += 1
    if count != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, json_object, regex, choice, grammar and structural_tag, "
            f"got {count}",
            param="structured_outputs",
        )
    return wishes


def _one_of(choices: list[str]) -> str:
    """A regular expression for one of these texts."""
    if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
        given = "an empty one" if "" in choices else len(choices)
        raise InvalidRequest(
            f"structured_outputs.choice must have 1 to {MAX_CHOICES} texts, none of them empty, got {given}",
            param="structured_outputs.choice",
        )
    return "|".join(_SPECIAL.sub(r"\\\g<0>", choice) for choice in choices)


_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/-]")
"""Characters with a meaning in a regular expression."""
