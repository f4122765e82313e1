"""Chats with tools, in the form that a chat template can render.

Clients send the arguments of a call as JSON text. Most templates want an object, some want text, and they differ in
what `content` must be beside calls. `CallShape` says what a template wants. A template that knows no tools gets them as
text in the Hermes format: the functions in the system message, calls in the assistant's text, results in the user's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]


class CallShape(NamedTuple):
    """content: of a message that has calls and no text. as_text: the arguments are JSON text, not an object."""

    content: str | None
    as_text: bool


CALL_SHAPES = (CallShape(None, False), CallShape("", False), CallShape(None, True), CallShape("", True))

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_name",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
PROBE_VALUE = "probe_value"
PROBE_CHAT: tuple[Message, ...] = (
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "a1b2c3d4e",
                "type": "function",
                "function": {"name": "probe_name", "arguments": {"probe_key": PROBE_VALUE}},
            }
        ],
    },
    {"role": "tool", "content": "r", "tool_call_id": "a1b2c3d4e", "name": "probe_name"},
)
"""A chat that shows what a template makes of calls."""


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether the chat has calls or their results."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def in_shape(messages: Sequence[Message], shape: CallShape) -> list[Message]:
    """The chat with its calls in this shape."""
    return [_shaped(message, shape) if message.get("tool_calls") else message for message in messages]


def _shaped(message: Message, shape: CallShape) -> Message:
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"], shape.as_text)},
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls, "content": message.get("content") or shape.content}


def _arguments(arguments: Any, as_text: bool) -> Any:
    """The arguments as text or as an object. Text that is no object stays text; empty text is an empty object."""
    if as_text:
        return (arguments or "{}") if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def without_tools(messages: Sequence[Message], tools: Sequence[Message] | None, *, takes_system: bool) -> list[Message]:
    """The chat as text only, for a template without tools. The content of each message is text, or absent.

    takes_system: the template renders a system message. If not, the first user message begins with the functions.
    """
    chat: list[Message] = []
    for are_results, group in itertools.groupby(messages, lambda message: message.get("role") == "tool"):
        if are_results:
            results = [f"<tool_response>\n{result.get('content') or ''}\n</tool_response>" for result in group]
            chat.append({"role": "user", "content": "\n".join(results)})
        else:
            chat += map(_without_calls, group)
    return _with_functions(chat, tools, "system" if takes_system else "user") if tools else chat


def _without_calls(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    written = [_written(call["function"]) for call in message["tool_calls"]]
    content = "\n".join([text for text in (message.get("content"),) if text] + written)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _written(function: Message) -> str:
    arguments = _arguments(function["arguments"], as_text=True)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'


def _with_functions(chat: list[Message], tools: Sequence[Message], role: str) -> list[Message]:
    text = functions_text(tools)
    for i, message in enumerate(chat):
        if message.get("role") == role:
            given = message.get("content") or ""
            content = f"{given}\n\n{text}" if role == "system" else f"{text}\n\n{given}"
            return [*chat[:i], {**message, "content": content}, *chat[i + 1 :]]
    return [{"role": role, "content": text}, *chat]


def functions_text(tools: Sequence[Message]) -> str:
    """The functions, and how to call them: the text for a model whose template has no tools."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. Each line between the tools tags describes one of them. Its parameters are a JSON "
        f"Schema.\n<tools>\n{lines}\n</tools>\n\n"
        "To call a function, write its name and its arguments as JSON between tool_call tags:\n"
        '<tool_call>\n{"name": "the function", "arguments": {"a parameter": "its value"}}\n</tool_call>\n'
        "Write one such block for each call, and stop after the last one. The results then come between tool_response "
        "tags. If no function helps, answer in plain words."
    )
