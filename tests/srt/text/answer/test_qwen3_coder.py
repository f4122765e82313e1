"""The values of calls of Qwen3-Coder. They have no quotes, and the schema of the function says their types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from parsed_answers import parse_answer

from tercet.srt.text.answer.answer_parser import AnswerFormat
from tercet.srt.text.answer.answer_text import Arguments
from tercet.srt.text.answer.tools import Functions

OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
"""As pydantic writes `str | None`."""


DEFINITIONS = {
    "Year": {"type": "string", "enum": ["2024", "2025"]},
    "Day": {"anyOf": [{"$ref": "#/$defs/Year"}, {"type": "boolean"}]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
}


def value_of(schema: Any, written: str) -> Any:
    functions = Functions({"f": {"properties": {"x": schema}, "$defs": DEFINITIONS}})
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    parts = parse_answer(AnswerFormat(tools="qwen3_coder", functions=functions), text)
    return json.loads("".join(part.text for part in parts if isinstance(part, Arguments)))["x"]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (OPTIONAL_TEXT, "10115", "10115"),
        (OPTIONAL_TEXT, "True", "True"),
        (OPTIONAL_TEXT, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL_TEXT, "null", None),
        (OPTIONAL_TEXT, "None", None),
        (OPTIONAL_TEXT, "Berlin", "Berlin"),
        (OPTIONAL_TEXT, '"Berlin"', "Berlin"),  # as a grammar writes it
        ({"type": ["string", "null"]}, "1.50", "1.50"),
        ({"type": ["string", "integer"]}, "1.50", "1.50"),
        ({"type": ["string", "integer"]}, "15", 15),
        ({"type": ["string", "number"]}, "1.50", 1.5),
        ({"type": ["string", "number"]}, "15", 15),
        ({"type": ["string", "array"]}, "[1]", [1]),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
        ({"oneOf": [{"type": "string"}, {"type": ["array", "boolean"]}]}, "true", True),
        ({"oneOf": [{"type": "string"}, {"type": ["array", "boolean"]}]}, "{}", "{}"),
        ({"anyOf": [{"type": "string"}, {}]}, "15", 15),
        ({"anyOf": []}, "15", 15),
        ({"anyOf": "string"}, "15", 15),
        ({"anyOf": [{"type": "string"}, True]}, "15", 15),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Other"}]}, "15", 15),
        ({"anyOf": [{"type": "string"}]}, '"15"', "15"),
        ({"$ref": "#/$defs/Year"}, "2024", "2024"),
        ({"$ref": "#/$defs/Year"}, '"2024"', "2024"),
        ({"$ref": "#/$defs/Day"}, "true", True),
        ({"$ref": "#/$defs/Day"}, "2024", "2024"),
        ({"$ref": "#/$defs/Loop"}, "15", "15"),
        ({"$ref": "#/$defs/Year/enum/0"}, "15", 15),
        ({"$ref": 1}, "15", 15),
        ({"type": "string"}, '"15"', '"15"'),
        ({"enum": ["2024", "2025"]}, "2024", "2024"),
        ({"enum": ["2024", "2025"]}, '"2024"', "2024"),
        ({"enum": ["true", None]}, "true", "true"),
        ({"enum": ["true", None]}, "null", None),
        ({"enum": [2024, "all"]}, "2024", 2024),
        ({"enum": [1.5, [1], {}]}, "[1]", [1]),
        ({"enum": "2024"}, "2024", 2024),
        ({"type": ["string", "integer"], "enum": ["2024"]}, "2024", "2024"),
        ({"const": "2024"}, "2024", "2024"),
        ({"const": 2024}, "2024", 2024),
        ({"anyOf": [{"const": "1"}, {"enum": [True]}]}, "1", "1"),
        ({"anyOf": [{"const": "1"}, {"enum": [True]}]}, "true", True),
        ({"type": "integer"}, "15", 15),
        ({"type": "integer"}, "many", "many"),
        ({"type": ["string", 1]}, "15", 15),
        ({}, "15", 15),
        ({}, " False ", False),
        ({}, " no ", " no "),
        (True, "15", 15),
    ],
)
def test_a_value_has_a_type_of_its_schema(schema: Any, written: str, value: Any) -> None:
    found = value_of(schema, written)
    assert found == value
    assert type(found) is type(value)


def test_the_depth_of_a_schema_does_not_matter() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert value_of(schema, "15") == "15"
