"""The grammar of an answer that must call a function, or whose calls must follow their schemas, as a structural tag.

A structural tag is a JSON object that describes free text, fixed texts and JSON by schema. Source: the documentation of
xgrammar, https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html. Only the parts are used that all servers and
libraries read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .tool_formats import TOOL_FORMATS, CallGrammar
from .tools import Functions

_ANY_OBJECT = {"type": "object"}


def format_under_grammar(tool_format: str) -> str:
    """The format in which a constrained model writes calls: its own, or Hermes where that has no grammar."""
    return tool_format if TOOL_FORMATS[tool_format].grammar is not None else "hermes"


def must_call(tool_format: str, functions: Functions, names: Iterable[str], *, several: bool) -> dict[str, Any]:
    """The answer is one call or several calls of the named functions, and nothing else."""
    grammar = _grammar(tool_format)
    calls = _calls(grammar, functions, names, several)
    return _tag(_block(grammar, calls) if grammar.opening else calls)


def may_call(tool_format: str, functions: Functions, strict: Iterable[str], *, several: bool) -> dict[str, Any]:
    """The answer is any text. Calls in it are of these functions, and the `strict` ones follow their schemas."""
    grammar = _grammar(tool_format)
    followed = set(strict)
    loose = Functions({name: functions.schema(name) if name in followed else _ANY_OBJECT for name in functions})
    calls = _calls(grammar, loose, functions, several)
    if not grammar.opening:
        trigger = grammar.begin.partition("NAME")[0]
        return _tag(
            {"type": "triggered_tags", "triggers": [trigger], "tags": calls["tags"], "stop_after_first": not several}
        )
    tags = [_block(grammar, calls)]
    return _tag({"type": "triggered_tags", "triggers": [grammar.opening], "tags": tags, "stop_after_first": True})


def _grammar(tool_format: str) -> CallGrammar:
    grammar = TOOL_FORMATS[format_under_grammar(tool_format)].grammar
    assert grammar is not None
    return grammar


def _calls(grammar: CallGrammar, functions: Functions, names: Iterable[str], several: bool) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": grammar.begin.replace("NAME", name),
            "content": {"type": "json_schema", "json_schema": dict(functions.schema(name))},
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


def _block(grammar: CallGrammar, calls: dict[str, Any]) -> dict[str, Any]:
    """All calls with the text before and after them."""
    return {"type": "tag", "begin": grammar.opening, "content": calls, "end": grammar.closing}


def _tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}
