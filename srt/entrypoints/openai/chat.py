"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from ....managers.request_registry import Prompt
from ...errors import InvalidRequest, UnsupportedField
from ...io_struct import TextOut
from ..job import Sample
from ..options import options_of
from ..routing import Server, in_thread_if_large
from ..sse import ResponseFormat, answer, event
from ..wire import BodyCodec, shown
from .common import Frame, check_stream_options, finish_name, matched_stop, sampling_of, usage_of
from .protocol import (
    MAX_MESSAGES,
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    Message,
    TextPart,
)

CHAT_CODEC = BodyCodec(ChatBody)

_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})


async def chat_completions(server: Server, request: Request, body: ChatBody) -> ASGIApp:
    """Handler of /v1/chat/completions."""
    frame = Frame(body, "chatcmpl", server.check_model(body.model))
    check_stream_options(body)
    max_tokens, max_tokens_field = _max_tokens(body)
    sampling = await in_thread_if_large(request, sampling_of, server.manager, body, max_tokens, max_tokens_field)
    render = functools.partial(
        in_thread_if_large,
        request,
        render_chat,
        server,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        kwargs=body.chat_template_kwargs or {},
    )
    prompt = Prompt(
        content=render,
        options=options_of(body, sampling),
        rid=frame.id,
        add_special_tokens=False,  # the chat template writes them
        param="messages",
    )
    return await answer(server, request, [prompt], response_format=_ChatFormat(frame), name=frame.id)


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The maximum number of output tokens, and the name of the field that set it."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            f"max_completion_tokens and max_tokens must be equal if both are given, got {new} and {old}",
            param="max_tokens",
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def render_chat(
    server: Server,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    kwargs: Mapping[str, Any],
) -> str:
    """The prompt of a chat, as text. Raises InvalidRequest, with the field's path, for invalid messages."""
    tokenizer = server.manager.tokenizer
    if tokenizer is None:
        raise InvalidRequest(
            "chat needs a tokenizer, but this engine runs with --skip-tokenizer-init", param="messages"
        )
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"messages must contain 1 to {MAX_MESSAGES} messages, got {len(messages)}", param="messages"
        )
    reserved = sorted(_RESERVED.intersection(kwargs))
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs must not contain {', '.join(reserved)}", param="chat_template_kwargs"
        )
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    given = [_as_template_wants(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return tokenizer.apply_chat_template(
        given,
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        **kwargs,
    )


def _as_template_wants(message: Message, path: str) -> dict[str, str]:
    if message.role in ("tool", "function"):
        raise UnsupportedField(
            f"role {message.role!r} is not supported: tool calling is not implemented; "
            "accepted: system, developer, user, assistant",
            param=f"{path}.role",
        )
    given = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text_of(message.content, f"{path}.content"),
    }
    if message.name is not None:
        given["name"] = message.name
    if message.reasoning_content is not None:
        given["reasoning_content"] = message.reasoning_content
    return given


def _text_of(content: str | Sequence[TextPart] | None, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{path} is required", param=path)
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise UnsupportedField(
                f"content of type {shown(part.type)} is not supported; accepted: text",
                param=f"{path}[{i}].type",
            )
        if part.text is None:
            raise InvalidRequest(f"{path}[{i}].text is required", param=f"{path}[{i}].text")
        texts.append(part.text)
    return "".join(texts)


class _ChatFormat(ResponseFormat):
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._samples: Sequence[Sample] = ()
        self._begun: set[int] = set()

    def begin(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def events(self, sample: Sample, out: TextOut) -> bytes:
        data = b""
        if sample.index not in self._begun:
            prompt_ids = sample.prompt_ids if not self._begun and self._frame.return_token_ids else None
            self._begun.add(sample.index)
            data = self._chunk(ChunkChoice(sample.index, Delta("assistant", ""), None, None), prompt_ids)
        token_ids = self._frame.ids(out.token_ids)
        if out.text or (token_ids is not UNSET and out.token_ids):
            choice = ChunkChoice(sample.index, Delta(content=out.text), None, None, token_ids=token_ids)
            data += self._chunk(choice)
        name = finish_name(sample)
        if name is not None:
            data += self._chunk(ChunkChoice(sample.index, Delta(), None, name, matched_stop(sample)))
        return data

    def last_events(self) -> bytes:
        frame = self._frame
        if not frame.ends_with_usage:
            return b""
        usage = usage_of(self._samples)
        return event(ChatChunk(frame.id, "chat.completion.chunk", frame.created, frame.model, [], usage))

    def _chunk(self, choice: ChunkChoice, prompt_ids: list[int] | None = None) -> bytes:
        frame = self._frame
        usage = frame.chunk_usage(self._samples)
        ids = UNSET if prompt_ids is None else prompt_ids
        return event(ChatChunk(frame.id, "chat.completion.chunk", frame.created, frame.model, [choice], usage, ids))

    def full_response(self) -> Any:
        frame = self._frame
        choices = []
        for sample in self._samples:
            name = finish_name(sample)
            assert name is not None
            message = AssistantMessage("assistant", sample.text)
            ids = frame.ids(sample.output_ids)
            choices.append(ChatChoice(sample.index, message, None, name, matched_stop(sample), ids))
        prompt_ids = frame.ids(self._samples[0].prompt_ids)
        usage = usage_of(self._samples)
        return ChatCompletion(frame.id, "chat.completion", frame.created, frame.model, choices, usage, prompt_ids)
