"""The OpenAI endpoints' requests and answers, with the extras that clients of SGLang and vLLM send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..wire import Int32, Int64, Wire, doc, only

_NO_LOGPROBS = "log probabilities are not there yet"
_NO_GRAMMAR = "constrained output is not there yet"
_NO_TOOLS = "tool calling is not there yet"
_NO_MULTIMODAL = "only text models are served"
_NO_STORE = "nothing is stored"

MAX_MESSAGES = 10_000


class StreamOptions(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`stream_options`; only together with `stream: true`."""

    include_usage: Annotated[bool | None, doc("A last chunk with `usage` and no choices")] = None
    continuous_usage_stats: Annotated[bool | None, doc("`usage` in every chunk: the request's totals so far")] = None
    include_obfuscation: Annotated[Any, only("chunks are not padded", False)] = None


class OpenAIBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: Annotated[
        str | None, doc("The served name, the model's path, or `default`; absent: the model that is served")
    ] = None
    stream: Annotated[bool | None, doc("Answer by server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, doc("What a stream tells besides text")] = None
    n: Annotated[int | None, doc("Samples of each prompt, 1 to 128, default 1")] = None
    temperature: Annotated[float | None, doc("At least 0; below 1e-6: greedy")] = None
    top_p: Annotated[float | None, doc("In (0, 1]")] = None
    stop: Annotated[str | list[str] | None, doc("Texts that end the output, at most 32")] = None
    seed: Annotated[Int64 | None, doc("Same seed, same tokens; sample i of n uses seed + i")] = None
    frequency_penalty: Annotated[float | None, doc("In [-2, 2], default 0")] = None
    presence_penalty: Annotated[float | None, doc("In [-2, 2], default 0")] = None
    logit_bias: Annotated[dict[str, float] | None, doc("Token id to what is added to its logit, in [-100, 100]")] = None
    top_k: Annotated[Int32 | None, doc("At least 1, or -1: all tokens")] = None
    min_p: Annotated[float | None, doc("In [0, 1]")] = None
    repetition_penalty: Annotated[float | None, doc("In (0, 2]")] = None
    min_tokens: Annotated[Int64 | None, doc("No end token before this many, default 0")] = None
    stop_token_ids: Annotated[list[int] | None, doc("Token ids that end the output")] = None
    ignore_eos: Annotated[bool | None, doc("Go on past the model's end tokens")] = None
    no_stop_trim: Annotated[bool | None, doc("Leave the matched stop in the text")] = None
    skip_special_tokens: Annotated[bool | None, doc("Leave special tokens out of the text, default true")] = None
    rid: Annotated[str | None, doc("Name of the request, for /abort_request; it is the answer's `id`")] = None
    cache_salt: Annotated[str | None, doc("Only requests of the same salt share cached prefixes")] = None
    return_token_ids: Annotated[bool | None, doc("`token_ids` of each choice and `prompt_token_ids` in the answer")] = (
        None
    )
    user: Annotated[str | None, doc("A label of the client's; changes nothing")] = None
    metadata: Annotated[dict[str, str] | None, doc("Labels of the client's; change nothing")] = None
    spaces_between_special_tokens: Annotated[Any, only("text is what the tokenizer decodes", True)] = None
    best_of: Annotated[Any, only("samples are not ranked", 1)] = None
    logprobs: Annotated[Any, only(_NO_LOGPROBS, False)] = None
    top_logprobs: Annotated[Any, only(_NO_LOGPROBS, 0)] = None
    prompt_logprobs: Annotated[Any, only(_NO_LOGPROBS)] = None
    echo: Annotated[Any, only("the prompt is not repeated yet", False)] = None
    response_format: Annotated[Any, only(_NO_GRAMMAR, {"type": "text"})] = None
    regex: Annotated[Any, only(_NO_GRAMMAR)] = None
    ebnf: Annotated[Any, only(_NO_GRAMMAR)] = None
    json_schema: Annotated[Any, only(_NO_GRAMMAR)] = None
    structural_tag: Annotated[Any, only(_NO_GRAMMAR)] = None
    structured_outputs: Annotated[Any, only(_NO_GRAMMAR)] = None
    stop_regex: Annotated[Any, only("stopping on a regular expression is not there yet", [])] = None
    include_stop_str_in_output: Annotated[Any, only("its name here is no_stop_trim", False)] = None
    priority: Annotated[Any, only("priorities are not there yet", 0)] = None
    service_tier: Annotated[Any, only("there is one tier", "auto", "default")] = None
    lora_path: Annotated[Any, only("LoRA adapters are not there yet", "")] = None
    return_hidden_states: Annotated[Any, only("hidden states are not given out", False)] = None
    truncate_prompt_tokens: Annotated[Any, only("its place is the server's --allow-auto-truncate")] = None
    logits_processors: Annotated[Any, only("custom logit processors are not supported", [])] = None
    custom_logit_processor: Annotated[Any, only("custom logit processors are not supported")] = None


class CompletionBody(OpenAIBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]], doc("A text, token ids, or a list of texts or of token id lists")
    ]
    max_tokens: Annotated[Int64 | None, doc("Most tokens to generate, at least 1, default 16")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its special tokens to a text, default true")
    ] = None
    suffix: Annotated[Any, only("inserting before a suffix is not supported", "")] = None


