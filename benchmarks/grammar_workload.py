"""Random grammars and the check of their outputs: JSON schemas in the shape of JSONSchemaBench's, patterns, EBNF.

The schemas have the keywords that JSONSchemaBench's collections have most often: objects with required and optional
properties, arrays, enumerations, constants, numbers with bounds, strings with lengths, patterns and formats, `anyOf`,
and references. Strings, arrays and numbers are bounded, because a small model fills an unbounded one until its output
is cut: so no `number` with any fraction, and no format with one.
"""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_NAMES = [
    "name",
    "age",
    "tags",
    "address",
    "id",
    "status",
    "items",
    "price",
    "kind",
    "city",
    "is_open",
    "notes",
    "score",
]
_Maker = Callable[[random.Random], dict[str, Any]]
_WORDS = ["red", "green", "blue", "small", "large", "open", "closed", "draft", "final", "none"]
_PATTERNS = ["^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{2}$", "^(yes|no)$", "^#[0-9a-f]{6}$", "^v[0-9]{1,3}\\.[0-9]{1,2}$"]
_FORMATS = ["date", "uuid", "ipv4"]
_REGEXES = [
    r"\d{3}-\d{4}",
    r"(yes|no|maybe)",
    r"[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9}){0,2}",
    r"-?(0|[1-9]\d{0,5})(\.\d{1,3})?",
    r"\[(\d{1,2}(, \d{1,2}){0,5})?\]",
    r"[a-z]{1,12}@[a-z]{1,10}\.(com|org|net)",
]
ARITHMETIC = """
root ::= term (" " [+*-] " " term){1,4} " = " number
term ::= number | "(" number " " [+*-] " " number ")"
number ::= "0" | [1-9] [0-9]{0,3}
"""


class Case(NamedTuple):
    """A request's sampling parameters, and the check of its output."""

    prompt: str
    sampling: dict[str, Any]
    is_right: Callable[[str], bool]


def random_case(seed: int) -> Case:
    """A schema in four of five cases, else a regular expression or a grammar."""
    draw = random.Random(seed)
    kind = draw.random()
    if kind < 0.8:
        schema = random_schema(draw)
        return Case("A JSON document: ", {"json_schema": schema}, validator(schema))
    if kind < 0.93:
        regex = draw.choice(_REGEXES)
        return Case("The answer is: ", {"regex": regex}, lambda text: re.fullmatch(regex, text) is not None)
    return Case("Some arithmetic: ", {"ebnf": ARITHMETIC}, _is_arithmetic)


def validator(schema: Any) -> Callable[[str], bool]:
    """Whether a text is JSON that the schema accepts."""
    jsonschema = importlib.import_module("jsonschema")  # of the extra `test`
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())

    def is_right(text: str) -> bool:
        try:
            return bool(checker.is_valid(json.loads(text)))
        except json.JSONDecodeError:
            return False

    return is_right


def random_schema(draw: random.Random) -> dict[str, Any]:
    schema = _object(draw, 0)
    if draw.random() < 0.3:
        schema["$defs"] = {"part": _object(draw, 2)}
        name = draw.choice(_NAMES)
        many = {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
        schema["properties"][name] = draw.choice([{"$ref": "#/$defs/part"}, many])
    return schema


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 5))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _value(draw, depth + 1) for name in names}}
    schema["required"] = names if draw.random() < 0.6 else names[: draw.randint(0, len(names))]
    if draw.random() < 0.5:
        schema["additionalProperties"] = False
    if draw.random() < 0.2:
        schema["title"] = "A record"
    return schema


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[_Maker] = [_text, _text, _number, _number, _choice, _flag]
    if depth < 3:
        kinds += [_object_at(depth), _array_at(depth), _any_of_at(depth)]
    return draw.choice(kinds)(draw)


def _object_at(depth: int) -> Callable[[random.Random], dict[str, Any]]:
    return lambda draw: _object(draw, depth)


def _array_at(depth: int) -> Callable[[random.Random], dict[str, Any]]:
    def array(draw: random.Random) -> dict[str, Any]:
        low = draw.randint(0, 2)
        high = low + draw.randint(0, 2)
        return {"type": "array", "items": _value(draw, depth + 1), "minItems": low, "maxItems": high}

    return array


def _any_of_at(depth: int) -> Callable[[random.Random], dict[str, Any]]:
    return lambda draw: {"anyOf": [_value(draw, depth + 1), {"type": "null"}]}


def _text(draw: random.Random) -> dict[str, Any]:
    kind = draw.random()
    if kind < 0.3:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    if kind < 0.5:
        return {"type": "string", "format": draw.choice(_FORMATS)}
    low = draw.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randint(1, 20)}


def _number(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 1000)}


def _choice(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.3:
        return {"const": draw.choice(_WORDS)}
    return {"enum": draw.sample(_WORDS, draw.randint(1, 5))}


def _flag(draw: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _is_arithmetic(text: str) -> bool:
    number = r"(0|[1-9]\d{0,3})"
    term = rf"({number}|\({number} [+*-] {number}\))"
    return re.fullmatch(rf"{term}( [+*-] {term}){{1,4}} = {number}", text) is not None
