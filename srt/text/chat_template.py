"""Chat templates: Jinja templates that turn chat messages into a prompt of the form that a model was trained on.

A template comes with the model or from the operator, never from a request. It is not trusted, so it runs in Jinja's
sandbox, where it cannot change its arguments or reach Python's internals. The Jinja environment is the one that
`transformers` documents for templates on the Hugging Face Hub.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequest
from .tool_messages import (
    CALL_SHAPES,
    PROBE_CHAT,
    PROBE_TOOL,
    PROBE_VALUE,
    CallShape,
    in_shape,
    uses_tools,
    without_tools,
)

MAX_STEPS = 1_000_000
"""Most bodies of loops and macros in one rendering, which take seconds. Templates run a few for each message."""
_COUNT_STEP = "count step"
"""No template can use a name with a space."""
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_END_MARK = "\ue0f0end of the final message\ue0f1 "


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. Here it only outputs its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _TooManySteps(Exception):
    """A template has run more than MAX_STEPS bodies of loops and macros."""


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one template. It counts the bodies of loops and macros that a rendering runs.

    Without a limit, a template that never ends would hold the process: Python cannot end a thread. The sandbox limits
    only `range`, and not loops in loops or a macro that calls itself twice.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        # A filter, because the sandbox makes calls slow. It has the context, so it is not computed in advance.
        self.filters[_COUNT_STEP] = self._count_step
        self._steps = threading.local()

    def begin(self) -> None:
        """Starts a rendering in this thread."""
        self._steps.number = 0

    @jinja2.pass_context
    def _count_step(self, context: Context, value: None) -> None:
        self._steps.number += 1
        if self._steps.number > MAX_STEPS:
            raise _TooManySteps

    def counting(self, template: nodes.Template) -> nodes.Template:
        """The template, in which each body of a loop or a macro counts a step when it begins."""
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            step = nodes.Filter(nodes.Const(None), _COUNT_STEP, [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno).set_environment(self))
        return template


class ChatTemplate:
    """A compiled template. Raises ValueError if `source` is not a valid Jinja template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._environment = environment = _Environment()
        try:
            parsed = environment.parse(source)
            variables = meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(environment.counting(parsed))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid (line {error.lineno}): {error.message}") from error
        except (RecursionError, SyntaxError) as error:  # of Jinja, or of the Python code that it makes
            raise ValueError(f"the chat template is nested too deeply ({error.args[0]})") from error
        self.source = source
        self.knows_tools, self.knows_documents = "tools" in variables, "documents" in variables
        self._special_tokens = dict(special_tokens)

    @functools.cached_property
    def call_shape(self) -> CallShape:
        """The shape in which the template renders calls, found by trying."""
        plain = self._tried(PROBE_CHAT[:1])
        for shape in CALL_SHAPES:
            rendered = self._tried(in_shape(PROBE_CHAT, shape))
            # Where a template prints a value of another type, Python's notation shows up.
            is_json = "'probe_key'" not in rendered and rendered.count("None") == plain.count("None")
            if PROBE_VALUE in rendered and is_json:
                return shape
        return CALL_SHAPES[0]

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether the template renders a system message."""
        return "probe" in self._tried([{"role": "system", "content": "probe"}, *PROBE_CHAT[:1]])

    def _tried(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of these messages, or "" if the template refuses them."""
        try:
            return self._rendered(list(messages), tools=[PROBE_TOOL], add_generation_prompt=True)
        except InvalidRequest:
            return ""

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
        chat: list[Mapping[str, Any]] = [_prepare(message) for message in messages]
        if continue_final_message and chat[-1].get("tool_calls"):
            raise InvalidRequest(
                "continue_final_message is not possible after tool_calls: the last message must end with its content",
                param="continue_final_message",
            )
        if not self.knows_tools and (tools or uses_tools(chat)):
            chat, tools = without_tools(chat, tools, takes_system=self.takes_system), None
        elif uses_tools(chat):
            chat = in_shape(chat, self.call_shape)
        if continue_final_message:
            _mark_end(chat, add_generation_prompt)
        prompt = self._rendered(chat, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def _rendered(self, chat: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        self._environment.begin()
        variables = {"documents": None, **self._special_tokens, **variables, "messages": chat}
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error.message}", param="messages"
            ) from error
        except _TooManySteps as error:
            raise InvalidRequest(
                f"the chat template takes more than {MAX_STEPS:,} steps to render these messages", param="messages"
            ) from error
        except Exception as error:  # a template can raise any error on unexpected data
            # Its text could show a value of this process, such as an address. Its type is enough to find the mistake.
            raise InvalidRequest(
                f"the chat template cannot render these messages ({type(error).__name__})", param="messages"
            ) from error


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


def _mark_end(chat: list[Mapping[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if "content" not in chat[-1]:
        raise InvalidRequest(
            "continue_final_message requires a last message with content", param="continue_final_message"
        )
    chat[-1] = {**chat[-1], "content": chat[-1]["content"] + _END_MARK}


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
