"""Bodies that nobody sends on purpose: valid ones with one to three changes, which know our OpenAPI document."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from endurance.cases import Case

_DEEP = 3000
_LONG = 20_000
_TEXTS = [
    "",
    "a",
    "\x00",
    "\ud800",
    "é🙂",
    "{{ 1/0 }}",
    "{% for a in range(9**9) %}",
    "<|im_end|>",
    "a" * _LONG,
    "%s%n",
]
_NUMBERS = [0, 1, -1, 2, 129, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")]
_PATTERNS = ["(a+)+$", "[a-z]{1,1000}{1,1000}", "(", "a{99999}", "(?=a)", ".*" * 50, "\\", "[^\\x00-\\U0010ffff]"]
_SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "string", "minLength": 10**9},
    {"enum": []},
    {"anyOf": [{"type": "integer"}] * 300},
    {"properties": {str(index): {"type": "string"} for index in range(300)}},
    {"pattern": "(a|b|ab)*c", "type": "string"},
    True,
]
_FOR_THE_OPERATOR = {"/pause_generation", "/continue_generation"}
"""They stop all requests, so nothing else would be tested after a valid body."""
_ABORT = "/abort_request"
"""With `abort_all` it ends the neighbour's requests, too. A run of 10^6 requests has drawn four such bodies."""
_GRAMMARS = ["", "root ::= root", 'root ::= "a" root | ', "root ::= [", 'root ::= ("a" | "a"){1,9999}', "x ::= 'a'"]


class BodyMaker:
    """Makes hostile bodies for the paths of a document."""

    def __init__(self, document: Mapping[str, Any], cases: Sequence[Case]) -> None:
        """`document`: /openapi.json. `cases`: valid requests."""
        self._schemas = document["components"]["schemas"]
        self._cases = [case for case in cases if case.method == "POST"]
        self._fields: dict[str, dict[str, Any]] = {}
        for path, operations in document["paths"].items():
            if path in _FOR_THE_OPERATOR:
                continue
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            for media in content.values():
                self._fields[path] = self._properties(media["schema"])

    @property
    def paths(self) -> list[str]:
        return sorted(self._fields)

    def make(self, rng: random.Random) -> tuple[str, bytes]:
        """A path and a body."""
        case = rng.choice(self._cases)
        path = case.path if rng.random() < 0.8 else rng.choice(self.paths)
        body: Any = json.loads(json.dumps(case.body))
        self._shorten(body)
        if rng.random() < 0.3 and case.can_stream:
            body["stream"] = True
        for _ in range(rng.randint(1, 3)):
            body = self._changed(rng, path, body)
        if path == _ABORT and isinstance(body, dict) and body.get("abort_all") is True:
            body["abort_all"] = None
        data = json.dumps(body).encode()
        return path, _broken(rng, data) if rng.random() < 0.15 else data

    def _changed(self, rng: random.Random, path: str, body: Any) -> Any:
        """With one field more, less or changed, at any depth."""
        if not isinstance(body, dict) or rng.random() < 0.02:
            return self._value(rng, "")
        at, owner = self._place(rng, body)
        known = self._known(path, at)
        if rng.random() < 0.1 and owner:
            del owner[rng.choice(sorted(owner))]
            return body
        name = rng.choice(sorted(known)) if known and rng.random() < 0.8 else rng.choice([*owner, "x", "", "__class__"])
        owner[name] = (
            self._fitting(rng, known[name]) if name in known and rng.random() < 0.5 else self._value(rng, name)
        )
        return body

    def _known(self, path: str, at: str) -> dict[str, Any]:
        fields = self._fields.get(path, {})
        return self._properties(fields[at]) if at in fields else fields if not at else {}

    def _place(self, rng: random.Random, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """An object in the body, and the name of the field that it is in; the body itself has none."""
        inner = [(name, value) for name, value in body.items() if isinstance(value, dict)]
        inner += [
            (name, one)
            for name, value in body.items()
            if isinstance(value, list)
            for one in value
            if isinstance(one, dict)
        ]
        return rng.choice(inner) if inner and rng.random() < 0.5 else ("", body)

    def _properties(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the objects that a schema allows."""
        found: dict[str, Any] = {}
        for part in (schema, *schema.get("anyOf", ())):
            if "$ref" in part:
                part = self._schemas[part["$ref"].rpartition("/")[2]]
            if "items" in part and isinstance(part["items"], dict):
                found |= self._properties(part["items"])
            found |= part.get("properties", {})
        return found

    def _fitting(self, rng: random.Random, schema: Mapping[str, Any]) -> Any:
        """A value of the declared type, or almost."""
        choices = schema.get("anyOf")
        if choices:
            return self._fitting(rng, rng.choice(choices))
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "integer":
            return rng.choice([0, 1, 2, -1, 100, schema.get("maximum", 7), schema.get("minimum", 7)])
        if kind == "number":
            return rng.choice([0, 0.5, 1, -2, 2])
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "array":
            return [self._fitting(rng, schema.get("items") or {}) for _ in range(rng.randint(0, 3))]
        if kind == "string":
            return rng.choice(_TEXTS)
        return {name: self._fitting(rng, inner) for name, inner in list(self._properties(schema).items())[:2]}

    def _value(self, rng: random.Random, name: str) -> Any:
        if name in ("regex", "stop_regex", "pattern"):
            return rng.choice(_PATTERNS)
        if name in ("json_schema", "schema", "parameters", "json") and rng.random() < 0.8:
            return rng.choice(_SCHEMAS)
        if name in ("ebnf", "grammar"):
            return rng.choice(_GRAMMARS)
        kind = rng.randrange(8)
        if kind <= 1:
            return rng.choice(_TEXTS)
        if kind <= 3:
            return rng.choice(_NUMBERS)
        if kind == 4:
            return [rng.choice(_NUMBERS[:8]) for _ in range(rng.choice([0, 1, 3, 5000]))]
        if kind == 5:
            return {rng.choice(_TEXTS): rng.choice(_TEXTS) for _ in range(3)}
        return rng.choice([None, True, False, [], {}, [[]], [{}], [None]])

    def _shorten(self, body: dict[str, Any]) -> None:
        """A fuzzer has no use for long answers."""
        for owner in (body, body.get("sampling_params")):
            if isinstance(owner, dict):
                for name in ("max_tokens", "max_new_tokens", "max_output_tokens"):
                    if name in owner:
                        owner[name] = 2


def _broken(rng: random.Random, data: bytes) -> bytes:
    """With some bytes cut, changed, doubled or added."""
    at = rng.randrange(len(data) + 1)
    filling = rng.choice(
        [
            b"[" * _DEEP,
            b'{"a":' * _DEEP,
            b'"',
            b"\\",
            b"\\ud800",
            b"1e999",
            b"\xff\xfe",
            b"\x00",
            b"-",
            b"," * 50,
            b"NaN",
        ]
    )
    return rng.choice(
        [data[:at], data[:at] + filling + data[at:], filling, data + data, data[at:], data[:at] + data[at + 1 :]]
    )