class TextPart(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: Annotated[str, doc('`"text"`; other kinds of content are refused')]
    text: Annotated[str | None, doc("The text")] = None
    image_url: Annotated[Any, only(_NO_MULTIMODAL)] = None
    video_url: Annotated[Any, only(_NO_MULTIMODAL)] = None
    audio_url: Annotated[Any, only(_NO_MULTIMODAL)] = None
    input_audio: Annotated[Any, only(_NO_MULTIMODAL)] = None
    file: Annotated[Any, only(_NO_MULTIMODAL)] = None
    refusal: Annotated[Any, only("refusals are plain text")] = None


class Message(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One message of a chat. `developer` is the same as `system`."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        doc("Who speaks; `tool` and `function` are refused until there are tools"),
    ]
    content: Annotated[
        str | list[TextPart] | None, doc("What is said; parts are put together as they are; it may not be null")
    ] = None
    name: Annotated[str | None, doc("Given to the chat template")] = None
    reasoning_content: Annotated[str | None, doc("Given to the chat template")] = None
    tool_calls: Annotated[Any, only(_NO_TOOLS, [])] = None
    tool_call_id: Annotated[Any, only(_NO_TOOLS)] = None
    function_call: Annotated[Any, only(_NO_TOOLS)] = None
    refusal: Annotated[Any, only("refusals are plain text")] = None
    audio: Annotated[Any, only(_NO_MULTIMODAL)] = None
    annotations: Annotated[Any, only("there are none", [])] = None


class ChatBody(OpenAIBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], doc("The chat so far, 1 to 10,000 messages")]
    max_completion_tokens: Annotated[
        Int64 | None, doc("Most tokens to generate, at least 1; absent: to the end of the context")
    ] = None
    max_tokens: Annotated[Int64 | None, doc("The same, by its older name")] = None
    add_generation_prompt: Annotated[
        bool | None, doc("Open the assistant's turn, default true (false with continue_final_message)")
    ] = None
    continue_final_message: Annotated[bool | None, doc("Go on with the last message instead of answering it")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Further variables of the chat template, such as `enable_thinking`")
    ] = None
    tools: Annotated[Any, only(_NO_TOOLS, [])] = None
    tool_choice: Annotated[Any, only(_NO_TOOLS, "none", "auto")] = None
    parallel_tool_calls: Annotated[Any, only(_NO_TOOLS, True, False)] = None
    functions: Annotated[Any, only(_NO_TOOLS, [])] = None
    function_call: Annotated[Any, only(_NO_TOOLS, "none", "auto")] = None
    store: Annotated[Any, only(_NO_STORE, False)] = None
    modalities: Annotated[Any, only(_NO_MULTIMODAL, ["text"])] = None
    audio: Annotated[Any, only(_NO_MULTIMODAL)] = None
    prediction: Annotated[Any, only("predicted outputs are not supported")] = None
    reasoning_effort: Annotated[Any, only("it is not known here; see chat_template_kwargs")] = None
    separate_reasoning: Annotated[Any, only("reasoning is not parsed yet", False)] = None
    stream_reasoning: Annotated[Any, only("reasoning is not parsed yet", True, False)] = None
    verbosity: Annotated[Any, only("it is not known here", "medium")] = None
    web_search_options: Annotated[Any, only("there is no web search")] = None
    prompt_cache_key: Annotated[
        str | None, doc("Prefixes are cached for all, whatever the key; see cache_salt to keep them apart")
    ] = None
    safety_identifier: Annotated[str | None, doc("A label of the client's; changes nothing")] = None
    chat_template: Annotated[Any, only("templates come with the model or from the operator")] = None
    documents: Annotated[Any, only("documents are not supported", [])] = None
    add_special_tokens: Annotated[Any, only("the chat template writes them", False)] = None


# Answers


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """A prompt counts once, however many samples were made of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishName = Literal["stop", "length", "abort"]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishName | None
    matched_stop: int | str | UnsetType | None = UNSET
    """The stop token's id or the stop string; only in a choice that has finished."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """Answer of /v1/completions, and a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: FinishName
    matched_stop: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishName | None
    matched_stop: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """A chunk of a chat's stream. `usage` is null in all but the last where the stream ends with it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[ModelCard]
