"""Tools in requests, and calls of them in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...errors import InvalidRequest
from ..wire import Wire, doc, only

_STAYS = "a prefix stays cached until its memory is needed"
CacheControl = Annotated[
    Any, only(_STAYS, {"type": "ephemeral"}, *({"type": "ephemeral", "ttl": ttl} for ttl in ("5m", "1h")))
]
"""Anthropic's mark for the end of a prefix that is to be cached. Libraries send it to every server."""
CacheBreakpoint = Annotated[Any, only(_STAYS, {"mode": "explicit"})]
"""OpenAI's mark for the same."""


ParsedArguments = Annotated[
    Any, doc("It has no effect: `parse` of the openai library adds it, and `arguments` has the same as text")
]


class Function(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Annotated[str, doc("1 to 128 letters, digits, `_`, `-` and `.`")]
    description: Annotated[str | None, doc("What the function does; the model reads it")] = None
    parameters: Annotated[
        dict[str, Any] | None, doc("JSON Schema of the arguments, of type object; default: no arguments")
    ] = None
    strict: Annotated[
        bool | None, doc("Constrain the arguments to the schema, default false; a required call always is")
    ] = None


class Tool(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A tool. Functions are the only kind."""

    type: Annotated[Literal["function"], doc("Always `function`")]
    function: Annotated[Function, doc("The function")]
    cache_control: CacheControl = None


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """The fields of a Tool, for an API that writes its functions otherwise."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


class FunctionName(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Names one of the functions in `tools`."""

    name: Annotated[str, doc("Its name")]


class NamedTool(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One of the tools in `allowed_tools`."""

    type: Annotated[Literal["function"], doc("Always `function`")]
    function: Annotated[FunctionName, doc("The function that may be called")]


class AllowedTools(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`tool_choice.allowed_tools`: the functions of `tools` that may be called."""

    mode: Annotated[
        Literal["auto", "required"],
        doc("`auto`: the model may call one of these functions; `required`: it must"),
    ]
    tools: Annotated[list[NamedTool], doc("The functions, at least one; the model still reads all of `tools`")]


class ToolChoice(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` as an object: it requires a call of one function, or allows only some functions."""

    type: Annotated[Literal["function", "allowed_tools"], doc("Which of the other two fields there is")]
    function: Annotated[FunctionName | None, doc("The function that must be called")] = None
    allowed_tools: Annotated[AllowedTools | None, doc("The functions that may be called")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields_of_type(self, {"function": ("function",), "allowed_tools": ("allowed_tools",)})


def check_fields_of_type(value: Any, fields_of_type: Mapping[str, Sequence[str]]) -> None:
    """Checks that an object with a `type` has the fields of its type and not those of others. Raises InvalidRequest."""
    for kind, names in fields_of_type.items():
        for name in names:
            given = getattr(value, name) is not None
            if given and kind != value.type:
                raise InvalidRequest(f"{name} is not allowed with type {value.type}", param=name)
            if not given and kind == value.type:
                raise InvalidRequest(f"{name} is required with type {value.type}", param=name)


class GivenFunctionCall(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A function and its arguments in an earlier call."""

    name: Annotated[str, doc("Name of the function")]
    arguments: Annotated[str | dict[str, Any] | None, doc("The arguments as JSON text, or as an object")] = None
    parsed_arguments: ParsedArguments = None


class GivenToolCall(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A tool call in an assistant's message."""

    function: Annotated[GivenFunctionCall, doc("What was called")]
    id: Annotated[str | None, doc("Its name; the result has it as `tool_call_id`; passed to the chat template")] = None
    type: Annotated[Literal["function"] | None, doc("Always `function`")] = None
    index: Annotated[int | None, doc("It has no effect: the place in the list counts")] = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: Annotated[str, doc("Name of the function")]
    arguments: Annotated[
        str, doc("The arguments as JSON text. The model wrote it: it can be cut off, and it can break the schema")
    ]


class ToolCall(msgspec.Struct, frozen=True):
    id: Annotated[str, doc("Name of the call, for the message with its result")]
    type: Annotated[Literal["function"], doc("Always `function`")]
    function: Annotated[FunctionCall, doc("What the model calls")]


class FunctionCallDelta(msgspec.Struct, frozen=True):
    name: Annotated[str | UnsetType, doc("Name of the function; only in the call's first chunk")] = UNSET
    arguments: Annotated[str | UnsetType, doc("The new part of the arguments' JSON text")] = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: Annotated[int, doc("Index of the call in the message, from 0")]
    id: Annotated[str | UnsetType, doc("Name of the call; only in the call's first chunk")] = UNSET
    type: Annotated[Literal["function"] | UnsetType, doc("Only in the call's first chunk")] = UNSET
    function: Annotated[FunctionCallDelta | UnsetType, doc("What is new in the call")] = UNSET
