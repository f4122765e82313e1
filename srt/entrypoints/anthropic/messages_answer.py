"""The answers of /v1/messages and /v1/messages/count_tokens, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..wire import doc

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]
_TYPE = "type"


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field=_TYPE):
    text: Annotated[str, doc("The text")]


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field=_TYPE):
    """What the model thinks before its answer; only with --reasoning-parser."""

    thinking: Annotated[str, doc("The reasoning; empty with `display: omitted`")]
    signature: Annotated[str, doc("Always empty: reasoning is taken back as text")] = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field=_TYPE):
    """A call of a function."""

    id: Annotated[str, doc("Name of the call, for the block with its result")]
    name: Annotated[str, doc("Name of the function")]
    input: Annotated[
        Any,
        doc("The arguments, an object; empty where a stream begins the block, and if the answer was cut off in them"),
    ]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """Counts of tokens. The prompt has the sum of the first three."""

    input_tokens: Annotated[int, doc("Prompt tokens that were computed")]
    cache_creation_input_tokens: Annotated[int, doc("Always 0: tokens written to the cache are not counted")]
    cache_read_input_tokens: Annotated[int, doc("Prompt tokens whose KV the prefix cache had")]
    output_tokens: Annotated[int, doc("Tokens generated")]


class AnsweredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/messages."""

    id: Annotated[str, doc("Name of the request, for /abort_request")]
    type: Annotated[Literal["message"], doc("The type of this object")] = "message"
    role: Annotated[Literal["assistant"], doc("Who speaks")] = "assistant"
    model: Annotated[str, doc("The served name")]
    content: Annotated[list[AnswerBlock], doc("The blocks of the answer")]
    stop_reason: Annotated[
        StopReason | None,
        doc(
            "Why the answer ended; null where a stream begins. `pause_turn`: it was aborted, or was over its running "
            "time"
        ),
    ]
    stop_sequence: Annotated[str | None, doc("The one of `stop_sequences` that ended the answer, else null")]
    usage: Annotated[MessageUsage, doc("Counts of tokens")]


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new in a block, or how the answer ended."""

    type: Annotated[
        Literal["text_delta", "thinking_delta", "input_json_delta"] | UnsetType,
        doc("What is new: text, reasoning, or arguments of a call"),
    ] = UNSET
    text: Annotated[str | UnsetType, doc("The text that is new")] = UNSET
    thinking: Annotated[str | UnsetType, doc("The reasoning that is new")] = UNSET
    partial_json: Annotated[str | UnsetType, doc("The new part of the arguments' JSON text")] = UNSET
    stop_reason: Annotated[StopReason | UnsetType, doc("As in the answer that is not a stream")] = UNSET
    stop_sequence: Annotated[str | UnsetType | None, doc("As in the answer that is not a stream")] = UNSET


class MessageError(msgspec.Struct, frozen=True):
    """Why a stream failed."""

    type: Annotated[str, doc("Kind of error")]
    message: Annotated[str, doc("What is wrong, for a person")]


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. Which fields it has depends on `type`."""

    type: Annotated[
        Literal[
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
            "error",
        ],
        doc("The kind of event; the SSE field `event` is the same"),
    ]
    message: Annotated[AnsweredMessage | UnsetType, doc("The message without content; in `message_start`")] = UNSET
    index: Annotated[int | UnsetType, doc("Place of the block in `content`; in events about a block")] = UNSET
    content_block: Annotated[AnswerBlock | UnsetType, doc("The block, still empty; in `content_block_start`")] = UNSET
    delta: Annotated[
        MessageDelta | UnsetType, doc("What is new in the block; in `message_delta`, how the answer ended")
    ] = UNSET
    usage: Annotated[MessageUsage | UnsetType, doc("Counts of tokens at the end; in `message_delta`")] = UNSET
    error: Annotated[MessageError | UnsetType, doc("Why the stream failed; in `error`")] = UNSET


class TokenCount(msgspec.Struct, frozen=True):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: Annotated[int, doc("Tokens of the prompt that /v1/messages makes of the same body")]
