"""Turns a body of /v1/responses into the fields of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...errors import InvalidRequest
from ..wire import shown
from .responses_protocol import (
    InputItem,
    InputPart,
    ResponsesBody,
    ResponsesFunction,
    ResponsesTool,
    ResponsesToolChoice,
)
from .tool_protocol import function_tool

_SAME = (
    "model", "stream", "temperature", "top_p", "frequency_penalty", "presence_penalty", "parallel_tool_calls",
    "cache_salt", "lora_path", "user", "priority", "waiting_timeout", "running_timeout", "session_id",
    "retention_seconds",
)  # fmt: skip
"""Fields that a chat has under the same name."""
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments", "namespace"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
"""The fields of each kind of item."""
_ALL_FIELDS = tuple(dict.fromkeys(field for fields in _FIELDS.values() for field in fields))
_OPTIONAL = {"reasoning": _FIELDS["reasoning"], "function_call": ("namespace",)}


def items_of(body: ResponsesBody) -> Sequence[InputItem]:
    """The input of a body as items."""
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def chat_of(body: ResponsesBody, before: Sequence[InputItem] = ()) -> dict[str, Any]:
    """The fields of the body of a chat. `before`: the conversation that the body continues. Raises InvalidRequest."""
    chat = {name: getattr(body, name) for name in _SAME}
    chat["messages"] = _messages(body, before)
    chat["max_completion_tokens"] = body.max_output_tokens
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        effort = body.reasoning.effort
        if kwargs.setdefault("reasoning_effort", effort) != effort:
            raise InvalidRequest(
                "reasoning.effort and chat_template_kwargs.reasoning_effort must be equal if both are given, "
                f"got {shown(effort)} and {shown(kwargs['reasoning_effort'])}",
                param="reasoning.effort",
            )
    chat["chat_template_kwargs"] = kwargs
    chat["tools"] = [
        function_tool(name, _description(namespace, function), function.parameters, function.strict)
        for name, (namespace, function, _) in functions_of(body)
    ]
    choice = body.tool_choice
    chat["tool_choice"] = _tool_choice(choice) if isinstance(choice, ResponsesToolChoice) else choice
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    return chat


class FunctionPlace(NamedTuple):
    """A function, the namespace that it is in (None: in none), and its path in the body."""

    namespace: ResponsesTool | None
    function: ResponsesTool | ResponsesFunction
    path: str


def functions_of(body: ResponsesBody) -> Iterator[tuple[str, FunctionPlace]]:
    """All functions, in the order of a chat's tools, with the names that the model reads."""
    for i, tool in enumerate(body.tools or ()):
        if tool.tools is None:
            yield tool.name, FunctionPlace(None, tool, f"tools[{i}]")
        else:
            for j, function in enumerate(tool.tools):
                yield _full_name(tool.name, function.name), FunctionPlace(tool, function, f"tools[{i}].tools[{j}]")


def _full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def _description(namespace: ResponsesTool | None, function: ResponsesTool | ResponsesFunction) -> str | None:
    texts = [one.description for one in (namespace, function) if one is not None and one.description]
    return "\n\n".join(texts) or function.description


def _tool_choice(choice: ResponsesToolChoice) -> dict[str, Any]:
    if choice.type == "function":
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools or ()]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    """`text.format` as `response_format`, which has the fields of a schema in an object of their own."""
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _messages(body: ResponsesBody, before: Sequence[InputItem]) -> list[dict[str, Any]]:
    reader = _ItemReader()
    for item in before:
        reader.read(item, "previous_response_id")
    for i, item in enumerate(items_of(body)):
        reader.read(item, f"input[{i}]")
    reader.end()
    messages = reader.messages
    if body.instructions is None:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):  # most templates accept one system message
        messages[0] = {**messages[0], "content": f"{body.instructions}\n\n{messages[0]['content']}"}
        return messages
    return [{"role": "system", "content": body.instructions}, *messages]


class _ItemReader:
    """Makes messages of items. Calls belong to the assistant's message before them, as does reasoning before it.

    Reasoning that nothing of the assistant follows is a message without content, as an answer that was cut has it.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []
        self._names: dict[str, str] = {}  # of the called functions, by call

    def read(self, item: InputItem, path: str) -> None:
        kind = item.type or "message"
        for field in _ALL_FIELDS:
            given = getattr(item, field) is not None
            if given and field not in _FIELDS[kind]:
                raise InvalidRequest(f"{field} is not allowed in an item of type {kind}", param=f"{path}.{field}")
            if not given and field in _FIELDS[kind] and field not in _OPTIONAL.get(kind, ()):
                raise InvalidRequest(f"{path}.{field} is required with type {kind}", param=f"{path}.{field}")
        if kind == "message":
            assert item.role is not None
            self._add(item.role, text_of(item.content))
        elif kind == "reasoning":
            self._reasoning.append(text_of(item.content) or text_of(item.summary))
        elif kind == "function_call":
            self._call(item)
        else:
            assert item.call_id is not None
            self._add("tool", text_of(item.output))
            self.messages[-1]["tool_call_id"] = item.call_id
            if item.call_id in self._names:
                self.messages[-1]["name"] = self._names[item.call_id]

    def _call(self, item: InputItem) -> None:
        assert item.call_id is not None and item.name is not None
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._reasoning:
            self._add("assistant", None)
        name = _full_name(item.namespace, item.name)
        call = {"id": item.call_id, "function": {"name": name, "arguments": item.arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self._names[item.call_id] = name

    def _add(self, role: str, content: str | None) -> None:
        message: dict[str, Any] = {"role": role, "content": content}
        if role != "assistant":
            self.end()
        elif self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning.clear()
        self.messages.append(message)

    def end(self) -> None:
        """Adds the reasoning that no message has."""
        if self._reasoning:
            self._add("assistant", "")


def text_of(content: str | Sequence[InputPart] | None) -> str:
    """The text of a message, of reasoning, or of the result of a call."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
