"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ..openai.protocol import CacheSalt, LoraPath, Priority, RetentionSeconds, RunningTimeout, SessionId, WaitingTimeout
from ..openai.tool_protocol import CacheControl
from ..wire import TEXT_ONLY, Int32, Int64, Wire, doc, only

_NO_CITATIONS = "citations are not supported"
_KEPT_WHOLE: tuple[Any, ...] = {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class ResultPart(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One part of the result of a call, or of `system`."""

    type: Annotated[str, doc('`"text"`; other kinds of content are refused')]
    text: Annotated[str | None, doc("The text")] = None
    citations: Annotated[Any, only(_NO_CITATIONS, [])] = None
    source: Annotated[Any, only(TEXT_ONLY)] = None
    cache_control: CacheControl = None


class ContentBlock(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One block of a message. Which other fields it has depends on `type`."""

    type: Annotated[
        str, doc("`text`, `thinking`, `tool_use` or `tool_result`; images, documents and others are refused")
    ]
    text: Annotated[str | None, doc("The text of a block `text`")] = None
    thinking: Annotated[str | None, doc("The reasoning of a block `thinking`; passed to the chat template")] = None
    signature: Annotated[str | None, doc("It has no effect: reasoning is taken back as it is")] = None
    id: Annotated[str | None, doc("Name of the call of a block `tool_use`")] = None
    name: Annotated[str | None, doc("The called function")] = None
    input: Annotated[dict[str, Any] | None, doc("The arguments of the call")] = None
    tool_use_id: Annotated[str | None, doc("The call whose result a block `tool_result` is")] = None
    content: Annotated[str | list[ResultPart] | None, doc("The result of the call; default: no text")] = None
    is_error: Annotated[bool | None, doc("The call failed: the model reads `Error: ` before the result")] = None
    citations: Annotated[Any, only(_NO_CITATIONS, [])] = None
    caller: Annotated[Any, only("only the model calls functions", {"type": "direct"})] = None
    toolset_name: Annotated[Any, only("sets of tools are not supported")] = None
    source: Annotated[Any, only(TEXT_ONLY)] = None
    data: Annotated[Any, only("reasoning is sent as text")] = None
    cache_control: CacheControl = None


class InputMessage(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Annotated[Literal["user", "assistant", "system"], doc("Author of the message")]
    content: Annotated[str | list[ContentBlock], doc("Its text, or a list of blocks")]


class MessagesTool(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Annotated[str, doc("1 to 128 letters, digits, `_`, `-` and `.`")]
    input_schema: Annotated[dict[str, Any], doc("JSON Schema of the arguments, of type object")]
    type: Annotated[Literal["custom"] | None, doc("Always `custom`; tools that a server runs are not supported")] = None
    description: Annotated[str | None, doc("What the function does; the model reads it")] = None
    strict: Annotated[bool | None, doc("As in /v1/chat/completions; default false")] = None
    eager_input_streaming: Annotated[
        bool | None, doc("It has no effect: arguments are streamed while the model writes them")
    ] = None
    defer_loading: Annotated[Any, only("the model sees all tools", False)] = None
    allowed_callers: Annotated[Any, only("only the model calls functions", ["direct"])] = None
    input_examples: Annotated[Any, only("write examples into the description", [])] = None
    cache_control: CacheControl = None


class MessagesToolChoice(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`tool_choice`: whether the model calls a function, and which."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        doc("`auto`: the model decides; `any`: it must call; `tool`: it must call `name`; `none`: it sees no tools"),
    ]
    name: Annotated[str | None, doc("The function that must be called; only with `tool`")] = None
    disable_parallel_tool_use: Annotated[
        bool | None, doc("True: one call at most; false: several, if the call is not required; default: false")
    ] = None


class Thinking(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`thinking`: whether the model thinks before it answers, if its chat template lets one choose."""

    type: Annotated[
        Literal["enabled", "adaptive", "disabled"],
        doc(
            "`enabled` and `adaptive`: the variables `enable_thinking` and `thinking` of the chat template are true; "
            "`disabled`: they are false"
        ),
    ]
    budget_tokens: Annotated[
        Int32 | None,
        doc("As `thinking_token_budget` of /v1/chat/completions; no effect where that is not possible"),
    ] = None
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        doc("`omitted`: blocks `thinking` come without their text; default: with the whole text"),
    ] = None


class OutputFormat(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`output_config.format`: the form of the answer's text."""

    type: Annotated[Literal["json_schema"], doc("Always `json_schema`")]
    schema: Annotated[dict[str, Any], doc("JSON schema that the text matches")]


class OutputConfig(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`output_config`: how the model answers."""

    effort: Annotated[str | None, doc("Passed to the chat template as the variable `reasoning_effort`")] = None
    format: Annotated[OutputFormat | None, doc("The form of the answer's text; default: any text")] = None


class Metadata(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`metadata`."""

    user_id: Annotated[
        str | None, doc("Name of the tenant, unless several API keys or the header x-tenant name it")
    ] = None


class CountTokensBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/messages/count_tokens."""

    messages: Annotated[
        list[InputMessage],
        doc(
            "The conversation so far. Neighbouring messages of one author are one message. The answer continues a last "
            "message of the assistant"
        ),
    ]
    model: Annotated[str | None, doc("As in /v1/completions")] = None
    system: Annotated[str | list[ResultPart] | None, doc("A system message before the conversation")] = None
    tools: Annotated[list[MessagesTool] | None, doc("Functions that the model may call")] = None
    tool_choice: Annotated[MessagesToolChoice | None, doc("Whether the model calls a function; default `auto`")] = None
    thinking: Annotated[Thinking | None, doc("Whether the model thinks; default: the chat template decides")] = None
    output_config: Annotated[OutputConfig | None, doc("How the model answers")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Further variables for the chat template")] = None
    lora_path: LoraPath = None
    cache_control: CacheControl = None
    context_management: Annotated[Any, only("the server does not shorten conversations", *_KEPT_WHOLE)] = None
    mcp_servers: Annotated[Any, only("the server calls no tools", [])] = None
    speed: Annotated[Any, only("the server has one speed", "standard")] = None
    user_profile_id: Annotated[Any, only("the server has no profiles of users")] = None
    workspace_id: Annotated[Any, only("the server has no workspaces")] = None


class MessagesBody(CountTokensBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/messages."""

    max_tokens: Annotated[
        Int64, doc("Maximum number of tokens to generate; an answer also ends at the end of the context")
    ]
    stream: Annotated[bool | None, doc("Stream the answer as server-sent events")] = None
    stop_sequences: Annotated[list[str] | None, doc("Texts that end the answer, at most 32")] = None
    temperature: Annotated[float | None, doc("At least 0; a value below 1e-6 selects greedy decoding")] = None
    top_p: Annotated[float | None, doc("In (0, 1]")] = None
    top_k: Annotated[Int32 | None, doc("At least 1; -1 allows all tokens")] = None
    metadata: Annotated[Metadata | None, doc("Whose request it is")] = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    waiting_timeout: WaitingTimeout = None
    running_timeout: RunningTimeout = None
    session_id: SessionId = None
    retention_seconds: RetentionSeconds = None
    service_tier: Annotated[Any, only("the server has one service tier", "auto", "standard_only")] = None
    inference_geo: Annotated[Any, only("the server runs in one place")] = None
    container: Annotated[Any, only("the server runs no code")] = None
    diagnostics: Annotated[Any, only("there are no diagnostics of requests")] = None
