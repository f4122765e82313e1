"""Tools in requests, and calls of them in messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..wire import Wire, doc


class Function(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Annotated[str, doc("1 to 128 letters, digits, `_`, `-` and `.`")]
    description: Annotated[str | None, doc("What the function does; the model reads it")] = None
    parameters: Annotated[dict[str, Any] | None, doc("JSON Schema of the arguments; default: any object")] = None
    strict: Annotated[
        bool | None, doc("Constrain the arguments to the schema, default false; a required call always is")
    ] = None


class Tool(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A tool. Functions are the only kind."""

    type: Annotated[Literal["function"], doc("Always `function`")]
    function: Annotated[Function, doc("The function")]


class FunctionName(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Names one of the functions in `tools`."""

    name: Annotated[str, doc("Its name")]


class NamedTool(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` that requires a call of one function."""

    type: Annotated[Literal["function"], doc("Always `function`")]
    function: Annotated[FunctionName, doc("The function that must be called")]


class GivenFunctionCall(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A function and its arguments in an earlier call."""

    name: Annotated[str, doc("Name of the function")]
    arguments: Annotated[str | dict[str, Any] | None, doc("The arguments as JSON text, or as an object")] = None


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
    index: Annotated[int, doc("Which of the message's calls this is, counted from 0")]
    id: Annotated[str | UnsetType, doc("Name of the call; only in the call's first chunk")] = UNSET
    type: Annotated[Literal["function"] | UnsetType, doc("Only in the call's first chunk")] = UNSET
    function: Annotated[FunctionCallDelta | UnsetType, doc("What is new in the call")] = UNSET
