"""The body and the answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..wire import TEXT_ONLY, Int32, Int64, Wire, doc, only
from .logprobs import ChatLogprobs
from .protocol import Extension, OpenAIBody, Usage
from .tool_protocol import CacheBreakpoint, CacheControl, GivenToolCall, Tool, ToolCall, ToolCallDelta, ToolChoice

_NO_FUNCTIONS = "it is the older form of tools"


_NO_STORE = "answers are not stored"


MAX_MESSAGES = 10_000


ChatFinishName = Literal["stop", "length", "abort", "tool_calls"]


class TextPart(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: Annotated[str, doc('`"text"`; other kinds of content are refused')]
    text: Annotated[str | None, doc("The text")] = None
    image_url: Annotated[Any, only(TEXT_ONLY)] = None
    video_url: Annotated[Any, only(TEXT_ONLY)] = None
    audio_url: Annotated[Any, only(TEXT_ONLY)] = None
    input_audio: Annotated[Any, only(TEXT_ONLY)] = None
    file: Annotated[Any, only(TEXT_ONLY)] = None
    refusal: Annotated[Any, only("a refusal is ordinary text in content")] = None
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheBreakpoint = None


class Message(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One message of a chat. `developer` is the same as `system`."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        doc(
            "Author of the message; `tool`: the result of a call; `function` is refused: it is the older form of `tool`"
        ),
    ]
    content: Annotated[
        str | list[TextPart] | None,
        doc("Text of the message; parts are concatenated; null is no text, and allowed only for the assistant"),
    ] = None
    name: Annotated[str | None, doc("Passed to the chat template")] = None
    reasoning_content: Annotated[str | None, doc("Passed to the chat template")] = None
    tool_calls: Annotated[
        list[GivenToolCall] | None, doc("Calls that the assistant made; passed to the chat template")
    ] = None
    tool_call_id: Annotated[
        str | None, doc("The call whose result this is; only with role `tool`; passed to the chat template")
    ] = None
    function_call: Annotated[Any, only(_NO_FUNCTIONS)] = None
    refusal: Annotated[Any, only("a refusal is ordinary text in content")] = None
    audio: Annotated[Any, only(TEXT_ONLY)] = None
    annotations: Annotated[Any, only("annotations are not supported", [])] = None
    provider_specific_fields: Annotated[
        Any, only("fields of other providers are not supported", {}, {"refusal": None})
    ] = None
    parsed: Annotated[
        Any, doc("It has no effect: `parse` of the openai library adds it, and `content` has the same as text")
    ] = None
    cache_control: CacheControl = None


class Prediction(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A text that the answer will probably resemble, such as the code that the model is to change."""

    type: Annotated[Literal["content"], doc("The kind of prediction")]
    content: Annotated[str | list[TextPart], doc("The text; parts are concatenated")]


class ChatBody(OpenAIBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], doc("The conversation so far, 1 to 10,000 messages")]
    max_completion_tokens: Annotated[
        Int64 | None,
        doc(
            "Maximum number of tokens to generate; 0: only compute and cache the prompt; "
            "default: up to the end of the context"
        ),
    ] = None
    max_tokens: Annotated[Int64 | None, doc("The older name of max_completion_tokens")] = None
    add_generation_prompt: Annotated[
        bool | None,
        doc("Open the assistant's turn after the messages, default true (with continue_final_message: false)"),
    ] = None
    continue_final_message: Annotated[
        bool | None, doc("Continue the last message instead of answering it; refused if that message has calls")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Further variables for the chat template, such as `enable_thinking`")
    ] = None
    logprobs: Annotated[bool | None, doc("Return the log probability of each generated token")] = None
    top_logprobs: Annotated[
        Int32 | None,
        doc("Also return this many of the most probable tokens, 0 (default) to 20; no effect without `logprobs`"),
    ] = None
    echo: Annotated[Any, only("an answer does not repeat the chat", False)] = None
    tools: Annotated[list[Tool] | None, doc("Functions that the model may call")] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None,
        doc(
            "`auto` (default): the model decides; `none`: it sees no tools; `required`: it must call; an object: it "
            "must call one function, or may call only some"
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None,
        doc(
            "Allow several calls in one answer, default true, but false for a required call; false: the answer ends "
            "with the first"
        ),
    ] = None
    functions: Annotated[Any, only(_NO_FUNCTIONS, [])] = None
    function_call: Annotated[Any, only(_NO_FUNCTIONS, "none", "auto")] = None
    store: Annotated[Any, only(_NO_STORE, False)] = None
    modalities: Annotated[Any, only(TEXT_ONLY, ["text"])] = None
    audio: Annotated[Any, only(TEXT_ONLY)] = None
    prediction: Annotated[
        Prediction | None,
        doc("A text from which drafts of the answer are taken; needs a server with --speculative-algorithm NGRAM"),
    ] = None
    reasoning_effort: Annotated[
        str | None, doc("Passed to the chat template as the variable `reasoning_effort`; the model defines its values")
    ] = None
    separate_reasoning: Annotated[
        bool | None,
        doc("Return reasoning in `reasoning_content`, default true; no effect without --reasoning-parser"),
    ] = None
    stream_reasoning: Annotated[
        bool | None,
        doc("Stream reasoning while it is written, default true; false: in one chunk; no effect without the parser"),
    ] = None
    thinking_token_budget: Annotated[
        Int32 | None,
        doc(
            "Maximum number of tokens of the reasoning, then the token that ends it follows; default: no limit; needs "
            "--reasoning-parser, and a model whose reasoning ends with a token"
        ),
    ] = None
    verbosity: Annotated[Any, only("the verbosity of answers cannot be set", "medium")] = None
    web_search_options: Annotated[Any, only("web search is not supported")] = None
    moderation: Annotated[Any, only("moderation is not supported")] = None
    prompt_cache_key: Annotated[
        str | None, doc("It has no effect: all requests share cached prefixes; cache_salt separates them")
    ] = None
    prompt_cache_options: Annotated[
        Any, only("a prefix stays cached until its memory is needed", {}, {"mode": "implicit"})
    ] = None
    prompt_cache_retention: Annotated[
        Any, only("a prefix stays cached until its memory is needed", "in-memory", "in_memory", "24h")
    ] = None
    safety_identifier: Annotated[str | None, doc("A label for the client's own use; it has no effect")] = None
    chat_template: Annotated[
        Any, only("a request cannot supply a chat template; the server's flag --chat-template sets it")
    ] = None
    documents: Annotated[
        list[dict[str, Any]] | None,
        doc("Documents for the answer, such as `title` and `text`; passed to the chat template, which must read them"),
    ] = None
    add_special_tokens: Annotated[Any, only("the chat template writes the special tokens", False)] = None


