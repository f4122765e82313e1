"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ...errors import InvalidRequest
from ..wire import TEXT_ONLY, Int64, Wire, doc, only
from .protocol import CacheSalt, LoraPath, Priority, RetentionSeconds, RunningTimeout, SessionId, User, WaitingTimeout
from .tool_protocol import CacheBreakpoint, CacheControl, ParsedArguments, check_fields_of_type

_NO_SUMMARY = "reasoning is sent as text, without a summary; `auto` leaves the choice to the server"
_NOT_INCLUDED = (
    "no further contents are available; reasoning needs no encryption, because it is sent, and taken back, as text"
)
_NO_LOGPROBS = "log probabilities are not implemented in this API"


Parameters = Annotated[
    dict[str, Any] | None, doc("JSON Schema of the arguments, of type object; default: no arguments")
]
Strict = Annotated[bool | None, doc("As in /v1/chat/completions; default false")]


class InputPart(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One part of a text."""

    type: Annotated[
        Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"],
        doc("The kind of text; images and files are refused"),
    ]
    text: Annotated[str, doc("The text")]
    annotations: Annotated[Any, only("annotations are not supported", [])] = None
    logprobs: Annotated[Any, only(_NO_LOGPROBS, [])] = None
    parsed: Annotated[
        Any, doc("It has no effect: `parse` of the openai library adds it, and `text` has the same as text")
    ] = None
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheBreakpoint = None


class InputItem(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One item of the conversation. Which other fields it has depends on `type`."""

    type: Annotated[
        Literal["message", "function_call", "function_call_output", "reasoning"] | None,
        doc("The kind of item; default `message`"),
    ] = None
    role: Annotated[
        Literal["system", "developer", "user", "assistant"] | None, doc("Author of a message; `developer` is `system`")
    ] = None
    content: Annotated[str | list[InputPart] | None, doc("Text of a message, or of reasoning")] = None
    call_id: Annotated[str | None, doc("Name of a call; its output has the same")] = None
    name: Annotated[str | None, doc("The function of a call")] = None
    arguments: Annotated[str | None, doc("The arguments of a call, as JSON text")] = None
    parsed_arguments: ParsedArguments = None
    output: Annotated[str | list[InputPart] | None, doc("The result of a call")] = None
    summary: Annotated[list[InputPart] | None, doc("Text of reasoning that has no `content`")] = None
    id: Annotated[str | None, doc("Name of the item in the list of a stored response; it has no other effect")] = None
    status: Annotated[
        Literal["in_progress", "completed", "incomplete"] | None,
        doc("The list of a stored response repeats it; it has no other effect: the text says what there is"),
    ] = None
    phase: Annotated[Any, only("phases of an answer are not supported")] = None
    namespace: Annotated[str | None, doc("The namespace of the called function")] = None
    caller: Annotated[Any, only("only the model calls functions")] = None
    async_: Annotated[Any, only("calls are not asynchronous; the openai library writes `async` so", False)] = None
    encrypted_content: Annotated[Any, only("reasoning is sent as text")] = None


class ResponsesFunction(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Annotated[Literal["function"], doc("Always `function`")]
    name: Annotated[str, doc("`NAMESPACE__NAME` must have 1 to 128 letters, digits, `_`, `-` and `.`")]
    description: Annotated[str | None, doc("What the function does; the model reads it")] = None
    parameters: Parameters = None
    strict: Strict = None


class ResponsesTool(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call, or a namespace of functions."""

    type: Annotated[
        Literal["function", "namespace"], doc("`namespace`: with `tools`; tools that a server runs are not supported")
    ]
    name: Annotated[str, doc("1 to 128 letters, digits, `_`, `-` and `.`")]
    description: Annotated[
        str | None,
        doc("What the function does; the model reads it. That of a namespace is read before that of each function"),
    ] = None
    parameters: Parameters = None
    strict: Strict = None
    tools: Annotated[
        list[ResponsesFunction] | None,
        doc("The functions of a namespace. The model reads their names as `NAMESPACE__NAME`"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields_of_type(self, {"namespace": ("tools",)})
        for name in ("parameters", "strict"):
            if self.type == "namespace" and getattr(self, name) is not None:
                raise InvalidRequest(f"{name} is not allowed with type namespace", param=name)


class NamedResponsesTool(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One of the tools in `tool_choice.tools`."""

    type: Annotated[Literal["function"], doc("Always `function`")]
    name: Annotated[str, doc("The function that may be called")]


class ResponsesToolChoice(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` as an object: it requires a call of one function, or allows only some functions."""

    type: Annotated[
        Literal["function", "allowed_tools"], doc("`function`: with `name`; `allowed_tools`: with `mode` and `tools`")
    ]
    name: Annotated[str | None, doc("The function that must be called")] = None
    mode: Annotated[
        Literal["auto", "required"] | None,
        doc("`auto`: the model may call one of these functions; `required`: it must"),
    ] = None
    tools: Annotated[
        list[NamedResponsesTool] | None, doc("The functions, at least one; the model still reads all of the body's")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields_of_type(self, {"function": ("name",), "allowed_tools": ("mode", "tools")})


class TextConfig(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`text`: what the answer's text is."""

    format: Annotated[
        dict[str, Any] | None,
        doc(
            'Its form: `{"type": "text"}` (default), `{"type": "json_object"}`, or `{"type": "json_schema"}` with '
            "`name` and `schema`, as `response_format.json_schema` of /v1/chat/completions"
        ),
    ] = None
    verbosity: Annotated[Any, only("the verbosity of answers cannot be set", "medium")] = None


class ReasoningConfig(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`reasoning`: how the model thinks."""

    effort: Annotated[str | None, doc("Passed to the chat template as the variable `reasoning_effort`")] = None
    summary: Annotated[Any, only(_NO_SUMMARY, "auto")] = None
    generate_summary: Annotated[Any, only(_NO_SUMMARY, "auto")] = None


class ResponsesStreamOptions(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_obfuscation: Annotated[Any, only("chunk padding is not supported", False)] = None


class ResponsesBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/responses."""

    input: Annotated[str | list[InputItem], doc("The conversation so far: a text of the user, or a list of items")]
    model: Annotated[str | None, doc("As in /v1/completions")] = None
    instructions: Annotated[str | None, doc("A system message before the conversation")] = None
    stream: Annotated[bool | None, doc("Stream the answer as server-sent events")] = None
    stream_options: Annotated[ResponsesStreamOptions | None, doc("What a stream contains besides events")] = None
    max_output_tokens: Annotated[
        Int64 | None, doc("Maximum number of tokens to generate; default: up to the end of the context")
    ] = None
    temperature: Annotated[float | None, doc("At least 0; a value below 1e-6 selects greedy decoding")] = None
    top_p: Annotated[float | None, doc("In (0, 1]")] = None
    frequency_penalty: Annotated[float | None, doc("In [-2, 2], default 0")] = None
    presence_penalty: Annotated[float | None, doc("In [-2, 2], default 0")] = None
    tools: Annotated[list[ResponsesTool] | None, doc("Functions that the model may call")] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponsesToolChoice | None, doc("As in /v1/chat/completions")
    ] = None
    parallel_tool_calls: Annotated[bool | None, doc("As in /v1/chat/completions")] = None
    text: Annotated[TextConfig | None, doc("What the answer's text is")] = None
    reasoning: Annotated[ReasoningConfig | None, doc("How the model thinks")] = None
    metadata: Annotated[dict[str, str] | None, doc("Labels for the client's own use; the answer repeats them")] = None
    user: User = None
    safety_identifier: Annotated[str | None, doc("A label for the client's own use; it has no effect")] = None
    client_metadata: Annotated[dict[str, Any] | None, doc("Labels for the client's own use; they have no effect")] = (
        None
    )
    prompt_cache_key: Annotated[
        str | None, doc("It has no effect: all requests share cached prefixes; cache_salt separates them")
    ] = None
    cache_salt: CacheSalt = None
    lora_path: LoraPath = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Further variables for the chat template, such as `enable_thinking`")
    ] = None
    priority: Priority = None
    waiting_timeout: WaitingTimeout = None
    running_timeout: RunningTimeout = None
    session_id: SessionId = None
    retention_seconds: RetentionSeconds = None
    store: Annotated[
        bool | None,
        doc("Store the response; true needs --response-store-mib; default: true with this flag, else false"),
    ] = None
    previous_response_id: Annotated[
        str | None,
        doc("A stored response: its conversation and its output come before `input`; needs --response-store-mib"),
    ] = None
    conversation: Annotated[
        Any, only("conversations are not stored; send previous_response_id, or the whole conversation as input")
    ] = None
    background: Annotated[Any, only("the answer belongs to its connection; none is made in the background", False)] = (
        None
    )
    background_options: Annotated[Any, only("no answer is made in the background")] = None
    prompt: Annotated[Any, only("prompts are not stored")] = None
    include: Annotated[Any, only(_NOT_INCLUDED, [], ["reasoning.encrypted_content"])] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        doc(
            "`auto`: a prompt that is too long loses its first tokens; `disabled`: it is refused; null: "
            "--allow-auto-truncate decides"
        ),
    ] = None
    max_tool_calls: Annotated[Any, only("the server runs no tools")] = None
    top_logprobs: Annotated[Any, only(_NO_LOGPROBS, 0)] = None
    service_tier: Annotated[Any, only("the server has one service tier", "auto", "default")] = None
    prompt_cache_retention: Annotated[
        Any, only("a prefix stays cached until its memory is needed", "in-memory", "in_memory", "24h")
    ] = None
    prompt_cache_options: Annotated[Any, only("a prefix stays cached until its memory is needed")] = None
    context_management: Annotated[Any, only("the server does not shorten conversations", [])] = None
    moderation: Annotated[Any, only("moderation is not supported")] = None
    image: Annotated[Any, only(TEXT_ONLY)] = None
    access_programs: Annotated[Any, only("access programs are not supported")] = None
    modalities: Annotated[Any, only(TEXT_ONLY, ["text"])] = None
