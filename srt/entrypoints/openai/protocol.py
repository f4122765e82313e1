"""The OpenAI endpoints' requests and answers, with the extras that clients of SGLang and vLLM send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..wire import Int32, Int64, Wire, doc, only

_NO_LOGPROBS = "log probabilities are not implemented"
_NO_GRAMMAR = "structured output is not implemented"
_NO_TOOLS = "tool calling is not implemented"
_NO_MULTIMODAL = "multimodal models are not supported"
_NO_STORE = "answers are not stored"

MAX_MESSAGES = 10_000


class StreamOptions(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`stream_options`; only together with `stream: true`."""

    include_usage: Annotated[bool | None, doc("Send a last chunk with `usage` and no choices")] = None
    continuous_usage_stats: Annotated[
        bool | None, doc("Send `usage` in every chunk: the totals of the request so far")
    ] = None
    include_obfuscation: Annotated[Any, only("chunk padding is not supported", False)] = None


class OpenAIBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: Annotated[str | None, doc("The served name, the model's path or `default`; default: the served model")] = (
        None
    )
    stream: Annotated[bool | None, doc("Stream the answer as server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, doc("What a stream contains besides text")] = None
    n: Annotated[int | None, doc("Number of samples of each prompt, 1 to 128, default 1")] = None
    temperature: Annotated[float | None, doc("At least 0; a value below 1e-6 selects greedy decoding")] = None
    top_p: Annotated[float | None, doc("In (0, 1]")] = None
    stop: Annotated[str | list[str] | None, doc("Stop strings: texts that end the output, at most 32")] = None
    seed: Annotated[Int64 | None, doc("The same seed gives the same tokens; sample i uses seed + i")] = None
    frequency_penalty: Annotated[float | None, doc("In [-2, 2], default 0")] = None
    presence_penalty: Annotated[float | None, doc("In [-2, 2], default 0")] = None
    logit_bias: Annotated[dict[str, float] | None, doc("Token id to the number added to its logit, in [-100, 100]")] = (
        None
    )
    top_k: Annotated[Int32 | None, doc("At least 1; -1 allows all tokens")] = None
    min_p: Annotated[float | None, doc("In [0, 1]")] = None
    repetition_penalty: Annotated[float | None, doc("In (0, 2]")] = None
    min_tokens: Annotated[
        Int64 | None, doc("Minimum number of new tokens; no EOS or stop token is sampled before, default 0")
    ] = None
    stop_token_ids: Annotated[list[int] | None, doc("Token ids that end the output")] = None
    ignore_eos: Annotated[bool | None, doc("Continue after the model's EOS tokens")] = None
    no_stop_trim: Annotated[bool | None, doc("Keep the matched stop string or stop token in the text")] = None
    skip_special_tokens: Annotated[bool | None, doc("Omit special tokens from the text, default true")] = None
    rid: Annotated[str | None, doc("Name of the request, for /abort_request; the answer has it as `id`")] = None
    cache_salt: Annotated[str | None, doc("Requests share cached prefixes only with requests of the same salt")] = None
    return_token_ids: Annotated[bool | None, doc("Return `token_ids` of each choice, and `prompt_token_ids`")] = None
    user: Annotated[str | None, doc("A label for the client's own use; it has no effect")] = None
    metadata: Annotated[dict[str, str] | None, doc("Labels for the client's own use; they have no effect")] = None
    spaces_between_special_tokens: Annotated[
        Any, only("the tokenizer decides on the spaces between special tokens", True)
    ] = None
    best_of: Annotated[Any, only("ranking of samples is not supported", 1)] = None
    logprobs: Annotated[Any, only(_NO_LOGPROBS, False)] = None
    top_logprobs: Annotated[Any, only(_NO_LOGPROBS, 0)] = None
    prompt_logprobs: Annotated[Any, only(_NO_LOGPROBS)] = None
    echo: Annotated[Any, only("repeating the prompt is not implemented", False)] = None
    response_format: Annotated[Any, only(_NO_GRAMMAR, {"type": "text"})] = None
    regex: Annotated[Any, only(_NO_GRAMMAR)] = None
    ebnf: Annotated[Any, only(_NO_GRAMMAR)] = None
    json_schema: Annotated[Any, only(_NO_GRAMMAR)] = None
    structural_tag: Annotated[Any, only(_NO_GRAMMAR)] = None
    structured_outputs: Annotated[Any, only(_NO_GRAMMAR)] = None
    stop_regex: Annotated[Any, only("stopping at a regular expression is not implemented", [])] = None
    include_stop_str_in_output: Annotated[Any, only("this API calls it no_stop_trim", False)] = None
    priority: Annotated[Any, only("request priorities are not implemented", 0)] = None
    service_tier: Annotated[Any, only("the server has one service tier", "auto", "default")] = None
    lora_path: Annotated[Any, only("LoRA adapters are not implemented", "")] = None
    return_hidden_states: Annotated[Any, only("returning hidden states is not implemented", False)] = None
    truncate_prompt_tokens: Annotated[Any, only("the server's flag --allow-auto-truncate sets it")] = None
    logits_processors: Annotated[Any, only("custom logit processors are not supported", [])] = None
    custom_logit_processor: Annotated[Any, only("custom logit processors are not supported")] = None


class CompletionBody(OpenAIBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]], doc("A text, token ids, or a list of texts or of token id lists")
    ]
    max_tokens: Annotated[Int64 | None, doc("Maximum number of tokens to generate, at least 1, default 16")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its special tokens to a text, default true")
    ] = None
    suffix: Annotated[Any, only("insertion before a suffix is not supported", "")] = None


