"""How a JSON schema is closed, and which schemas are plain."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from tercet.managers.json_schema import MAX_PLAIN_CHARS, closed, is_plain, load_schema, with_real_days

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
        {"type": "object", "properties": {}},
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
