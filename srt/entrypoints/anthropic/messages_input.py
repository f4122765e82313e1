"""Turns a body of /v1/messages into the fields of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import InvalidRequest, UnsupportedField
from ..openai.tool_protocol import function_tool
from ..wire import shown
from .messages_protocol import ContentBlock, CountTokensBody, InputMessage, MessagesBody, MessagesToolChoice, ResultPart

_SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "cache_salt", "lora_path", "priority", "waiting_timeout",
    "running_timeout", "session_id", "retention_seconds",
)  # fmt: skip
"""Fields that a chat has under the same name."""
_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_OPTIONAL = {"thinking": ("signature",), "tool_result": ("content", "is_error")}
_ALL_FIELDS = sorted({name for fields in (*_REQUIRED.values(), *_OPTIONAL.values()) for name in fields})
_KINDS_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BETWEEN_TEXTS = "\n\n"


def chat_of(body: CountTokensBody) -> dict[str, Any]:
    """The fields of the body of a chat. Raises InvalidRequest."""
    chat: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        chat = {name: getattr(body, name) for name in _SAME}
        chat["max_completion_tokens"] = body.max_tokens
        chat["stop"] = body.stop_sequences
        chat["user"] = body.metadata and body.metadata.user_id
    chat["messages"] = messages = _messages(body)
    if messages and "tool_calls" in messages[-1]:
        raise InvalidRequest(
            "the last message calls functions; a message with their results (tool_result) must follow", param="messages"
        )
    chat["continue_final_message"] = bool(messages) and messages[-1]["role"] == "assistant"
    chat["chat_template_kwargs"] = _template_kwargs(body)
    chat["thinking_token_budget"] = body.thinking and body.thinking.budget_tokens
    chat["tools"] = [
        function_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in body.tools or ()
    ]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
        alone = body.tool_choice.disable_parallel_tool_use
        chat["parallel_tool_calls"] = None if alone is None else not alone
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if (choice.name is not None) != (choice.type == "tool"):
        problem = "required" if choice.type == "tool" else "not allowed"
        raise InvalidRequest(f"tool_choice.name is {problem} with type {choice.type}", param="tool_choice.name")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _template_kwargs(body: CountTokensBody) -> dict[str, Any]:
    """The variables of the chat template. Chat templates have two names for the choice to think."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = kwargs["thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    for name, value in (body.chat_template_kwargs or {}).items():
        if kwargs.setdefault(name, value) != value:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} is {shown(value)}, but another field makes it {shown(kwargs[name])}",
                param=f"chat_template_kwargs.{name}",
            )
    return kwargs


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    reader = _MessagesReader()
    if body.system is not None:
        reader.add("system", body.system if isinstance(body.system, str) else _text(body.system, "system"))
    for i, message in enumerate(body.messages):
        reader.read(message, f"messages[{i}].content")
    return [turn.message() for turn in reader.turns]


class _Turn:
    """A message of a chat that is being read."""

    def __init__(self, role: str, **fields: Any) -> None:
        self.role = role
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._fields = fields

    def message(self) -> dict[str, Any]:
        between = "" if self.role == "assistant" else _BETWEEN_TEXTS
        message = {"role": self.role, "content": between.join(self.texts), **self._fields}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _MessagesReader:
    """Makes the messages of a chat. The result of a call is a message of its own there."""

    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self._names: dict[str, str] = {}  # of the called functions, by call

    def read(self, message: InputMessage, path: str) -> None:
        if isinstance(message.content, str):
            self.add(message.role, message.content)
            return
        if not message.content:
            self._turn_of(message.role)
        for i, block in enumerate(message.content):
            _check(block, message.role, f"{path}[{i}]")
            if block.type == "tool_result":
                self._add_result(block, f"{path}[{i}].content")
            elif block.type == "text":
                assert block.text is not None
                self.add(message.role, block.text)
            elif block.type == "thinking":
                assert block.thinking is not None
                self._turn_of(message.role).thoughts.append(block.thinking)
            else:
                assert block.id is not None and block.name is not None
                call = {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
                self._turn_of(message.role).calls.append(call)
                self._names[block.id] = block.name

    def add(self, role: str, text: str) -> None:
        self._turn_of(role).texts.append(text)

    def _turn_of(self, role: str) -> _Turn:
        """The last turn if it has this author, else a new one."""
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(_Turn(role))
        return self.turns[-1]

    def _add_result(self, block: ContentBlock, path: str) -> None:
        content = block.content or ""
        text = content if isinstance(content, str) else _text(content, path)
        name = {"name": self._names[block.tool_use_id]} if block.tool_use_id in self._names else {}
        result = _Turn("tool", tool_call_id=block.tool_use_id, **name)
        result.texts.append(f"Error: {text}" if block.is_error else text)
        self.turns.append(result)


def _check(block: ContentBlock, role: str, path: str) -> None:
    """Checks that a block has the fields of its kind, and that its author may write it. Raises InvalidRequest."""
    kind = block.type
    if kind not in _REQUIRED:
        raise UnsupportedField(
            f"content of type {shown(kind)} is not supported; accepted: {', '.join(_REQUIRED)}", param=f"{path}.type"
        )
    if kind not in _KINDS_OF_ROLE[role]:
        raise InvalidRequest(f"content of type {kind} is not allowed with role {role}", param=f"{path}.type")
    for name in _ALL_FIELDS:
        given = getattr(block, name) is not None
        if given and name not in (*_REQUIRED[kind], *_OPTIONAL.get(kind, ())):
            raise InvalidRequest(f"{name} is not allowed with type {kind}", param=f"{path}.{name}")
        if not given and name in _REQUIRED[kind]:
            raise InvalidRequest(f"{path}.{name} is required with type {kind}", param=f"{path}.{name}")


def _text(parts: Sequence[ResultPart], path: str) -> str:
    for i, part in enumerate(parts):
        if part.type != "text":
            raise UnsupportedField(
                f"content of type {shown(part.type)} is not supported; accepted: text", param=f"{path}[{i}].type"
            )
        if part.text is None:
            raise InvalidRequest(f"{path}[{i}].text is required", param=f"{path}[{i}].text")
    return _BETWEEN_TEXTS.join(part.text or "" for part in parts)
