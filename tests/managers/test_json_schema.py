"""How a JSON schema is closed, and which schemas are plain."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.managers.json_schema import MAX_PLAIN_CHARS, closed, is_any, is_plain, load_schema, with_real_days

ITEM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHUT = {**ITEM, "additionalProperties": False}
DATE = {"type": "string", "format": "date"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ITEM, SHUT),
        ({"type": "array", "items": ITEM}, {"type": "array", "items": SHUT}),
        ({"$defs": {"x": ITEM}, "anyOf": [ITEM]}, {"$defs": {"x": SHUT}, "anyOf": [SHUT]}),
        # What speaks of other properties, needs them, or is no schema, stays as it is.
        ({**ITEM, "additionalProperties": True}, {**ITEM, "additionalProperties": True}),
        ({**ITEM, "patternProperties": {}}, {**ITEM, "patternProperties": {}}),
        ({**ITEM, "unevaluatedProperties": True}, {**ITEM, "unevaluatedProperties": True}),
        ({**ITEM, "required": ["b", "a"]}, {**ITEM, "required": ["b", "a"]}),
        ({**ITEM, "required": ["a", []]}, {**ITEM, "required": ["a", []]}),
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


PLAIN: list[Any] = [
    {"type": "object", "properties": {}},
    ITEM,
    SHUT,
    {"type": "array", "items": ITEM, "title": "Items"},
    {"enum": ["a", 1, None, True]},
    {"const": 1},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
    {"type": "number", "title": "a", "description": "b", "default": 1, "examples": [{}], "$comment": "c"},
    {"type": "boolean", "$schema": "d", "deprecated": True, "readOnly": True, "writeOnly": True},
]
OTHERS: list[Any] = [
    {},
    False,
    [],
    {"type": "object"},
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"\u00e9": {"type": "null"}}},
    {"properties": ITEM["properties"]},
    {"type": ["string", "null"]},
    {"type": "string", "maxLength": 3},
    {"type": "integer", "minimum": 3},
    {"type": "array"},
    {"type": "array", "items": {"type": "string", "pattern": "a"}},
    {"type": "array", "items": [ITEM]},
    {"enum": ["\u00e9"]},
    {"enum": ["\x7f"]},
    {"enum": [1.5]},
    {"enum": []},
    {"enum": "ab"},
    {"enum": ["a"], "type": "string"},
    {"anyOf": []},
    {"anyOf": {}},
    {"anyOf": [ITEM], "type": "object"},
    {**ITEM, "required": ["b"]},
    {**ITEM, "required": "a"},
    {**ITEM, "required": [[]]},
    {**ITEM, "additionalProperties": True},
    {**ITEM, "minProperties": 1},
    {**ITEM, "items": ITEM},
    {"allOf": [ITEM]},
    {"$ref": "#"},
    {"$defs": {"x": ITEM}, "$ref": "#/$defs/x"},
    {"$defs": {"x": {"$ref": "#/$defs/x"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}},
    {"$defs": {"x": ITEM}, "type": "object", "properties": {"a": {"$ref": "#/$defs/y"}}},
    {"$defs": {"x": False}, **ITEM},
    {"$defs": [], **ITEM},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "string", "unknown": 1},
]
WRAPPED: list[Any] = [
    lambda part: {"type": "array", "items": part},
    lambda part: {"type": "object", "properties": {"a": part, "b": {"type": "null"}}, "required": ["b"]},
    lambda part: {"anyOf": [{"type": "null"}, part, ITEM]},
]


@given(
    st.sampled_from([*((schema, True) for schema in PLAIN), *((schema, False) for schema in OTHERS)]),
    st.lists(st.sampled_from(WRAPPED), max_size=5),
    st.booleans(),
)
@settings(max_examples=400)
def test_a_schema_is_plain_if_each_of_its_parts_is(case: tuple[Any, bool], wraps: list[Any], is_named: bool) -> None:
    schema, expected = case
    for wrap in wraps:
        schema = wrap(schema)
    if is_named:
        place = {"$ref": "#/$defs/x"}
        schema = {"$defs": {"x": schema}, "type": "object", "properties": {"a": place, "b": WRAPPED[0](place)}}
    assert is_plain(schema, json.dumps(schema)) == expected


def test_definitions_are_plain_only_at_the_root() -> None:
    schema = {"$defs": {"x": ITEM}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}
    assert is_plain(schema, json.dumps(schema))
    assert not any(is_plain(wrap(schema), json.dumps(wrap(schema))) for wrap in WRAPPED)
    beside = {**schema, "properties": {"a": {"$ref": "#/$defs/x", "type": "object"}}}
    assert not is_plain(beside, json.dumps(beside))


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"title": "a", "type": "object", "default": {}}])
def test_any_value_or_any_object(schema: Any) -> None:
    assert is_any(schema)


@pytest.mark.parametrize("schema", [True, False, ITEM, {"type": "string"}, {"type": "object", "minProperties": 1}])
def test_anything_else_is_a_limit(schema: Any) -> None:
    assert not is_any(schema)


def test_a_deep_or_long_schema_is_not_plain() -> None:
    for wrap in WRAPPED:
        deep: Any = {"type": "null"}
        for _ in range(40):
            deep = wrap(deep)
        assert not is_plain(deep, "")
    assert not is_plain(ITEM, " " * MAX_PLAIN_CHARS + json.dumps(ITEM))


def test_a_schema_is_an_object_or_true() -> None:
    assert load_schema("true") == load_schema("{}") == {}
    assert load_schema(json.dumps(ITEM)) == ITEM and load_schema("false") is False
    for text in ("[]", "1", "{", '{"a":' * 100_000):
        with pytest.raises(ValueError, match=r".+"):
            load_schema(text)


def test_dates_are_limited_wherever_they_are() -> None:
    date = {"type": "string", "format": "date"}
    schema = {"properties": {"a": date, "format": {"const": "date"}}, "allOf": [{"items": date}], "default": date}
    found = with_real_days(schema)
    (limit,) = found["properties"]["a"]["allOf"]
    assert limit.keys() == {"pattern"}
    limited = {**date, "allOf": [limit]}
    assert found == {**schema, "properties": {**schema["properties"], "a": limited}, "allOf": [{"items": limited}]}
    assert with_real_days({**date, "allOf": [{"minLength": 1}]})["allOf"] == [{"minLength": 1}, limit]
    assert with_real_days({**date, "allOf": 1}) == {**date, "allOf": 1}
    assert with_real_days(ITEM) is ITEM and with_real_days(False) is False


@pytest.mark.parametrize("name", ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
def test_schemas_are_found_in_a_map(name: str) -> None:
    assert with_real_days({name: {"x": DATE}}) == {name: {"x": with_real_days(DATE)}}
    assert with_real_days({name: [DATE]}) == {name: [DATE]}


@pytest.mark.parametrize("name", ["anyOf", "oneOf", "allOf", "prefixItems", "items"])
def test_schemas_are_found_in_a_list(name: str) -> None:
    assert with_real_days({name: [False, DATE]}) == {name: [False, with_real_days(DATE)]}


@pytest.mark.parametrize(
    "name", ["items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"]
)
def test_a_schema_is_found_alone(name: str) -> None:
    assert with_real_days({name: DATE}) == {name: with_real_days(DATE)}


def test_the_limit_of_dates_lets_real_days_pass_and_no_others() -> None:
    ((_, (limit,)),) = [item for item in with_real_days({"format": "date"}).items() if item[0] == "allOf"]
    pattern = re.compile(limit["pattern"])
    for year in [*range(1, 420), *range(1890, 2110), 9999]:
        for day in ("02-28", "02-29", "01-31", "12-01"):
            text = f"{year:04}-{day}"
            try:
                datetime.date.fromisoformat(text)
            except ValueError:
                assert pattern.search(text) is None, text
            else:
                assert pattern.search(text), text
    assert pattern.search("0000-01-01") is None and pattern.search("0000-02-29") is None
