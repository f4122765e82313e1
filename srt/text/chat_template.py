"""Chat templates: Jinja templates that turn chat messages into a prompt of the form that a model was trained on.

A template comes with the model or from the operator, never from a request. It is not trusted, so it runs in Jinja's
sandbox, where it cannot change its arguments or reach Python's internals. The Jinja environment is the one that
`transformers` documents for templates on the Hugging Face Hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequest

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_END_MARK = "\ue0f0end of the final message\ue0f1 "


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. Here it only outputs its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class ChatTemplate:
    """A compiled template. Raises ValueError if `source` is not a valid Jinja template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid (line {error.lineno}): {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Make the prompt. `kwargs`: further variables of the template.

        `continue_final_message`: the prompt ends within the last message, so that the model continues it.
        Raises InvalidRequest, with the template's own message, if the template does not accept the messages.
        """
        if not messages:
            raise InvalidRequest("messages must contain at least one message", param="messages")
        chat = [_prepare(message) for message in messages]
        if continue_final_message:
            _mark_end(chat, add_generation_prompt)
        variables = {
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": chat,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error.message}", param="messages"
            ) from error
        except Exception as error:  # a template can raise any error on unexpected data
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        return _cut_at_mark(prompt) if continue_final_message else prompt


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in the form that templates expect: without nulls, content as text, reasoning under both of its names."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages must be objects, got {type(message).__name__}", param="messages")
    prepared = {key: value for key, value in message.items() if value is not None}
    content = prepared.get("content")
    if isinstance(content, list | tuple):
        prepared["content"] = "".join(_part_text(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(
            f"content must be a string or a list of text parts, got {type(content).__name__}", param="messages"
        )
    reasoning = next((prepared[key] for key in _REASONING_KEYS if key in prepared), None)
    if reasoning is not None:
        prepared.setdefault("thinking", reasoning)
        prepared["reasoning_content"] = reasoning
    return prepared


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise InvalidRequest(
            f"content parts of type {kind!r} are not supported by this model; only 'text' is", param="messages"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"a text part needs a string in 'text', got {text!r}", param="messages")
    return text


def _mark_end(chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if "content" not in chat[-1]:
        raise InvalidRequest(
            "continue_final_message requires a last message with content", param="continue_final_message"
        )
    chat[-1]["content"] += _END_MARK


def _cut_at_mark(prompt: str) -> str:
    """Cut the prompt at the mark after the last message's content.

    The mark ends with a space. If the template trims messages, this space is missing, and the spaces before the mark
    are removed, too.
    """
    at = prompt.rfind(_END_MARK.rstrip())
    if at < 0:
        raise InvalidRequest(
            "continue_final_message is not possible: the chat template omits the last message",
            param="continue_final_message",
        )
    keeps_spaces = prompt.startswith(_END_MARK, at)
    return prompt[:at] if keeps_spaces else prompt[:at].rstrip()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Replaces Jinja's own filter, which escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