class AssistantMessage(msgspec.Struct, frozen=True):
    role: Annotated[Literal["assistant"], doc("Who speaks")]
    content: Annotated[str | None, doc("The text; null if there are only calls")]
    reasoning_content: Annotated[
        str | UnsetType | None, doc("The reasoning, or null if there is none; only with --reasoning-parser")
    ] = UNSET
    tool_calls: Annotated[list[ToolCall] | UnsetType, doc("The calls, if there are any")] = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: Annotated[int, doc("Index of the choice, from 0")]
    message: Annotated[AssistantMessage, doc("What the model says")]
    logprobs: Annotated[ChatLogprobs | None, doc("Only with `logprobs`, else null")]
    finish_reason: Annotated[ChatFinishName, doc("Why the choice ended")]
    matched_stop: Annotated[
        int | str | None, doc("The stop token's id or the stop string that ended the choice, else null")
    ]
    token_ids: Annotated[list[int] | UnsetType, doc("Generated token ids; only with `return_token_ids`")] = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """Answer of /v1/chat/completions."""

    id: Annotated[str, doc("The request's name: its `rid`, or a random one")]
    object: Annotated[Literal["chat.completion"], doc("The type of this object")]
    created: Annotated[int, doc("Unix time at which the request arrived, in seconds")]
    model: Annotated[str, doc("The served name")]
    choices: Annotated[list[ChatChoice], doc("The samples")]
    usage: Annotated[Usage, doc("Counts of tokens")]
    prompt_token_ids: Annotated[
        list[int] | UnsetType, doc("Token ids of the rendered chat; only with `return_token_ids`")
    ] = UNSET
    sglext: Annotated[Extension | UnsetType, doc("Only with `return_cached_tokens_details`")] = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: Annotated[Literal["assistant"] | UnsetType, doc("Only in a choice's first chunk")] = UNSET
    content: Annotated[str | UnsetType, doc("The text that is new")] = UNSET
    reasoning_content: Annotated[str | UnsetType, doc("The reasoning that is new")] = UNSET
    tool_calls: Annotated[list[ToolCallDelta] | UnsetType, doc("One call with what is new in it")] = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: Annotated[int, doc("Index of the choice, from 0")]
    delta: Annotated[Delta, doc("What is new in the message")]
    logprobs: Annotated[
        ChatLogprobs | None, doc("Those of new tokens, whose text may follow later; only with `logprobs`, else null")
    ]
    finish_reason: Annotated[ChatFinishName | None, doc("Why the choice ended; null while it runs")]
    matched_stop: Annotated[
        int | str | UnsetType | None,
        doc("The stop token's id or the stop string, else null; only in a choice that has finished"),
    ] = UNSET
    token_ids: Annotated[list[int] | UnsetType, doc("Token ids that are new; only with `return_token_ids`")] = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """A chunk of a chat's stream. `usage` is null in all but the last where the stream ends with it."""

    id: Annotated[str, doc("As in the answer that is not a stream")]
    object: Annotated[Literal["chat.completion.chunk"], doc("The type of this object")]
    created: Annotated[int, doc("As in the answer that is not a stream")]
    model: Annotated[str, doc("The served name")]
    choices: Annotated[list[ChunkChoice], doc("One choice with new content, or none beside `usage` or `sglext`")]
    usage: Annotated[Usage | UnsetType | None, doc("Counts of tokens; see stream_options")] = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType, doc("Token ids of the rendered chat; only with `return_token_ids`")
    ] = UNSET
    sglext: Annotated[Extension | UnsetType, doc("Only with `return_cached_tokens_details`")] = UNSET
