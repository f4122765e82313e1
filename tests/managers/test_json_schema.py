"""How a JSON schema is closed, and which schemas are plain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tercet.managers.json_schema import MAX_PLAIN_CHARS, closed, is_plain, load_schema

ITEM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHUT = {**ITEM, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ITEM, SHUT),
        ({"type": "array", "items": ITEM}, {"type": "array", "items": SHUT}),
        ({"$defs": {"x": ITEM}, "anyOf": [ITEM]}, {"$defs": {"x": SHUT}, "anyOf": [SHUT]}),
        # What speaks of other properties, needs them, or is no schema, stays as it is.
        ({**ITEM, "additionalProperties": True}, {**ITEM, "additionalProperties": True}),
        ({**ITEM, "patternProperties": {}}, {**ITEM, "patternProperties": {}}),
        ({**ITEM, "required": ["b"]}, {**ITEM, "required": ["b"]}),
        ({"allOf": [ITEM, ITEM]}, {"allOf": [ITEM, ITEM]}),
        ({"enum": [ITEM]}, {"enum": [ITEM]}),
        (
            {"properties": {"properties": {"type": "null"}}},
            {"properties": {"properties": {"type": "null"}}, "additionalProperties": False},
        ),
        (False, False),
    ],
)
def test_a_schema_is_closed_where_it_says_nothing_else(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        ITEM,
        SHUT,
        {"type": "array", "items": ITEM, "title": "Items"},
        {"enum": ["a", 1, None, True]},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
        {"$defs": {"x": ITEM}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}},
    ],
)
def test_a_schema_of_plain_keywords_is_plain(schema: Any) -> None:
    assert is_plain(schema, json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        False,
        {"type": "object"},
        {"type": ["string", "null"]},
        {"type": "string", "maxLength": 3},
        {"type": "integer", "minimum": 3},
        {"type": "array"},
        {"type": "array", "items": {"type": "string", "pattern": "a"}},
        {"enum": ["\u00e9"]},
        {"enum": [1.5]},
        {"enum": []},
        {**ITEM, "required": ["b"]},
        {**ITEM, "additionalProperties": True},
        {**ITEM, "minProperties": 1},
        {"allOf": [ITEM]},
        {"$ref": "#"},
        {"$defs": {"x": {"$ref": "#/$defs/x"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}},
        {"$defs": {"x": ITEM}, "type": "object", "properties": {"a": {"$ref": "#/$defs/y"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "string", "unknown": 1},
    ],
)
def test_any_other_keyword_makes_it_not_plain(schema: Any) -> None:
    assert not is_plain(schema, json.dumps(schema))


def test_a_deep_or_long_schema_is_not_plain() -> None:
    deep: Any = {"type": "null"}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    assert not is_plain(deep, json.dumps(deep))
    assert not is_plain(ITEM, " " * MAX_PLAIN_CHARS + json.dumps(ITEM))


def test_a_schema_is_an_object_or_true() -> None:
    assert load_schema("true") == {} and load_schema("{}") == {}
    for text in ("[]", "1", "{", '{"a":' * 100_000):
        with pytest.raises(ValueError, match=r".+"):
            load_schema(text)
