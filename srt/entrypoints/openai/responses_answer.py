"""The answers of /v1/responses: a response, its items, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..wire import doc

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
_TYPE = "type"


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field=_TYPE):
    text: Annotated[str, doc("The text")]
    annotations: Annotated[list[Any], doc("Always empty")]
    logprobs: Annotated[list[Any], doc("Always empty")]


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field=_TYPE):
    text: Annotated[str, doc("The reasoning")]


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text", tag_field=_TYPE):
    text: Annotated[str, doc("The text")]


class OutputMessage(msgspec.Struct, frozen=True, tag="message", tag_field=_TYPE):
    """Text for the user."""

    id: Annotated[str, doc("Name of the item")]
    status: Annotated[ItemStatus, doc("Whether the item is complete")]
    role: Annotated[Literal["assistant"], doc("Who speaks")]
    content: Annotated[list[OutputText], doc("The text, in one part")]


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call", tag_field=_TYPE):
    """A call of a function."""

    id: Annotated[str, doc("Name of the item")]
    call_id: Annotated[str, doc("Name of the call, for the item with its output")]
    name: Annotated[str, doc("Name of the function")]
    arguments: Annotated[str, doc("The arguments as JSON text, as in /v1/chat/completions")]
    status: Annotated[ItemStatus, doc("Whether the item is complete")]
    namespace: Annotated[str | UnsetType, doc("Namespace of the function, if it is in one")] = UNSET


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning", tag_field=_TYPE):
    """What the model thinks before its answer; only with --reasoning-parser."""

    id: Annotated[str, doc("Name of the item")]
    summary: Annotated[list[SummaryText], doc("Empty, unless a client has sent reasoning with a summary")]
    content: Annotated[list[ReasoningText], doc("The reasoning, in one part")]
    status: Annotated[ItemStatus, doc("Whether the item is complete")]


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: Annotated[int, doc("Prompt tokens whose KV the prefix cache had")]
    cache_write_tokens: Annotated[int, doc("Always 0: tokens written to the cache are not counted")]


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: Annotated[
        int, doc("Tokens of the reasoning, where one token marks its end; 0 without --reasoning-parser")
    ]


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: Annotated[int, doc("Tokens of the prompt")]
    input_tokens_details: Annotated[InputTokensDetails, doc("More about the prompt's tokens")]
    output_tokens: Annotated[int, doc("Tokens generated")]
    output_tokens_details: Annotated[OutputTokensDetails, doc("More about the generated tokens")]
    total_tokens: Annotated[int, doc("The sum of both")]


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Annotated[Literal["max_output_tokens"], doc("Why the answer is incomplete")]


class ResponseError(msgspec.Struct, frozen=True):
    code: Annotated[str, doc("What programs tell errors apart by")]
    message: Annotated[str, doc("What is wrong, for a person")]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/responses."""

    id: Annotated[str, doc("Name of the request, for /abort_request")]
    object: Annotated[Literal["response"], doc("The type of this object")] = "response"
    created_at: Annotated[int, doc("Unix time at which the request arrived, in seconds")]
    completed_at: Annotated[int | None, doc("Unix time at which the answer was complete, in seconds, else null")]
    status: Annotated[
        ResponseStatus,
        doc("`incomplete`: the answer reached its maximum length; `cancelled`: aborted, or over its running time"),
    ]
    incomplete_details: Annotated[IncompleteDetails | None, doc("Why the answer is incomplete")]
    error: Annotated[ResponseError | None, doc("Why a stream failed, else null")]
    model: Annotated[str, doc("The served name")]
    output: Annotated[list[OutputItem], doc("The items of the answer")]
    usage: Annotated[ResponseUsage | None, doc("Counts of tokens; null until the answer has ended")]
    instructions: Annotated[str | None, doc("As in the request")]
    max_output_tokens: Annotated[int | None, doc("As in the request")]
    temperature: Annotated[float, doc("The temperature that was used")]
    top_p: Annotated[float, doc("The top_p that was used")]
    frequency_penalty: Annotated[float, doc("The penalty that was used")]
    presence_penalty: Annotated[float, doc("The penalty that was used")]
    tools: Annotated[list[Any], doc("As in the request")]
    tool_choice: Annotated[Any, doc("As in the request; default `auto`")]
    parallel_tool_calls: Annotated[bool, doc("As in the request; default true")]
    text: Annotated[dict[str, Any], doc("As in the request; default: plain text")]
    reasoning: Annotated[dict[str, Any], doc("As in the request")]
    metadata: Annotated[dict[str, str], doc("As in the request")]
    user: Annotated[str | None, doc("As in the request")]
    safety_identifier: Annotated[str | None, doc("As in the request")]
    prompt_cache_key: Annotated[str | None, doc("As in the request")]
    store: Annotated[bool, doc("Whether the response is stored when it is complete or incomplete")]
    background: Annotated[Literal[False], doc("Always false")] = False
    previous_response_id: Annotated[str | None, doc("As in the request")]
    max_tool_calls: Annotated[None, doc("Always null")] = None
    top_logprobs: Annotated[int, doc("Always 0")] = 0
    truncation: Annotated[
        Literal["auto", "disabled"],
        doc("As in the request; default: `auto` with --allow-auto-truncate, else `disabled`"),
    ]
    service_tier: Annotated[Literal["default"], doc("Always `default`")] = "default"


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. Which fields it has depends on `type`."""

    type: Annotated[
        str, doc("The kind of event, such as `response.output_text.delta`; the SSE field `event` is the same")
    ]
    sequence_number: Annotated[int, doc("Number of earlier events of this stream")]
    response: Annotated[Response | UnsetType, doc("The response so far; in events about the whole response")] = UNSET
    output_index: Annotated[int | UnsetType, doc("Place of the item in `output`; in events about an item")] = UNSET
    item: Annotated[OutputItem | UnsetType, doc("The item; when it begins and when it ends")] = UNSET
    item_id: Annotated[str | UnsetType, doc("Name of the item; in events about its content")] = UNSET
    content_index: Annotated[int | UnsetType, doc("Always 0; in events about a part of an item")] = UNSET
    part: Annotated[OutputText | ReasoningText | UnsetType, doc("The part; when it begins and when it ends")] = UNSET
    delta: Annotated[str | UnsetType, doc("The text or the arguments that are new")] = UNSET
    text: Annotated[str | UnsetType, doc("The whole text, when it has ended")] = UNSET
    name: Annotated[str | UnsetType, doc("Name of the function, when its arguments have ended")] = UNSET
    arguments: Annotated[str | UnsetType, doc("The whole arguments, when they have ended")] = UNSET
    logprobs: Annotated[list[Any] | UnsetType, doc("Always empty; in events about the answer's text")] = UNSET
