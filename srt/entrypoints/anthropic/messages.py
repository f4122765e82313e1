"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's conversation becomes a chat, and its answer blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...errors import InvalidRequest, TercetError
from ...io_struct import LengthFinish, StopFinish, TextOut
from ..error_handlers import text_with_param
from ..job import Sample
from ..lora import target_of
from ..openai.chat import CHAT_CODEC, render_chat, run_chat
from ..openai.chat_protocol import ChatBody
from ..openai.common import usage_of
from ..openai.planned_format import NamedEventsFormat
from ..openai.tools import AnswerPlan, limits_reasoning, plan_answer
from ..request_names import RequestNames, names_of
from ..routing import Server, in_thread_if_large, json_response
from ..wire import BodyCodec
from .content_blocks import ContentBlocks
from .messages_answer import (
    AnsweredMessage,
    MessageDelta,
    MessageError,
    MessageEvent,
    MessageUsage,
    StopReason,
    TokenCount,
)
from .messages_input import chat_of
from .messages_protocol import CountTokensBody, MessagesBody

MESSAGES_CODEC = BodyCodec(MessagesBody)
COUNT_TOKENS_CODEC = BodyCodec(CountTokensBody)

_THEIR_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "thinking_token_budget": "thinking.budget_tokens",
    "prompt": "messages",
}
"""The fields of a chat that have another name in this API. Of two that begin alike, the longer comes first."""


async def messages(server: Server, request: Request, body: MessagesBody) -> ASGIApp:
    """Handler of /v1/messages."""
    model, adapter = target_of(server.manager, body.model, body.lora_path)
    names = names_of(request.scope)
    name = f"msg_{names.hex()}"
    try:
        chat = await in_thread_if_large(request, _chat, body, name)
        if not limits_reasoning(server.manager):  # clients send a budget to every model
            chat = msgspec.structs.replace(chat, thinking_token_budget=None)
        return await run_chat(
            server,
            request,
            chat,
            name,
            lambda plan, _: _MessagesFormat(body, name, model, plan, names),
            adapter=adapter,
        )
    except InvalidRequest as error:
        raise _renamed(error) from None


async def count_tokens(server: Server, request: Request, body: CountTokensBody) -> ASGIApp:
    """Handler of /v1/messages/count_tokens."""
    target_of(server.manager, body.model, body.lora_path)
    try:
        chat = await in_thread_if_large(request, _chat, body)
        plan = plan_answer(server.manager, [tool.function for tool in chat.tools or ()], chat.tool_choice)
        text = await in_thread_if_large(
            request,
            render_chat,
            server,
            chat.messages,
            tools=plan.tools,
            add_generation_prompt=None,
            continue_final_message=bool(chat.continue_final_message),
            kwargs=chat.chat_template_kwargs or {},
        )
        ids = await server.manager.inputs.encode_off_loop(text, add_special_tokens=False)
    except InvalidRequest as error:
        raise _renamed(error) from None
    return json_response(TokenCount(len(ids)))


def _chat(body: CountTokensBody, name: str | None = None) -> ChatBody:
    return CHAT_CODEC.convert({**chat_of(body), "rid": name})


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """The error with the field names of this API."""
    message, param = error.message, error.param or ""
    for ours, theirs in _THEIR_NAMES.items():
        if param == ours or param.startswith((f"{ours}.", f"{ours}[")):
            param = theirs + param.removeprefix(ours)
            if message.startswith(ours):
                message = theirs + message.removeprefix(ours)
            break
    return type(error)(message, param=param or None)


class _MessagesFormat(NamedEventsFormat):
    end = b""

    def __init__(self, body: MessagesBody, name: str, model: str, plan: AnswerPlan, names: RequestNames) -> None:
        super().__init__(plan, names, is_stream=bool(body.stream))
        self._body = body
        self._name = name
        self._model = model
        self._has_begun = False
        self._blocks: ContentBlocks

    def begin(self, samples: Sequence[Sample]) -> None:
        super().begin(samples)
        thinking = self._body.thinking
        omits_thinking = thinking is not None and thinking.display == "omitted"
        self._blocks = ContentBlocks(self._tell, self._readers[0].call_id, omits_thinking=omits_thinking)

    def events(self, sample: Sample, out: TextOut) -> bytes:
        if not self._has_begun:  # now it is known how many tokens were cached
            self._has_begun = True
            self._tell("message_start", message=self._message(None))
        self._read(out)
        return self._told()

    def last_events(self) -> bytes:
        end = MessageDelta(stop_reason=self._stop_reason(), stop_sequence=self._stop_sequence())
        self._tell("message_delta", delta=end, usage=self._usage())
        self._tell("message_stop")
        return self._told()

    def failure(self, error: TercetError) -> bytes:
        if isinstance(error, InvalidRequest):
            error = _renamed(error)
        self._tell("error", error=MessageError(_kind_of(error), text_with_param(error)))
        return self._told()

    def full_response(self) -> Any:
        self._read(self._samples[0].collected)
        return self._message(self._stop_reason())

    def _read(self, out: TextOut) -> None:
        ended = out.finish is not None
        self._blocks.add(self._readers[0].parts(out.text, is_last=ended))
        if ended:
            self._blocks.end()
            self.note_end(self._samples[0])

    def _event(self, kind: Any, **fields: Any) -> MessageEvent:
        return MessageEvent(type=kind, **fields)

    def _stop_reason(self) -> StopReason:
        finish = self._samples[0].finish
        if isinstance(finish, LengthFinish):
            return "max_tokens" if finish.length == self._body.max_tokens else "model_context_window_exceeded"
        if not isinstance(finish, StopFinish):
            return "pause_turn"
        if self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if self._readers[0].has_calls else "end_turn"

    def _stop_sequence(self) -> str | None:
        finish = self._samples[0].finish
        matched = finish.matched if isinstance(finish, StopFinish) else None
        return matched if isinstance(matched, str) and matched in (self._body.stop_sequences or ()) else None

    def _usage(self) -> MessageUsage:
        usage = usage_of(self._samples)
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens)

    def _message(self, stop_reason: StopReason | None) -> AnsweredMessage:
        return AnsweredMessage(
            id=self._name,
            model=self._model,
            content=list(self._blocks.done),
            stop_reason=stop_reason,
            stop_sequence=self._stop_sequence(),
            usage=self._usage(),
        )


def _kind_of(error: TercetError) -> str:
    """The kind of an error in a stream, as this API calls it. Rate limits are checked before a stream begins."""
    if error.status >= 500:
        return "overloaded_error" if error.status == 503 else "api_error"
    return error.err_type
