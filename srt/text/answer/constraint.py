"""The grammar of an answer that must call a function, or whose calls must follow their schemas, as a structural tag.

A structural tag is a JSON object that describes free text, fixed texts and JSON by schema. Source: the documentation of
xgrammar, https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html. Only the parts are used that all servers and
libraries read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from . import qwen3_coder
from .tool_formats import TOOL_FORMATS, CallGrammar
from .tools import Functions

_ANY_OBJECT = {"type": "object"}


_LABELS = {"title", "description", "default", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly"}


def format_under_grammar(tool_format: str, functions: Functions, names: Iterable[str]) -> str:
    """The format in which a constrained model writes calls: its own, or Hermes.

    It is Hermes where the own format has no grammar that enforces the schemas of the named functions.
    """
    grammar = TOOL_FORMATS[tool_format].grammar
    if grammar is None:
        return "hermes"
    fits = grammar.style == "json" or all(fits_xml(functions.schema(name)) for name in names)
    return tool_format if fits else "hermes"


def fits_xml(schema: Mapping[str, Any]) -> bool:
    """Whether the style qwen_xml enforces all of a function's schema. It writes strings as they are, without bounds."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        schema.keys() <= _LABELS | {"type", "properties", "required", "additionalProperties", "$defs"}
        and isinstance(properties, Mapping)
        and schema.get("additionalProperties", False) is False
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and all(isinstance(value, Mapping) and _fits_parameter(value) for value in properties.values())
        and all(qwen3_coder.NAME.fullmatch(name) for name in properties)
        and qwen3_coder.PARAMETER_END not in json.dumps(schema)
    )


def _fits_parameter(schema: Mapping[str, Any]) -> bool:
    """Whether the XML style enforces the schema of a parameter, and the reader reads what it writes.

    A string, and a choice between strings, is text without quotes. Everything else is JSON.
    """
    kind = schema.get("type")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        # Unless it is a string for certain, the reader takes a text that is JSON for JSON.
        is_read = kind == "string" or all(json.loads(qwen3_coder.as_json(choice)) == choice for choice in choices)
        allows_text = kind is None or "string" in (kind if isinstance(kind, list) else [kind])
        return is_read and allows_text and schema.keys() <= _LABELS | {"type", "enum" if "enum" in schema else "const"}
    return kind != "string" or schema.keys() <= _LABELS | {"type"}


def must_call(tool_format: str, functions: Functions, names: Iterable[str], *, several: bool) -> dict[str, Any]:
    """The answer is one call or several calls of the named functions, and nothing else."""
    grammar = _grammar(tool_format)
    return _tag(_only_calls(grammar, _calls(grammar, functions, names, several)))


def may_stand_beside_calls(tool_format: str) -> bool:
    """Whether `calls_or` can tell the calls of a format from other text."""
    grammar = TOOL_FORMATS[tool_format].grammar
    return grammar is not None and not grammar.like_json


def calls_or(
    tool_format: str, functions: Functions, strict: Iterable[str], other: dict[str, Any], *, several: bool
) -> dict[str, Any]:
    """The answer is calls and nothing else, or it has the form `other`. The `strict` calls follow their schemas."""
    grammar = _grammar(tool_format)
    calls = _only_calls(grammar, _calls(grammar, _loosened(functions, strict), functions, several))
    return _tag({"type": "or", "elements": [calls, other]})


def may_call(tool_format: str, functions: Functions, strict: Iterable[str], *, several: bool) -> dict[str, Any]:
    """The answer is any text. Calls in it are of these functions, and the `strict` ones follow their schemas."""
    grammar = _grammar(tool_format)
    trigger = grammar.trigger or grammar.begin.partition("NAME")[0]
    if not grammar.opening:  # what stands before the trigger is free text
        grammar = grammar._replace(begin=grammar.begin[grammar.begin.index(trigger) :])
    calls = _calls(grammar, _loosened(functions, strict), functions, several)
    if not grammar.opening:
        return _tag(
            {"type": "triggered_tags", "triggers": [trigger], "tags": calls["tags"], "stop_after_first": not several}
        )
    tags = [_block(grammar, calls)]
    return _tag({"type": "triggered_tags", "triggers": [grammar.opening], "tags": tags, "stop_after_first": True})


def _grammar(tool_format: str) -> CallGrammar:
    grammar = TOOL_FORMATS[tool_format].grammar
    assert grammar is not None
    return grammar


def _loosened(functions: Functions, strict: Iterable[str]) -> Functions:
    """The functions. Those that are not strict take any object."""
    followed = set(strict)
    return Functions({name: functions.schema(name) if name in followed else _ANY_OBJECT for name in functions})


def _only_calls(grammar: CallGrammar, calls: dict[str, Any]) -> dict[str, Any]:
    return _block(grammar, calls) if grammar.opening else calls


def _calls(grammar: CallGrammar, functions: Functions, names: Iterable[str], several: bool) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": grammar.begin.replace("NAME", name),
            "content": _arguments(grammar, functions.schema(name)),
            "end": grammar.end,
        }
        for name in names
    ]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": grammar.separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def _arguments(grammar: CallGrammar, schema: Mapping[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": dict(schema)}
    return form if grammar.style == "json" else {**form, "style": grammar.style}


def _block(grammar: CallGrammar, calls: dict[str, Any]) -> dict[str, Any]:
    """All calls with the text before and after them."""
    return {"type": "tag", "begin": grammar.opening, "content": calls, "end": grammar.closing}


def _tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}