class TextPart(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: Annotated[str, doc('`"text"`; other kinds of content are refused')]
    text: Annotated[str | None, doc("The text")] = None
    image_url: Annotated[Any, only(_NO_MULTIMODAL)] = None
    video_url: Annotated[Any, only(_NO_MULTIMODAL)] = None
    audio_url: Annotated[Any, only(_NO_MULTIMODAL)] = None
    input_audio: Annotated[Any, only(_NO_MULTIMODAL)] = None
    file: Annotated[Any, only(_NO_MULTIMODAL)] = None
    refusal: Annotated[Any, only("a refusal is ordinary text in content")] = None


class Message(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One message of a chat. `developer` is the same as `system`."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        doc("Author of the message; `tool` and `function` are refused: tool calling is not implemented"),
    ]
    content: Annotated[
        str | list[TextPart] | None, doc("Text of the message; parts are concatenated; null is refused")
    ] = None
    name: Annotated[str | None, doc("Passed to the chat template")] = None
    reasoning_content: Annotated[str | None, doc("Passed to the chat template")] = None
    tool_calls: Annotated[Any, only(_NO_TOOLS, [])] = None
    tool_call_id: Annotated[Any, only(_NO_TOOLS)] = None
    function_call: Annotated[Any, only(_NO_TOOLS)] = None
    refusal: Annotated[Any, only("a refusal is ordinary text in content")] = None
    audio: Annotated[Any, only(_NO_MULTIMODAL)] = None
    annotations: Annotated[Any, only("annotations are not supported", [])] = None


class ChatBody(OpenAIBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], doc("The conversation so far, 1 to 10,000 messages")]
    max_completion_tokens: Annotated[
        Int64 | None, doc("Maximum number of tokens to generate, at least 1; default: up to the end of the context")
    ] = None
    max_tokens: Annotated[Int64 | None, doc("The older name of max_completion_tokens")] = None
    add_generation_prompt: Annotated[
        bool | None,
        doc("Open the assistant's turn after the messages, default true (with continue_final_message: false)"),
    ] = None
    continue_final_message: Annotated[bool | None, doc("Continue the last message instead of answering it")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Further variables for the chat template, such as `enable_thinking`")
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
    reasoning_effort: Annotated[Any, only("send it in chat_template_kwargs")] = None
    separate_reasoning: Annotated[Any, only("parsing of reasoning is not implemented", False)] = None
    stream_reasoning: Annotated[Any, only("parsing of reasoning is not implemented", True, False)] = None
    verbosity: Annotated[Any, only("the verbosity of answers cannot be set", "medium")] = None
    web_search_options: Annotated[Any, only("web search is not supported")] = None
    prompt_cache_key: Annotated[
        str | None, doc("It has no effect: all requests share cached prefixes; cache_salt separates them")
    ] = None
    safety_identifier: Annotated[str | None, doc("A label for the client's own use; it has no effect")] = None
    chat_template: Annotated[
        Any, only("a request cannot bring a chat template; the server's flag --chat-template sets it")
    ] = None
    documents: Annotated[Any, only("documents are not supported", [])] = None
    add_special_tokens: Annotated[Any, only("the chat template writes the special tokens", False)] = None


# Answers


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: Annotated[int, doc("Prompt tokens whose KV the prefix cache had")]


class Usage(msgspec.Struct, frozen=True):
    """A prompt counts once, however many samples were made of it."""

    prompt_tokens: Annotated[int, doc("Tokens of all prompts")]
    completion_tokens: Annotated[int, doc("Tokens generated, of all choices")]
    total_tokens: Annotated[int, doc("The sum of both")]
    prompt_tokens_details: Annotated[PromptTokensDetails, doc("More about the prompts' tokens")]


FinishName = Literal["stop", "length", "abort"]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: Annotated[int, doc("Which of the request's choices this is, counted from 0")]
    text: Annotated[str, doc("The text; in a stream: what is new")]
    logprobs: Annotated[None, doc("Always null")]
    finish_reason: Annotated[FinishName | None, doc("Why the choice ended; null while it runs")]
    matched_stop: Annotated[
        int | str | UnsetType | None,
        doc("The stop token's id or the stop string, else null; only in a choice that has finished"),
    ] = UNSET
    token_ids: Annotated[
        list[int] | UnsetType, doc("Generated token ids; only with `return_token_ids`; in a stream: what is new")
    ] = UNSET
    prompt_token_ids: Annotated[list[int] | UnsetType, doc("Token ids of the prompt; only with `return_token_ids`")] = (
        UNSET
    )


class Completion(msgspec.Struct, frozen=True):
    """Answer of /v1/completions, and a chunk of its stream."""

    id: Annotated[str, doc("The request's name: its `rid`, or one that the server made up")]
    object: Annotated[Literal["text_completion"], doc("The type of this object")]
    created: Annotated[int, doc("Unix time at which the request came, in seconds")]
    model: Annotated[str, doc("The served name")]
    choices: Annotated[
        list[CompletionChoice],
        doc("The samples, prompt by prompt; in a stream: one that has news, or none beside `usage`"),
    ]
    usage: Annotated[Usage | UnsetType | None, doc("Counts of tokens; in a stream see stream_options")] = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    role: Annotated[Literal["assistant"], doc("Who speaks")]
    content: Annotated[str, doc("The text")]


class ChatChoice(msgspec.Struct, frozen=True):
    index: Annotated[int, doc("Which of the request's choices this is, counted from 0")]
    message: Annotated[AssistantMessage, doc("What the model says")]
    logprobs: Annotated[None, doc("Always null")]
    finish_reason: Annotated[FinishName, doc("Why the choice ended")]
    matched_stop: Annotated[
        int | str | None, doc("The stop token's id or the stop string that ended the choice, else null")
    ]
    token_ids: Annotated[list[int] | UnsetType, doc("Generated token ids; only with `return_token_ids`")] = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """Answer of /v1/chat/completions."""

    id: Annotated[str, doc("The request's name: its `rid`, or one that the server made up")]
    object: Annotated[Literal["chat.completion"], doc("The type of this object")]
    created: Annotated[int, doc("Unix time at which the request came, in seconds")]
    model: Annotated[str, doc("The served name")]
    choices: Annotated[list[ChatChoice], doc("The samples")]
    usage: Annotated[Usage, doc("Counts of tokens")]
    prompt_token_ids: Annotated[
        list[int] | UnsetType, doc("Token ids of the rendered chat; only with `return_token_ids`")
    ] = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: Annotated[Literal["assistant"] | UnsetType, doc("Only in a choice's first chunk")] = UNSET
    content: Annotated[str | UnsetType, doc("The text that is new")] = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: Annotated[int, doc("Which of the request's choices this is, counted from 0")]
    delta: Annotated[Delta, doc("What is new in the message")]
    logprobs: Annotated[None, doc("Always null")]
    finish_reason: Annotated[FinishName | None, doc("Why the choice ended; null while it runs")]
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
    choices: Annotated[list[ChunkChoice], doc("One choice that has news, or none beside `usage`")]
    usage: Annotated[Usage | UnsetType | None, doc("Counts of tokens; see stream_options")] = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType, doc("Token ids of the rendered chat; only with `return_token_ids`")
    ] = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    id: Annotated[str, doc("The served name")]
    object: Annotated[Literal["model"], doc("The type of this object")]
    created: Annotated[int, doc("Unix time at which the server started, in seconds")]
    owned_by: Annotated[str, doc("Always `tercet`")]
    root: Annotated[str, doc("Where the model's files are")]
    parent: Annotated[None, doc("Always null")]
    max_model_len: Annotated[int, doc("Most tokens of a prompt and its answer together")]


class ModelList(msgspec.Struct, frozen=True):
    object: Annotated[Literal["list"], doc("The type of this object")]
    data: Annotated[list[ModelCard], doc("The one model that is served")]
