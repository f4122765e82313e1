"""What the request bodies and the answers of both OpenAI dialects have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...io_struct import Counts
from ..wire import Int32, Int64, Wire, doc, only
from .structured_protocol import ResponseFormat, StructuredOutputs

Model = Annotated[
    str | None,
    doc(
        "The served name, the model's path or `default`; or NAME of a LoRA adapter, also as MODEL:NAME; default: the "
        "served model"
    ),
]
LoraPath = Annotated[str | None, doc("Name of a LoRA adapter; null or empty: that of `model`, if it names one")]
CacheSalt = Annotated[str | None, doc("Requests share cached prefixes only with requests of the same salt")]
User = Annotated[str | None, doc("Name of the tenant, unless several API keys or the header x-tenant name it")]
Priority = Annotated[
    Int32 | None,
    doc("Requests of higher priority go first; default 0; other values need the flag --enable-priority-scheduling"),
]
WaitingTimeout = Annotated[
    float | None,
    doc("Seconds that the request may wait for its first step, at most those of the flag --waiting-timeout"),
]
RunningTimeout = Annotated[
    float | None, doc("Seconds that the request may run, at most those of the flag --running-timeout")
]
SessionId = Annotated[
    str | None, doc("Name of a conversation: each of its requests takes over the retention of the one before")
]
RetentionSeconds = Annotated[
    float | None,
    doc(
        "Seconds after its end for which the prefix will probably be needed again, at most --max-retention-s; "
        "0: no retention"
    ),
]


class StreamOptions(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`stream_options`; only together with `stream: true`."""

    include_usage: Annotated[bool | None, doc("Send a last chunk with `usage` and no choices")] = None
    continuous_usage_stats: Annotated[
        bool | None, doc("Send `usage` in every chunk: the totals of the request so far")
    ] = None
    include_obfuscation: Annotated[Any, only("chunk padding is not supported", False)] = None


class OpenAIBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: Model = None
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
        Int64 | None,
        doc(
            "Minimum number of new tokens, default 0: no EOS or stop token is sampled before; a stop string or a "
            "pattern may still end the output"
        ),
    ] = None
    stop_regex: Annotated[
        str | list[str] | None, doc("Regular expressions that end the output where they match, at most 32")
    ] = None
    stop_token_ids: Annotated[list[int] | None, doc("Token ids that end the output")] = None
    ignore_eos: Annotated[bool | None, doc("Continue after the model's EOS tokens")] = None
    no_stop_trim: Annotated[bool | None, doc("Keep the matched stop string or stop token in the text")] = None
    skip_special_tokens: Annotated[bool | None, doc("Omit special tokens from the text, default true")] = None
    rid: Annotated[str | None, doc("Name of the request, for /abort_request; the answer has it as `id`")] = None
    cache_salt: CacheSalt = None
    lora_path: LoraPath = None
    return_token_ids: Annotated[bool | None, doc("Return `token_ids` of each choice, and `prompt_token_ids`")] = None
    return_cached_tokens_details: Annotated[
        bool | None, doc("Return `sglext.cached_tokens_details`; a stream has it in a chunk without choices")
    ] = None
    response_format: Annotated[ResponseFormat | None, doc("Format of the output; the default is text")] = None
    regex: Annotated[str | None, doc("Regular expression that the whole output matches")] = None
    ebnf: Annotated[str | None, doc("Grammar in EBNF that the output matches; its first rule is `root`")] = None
    json_schema: Annotated[
        str | dict[str, Any] | None, doc("JSON schema that the output matches, as an object or as text")
    ] = None
    structural_tag: Annotated[
        str | dict[str, Any] | None, doc("Tags in free text whose content matches a schema, as an object or as text")
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, doc("The same wishes in vLLM's form")] = None
    user: User = None
    metadata: Annotated[dict[str, str] | None, doc("Labels for the client's own use; they have no effect")] = None
    spaces_between_special_tokens: Annotated[
        Any, only("the tokenizer decides on the spaces between special tokens", True)
    ] = None
    best_of: Annotated[Any, only("ranking of samples is not supported", 1)] = None
    prompt_logprobs: Annotated[Any, only("/v1/completions gives them for echo with logprobs")] = None
    include_stop_str_in_output: Annotated[Any, only("this API calls it no_stop_trim", False)] = None
    priority: Priority = None
    waiting_timeout: WaitingTimeout = None
    running_timeout: RunningTimeout = None
    session_id: SessionId = None
    retention_seconds: RetentionSeconds = None
    service_tier: Annotated[Any, only("the server has one service tier", "auto", "default")] = None
    return_hidden_states: Annotated[Any, only("only /generate returns hidden states", False)] = None
    truncate_prompt_tokens: Annotated[Any, only("the server's flag --allow-auto-truncate sets it")] = None
    logits_processors: Annotated[Any, only("custom logit processors are not supported", [])] = None
    custom_logit_processor: Annotated[Any, only("custom logit processors are not supported")] = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: Annotated[int, doc("Prompt tokens whose KV the prefix cache had")]


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: Annotated[
        int | UnsetType,
        doc("Tokens of the reasoning, its end included; only with --reasoning-parser, if a token ends reasoning"),
    ] = UNSET
    accepted_prediction_tokens: Annotated[
        int | UnsetType, doc("Drafts that were right and so took no step of their own; only with `prediction`")
    ] = UNSET
    rejected_prediction_tokens: Annotated[
        int | UnsetType, doc("Drafts that were wrong; no token of the answer; only with `prediction`")
    ] = UNSET


class PromptUsage(msgspec.Struct, frozen=True):
    """Token counts of an endpoint that generates no text."""

    prompt_tokens: Annotated[int, doc("Tokens of all prompts")]
    total_tokens: Annotated[int, doc("The same")]


class Usage(msgspec.Struct, frozen=True):
    """A prompt counts once, however many samples were made of it."""

    prompt_tokens: Annotated[int, doc("Tokens of all prompts")]
    completion_tokens: Annotated[int, doc("Tokens generated, of all choices")]
    total_tokens: Annotated[int, doc("The sum of both")]
    prompt_tokens_details: Annotated[PromptTokensDetails, doc("More about the prompts' tokens")]
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType,
        doc(
            "More about the generated tokens; only in the last `usage` of a chat, with `prediction` or if a token ends "
            "reasoning"
        ),
    ] = UNSET


class CachedTokensDetails(msgspec.Struct, frozen=True):
    """Where the KV of cached prompt tokens was found."""

    device: Annotated[int, doc("On the device of the model")]
    host: Annotated[int, doc("In host memory (--hicache-size)")] = 0
    storage: Annotated[int | UnsetType, doc("In files (--hicache-storage-dir); absent if none")] = UNSET

    @classmethod
    def of(cls, counts: Iterable[Counts]) -> CachedTokensDetails:
        """The sums over samples of several prompts."""
        total = host = storage = 0
        for one in counts:
            total += one.cached_tokens
            host += one.host_tokens
            storage += one.storage_tokens
        return cls(total - host - storage, host, storage or UNSET)


class Extension(msgspec.Struct, frozen=True):
    """SGLang's extension of OpenAI's answers."""

    cached_tokens_details: Annotated[CachedTokensDetails, doc("Where the cached prompt tokens were")]


FinishName = Literal["stop", "length", "abort"]


class ModelCard(msgspec.Struct, frozen=True):
    id: Annotated[str, doc("The served name, or the name of a LoRA adapter")]
    object: Annotated[Literal["model"], doc("The type of this object")]
    created: Annotated[int, doc("Unix time at which the server started, in seconds")]
    owned_by: Annotated[str, doc("Always `tercet`")]
    root: Annotated[str, doc("Name of the model's or adapter's folder or file, without the path on the server")]
    parent: Annotated[str | None, doc("The served name, in the card of an adapter; null in that of the model")]
    max_model_len: Annotated[int, doc("Maximum number of tokens of a prompt and its answer together")]
    type: Annotated[Literal["model"], doc("Anthropic's name of `object`")]
    display_name: Annotated[str, doc("The same as `id`, for Anthropic's clients")]
    created_at: Annotated[str, doc("`created` as RFC 3339 writes it, for Anthropic's clients")]
    lifecycle: Annotated[Literal["active"], doc("Always `active`, for Anthropic's clients")]


class ModelList(msgspec.Struct, frozen=True):
    """OpenAI's list of models, with the fields that Anthropic's list has."""

    object: Annotated[Literal["list"], doc("The type of this object")]
    data: Annotated[list[ModelCard], doc("The model that is served, and then its adapters")]
    first_id: Annotated[str | None, doc("`id` of the first card, for `before_id`; null if there is none")]
    last_id: Annotated[str | None, doc("`id` of the last card, for `after_id`; null if there is none")]
    has_more: Annotated[
        bool, doc("Whether further cards follow; with `before_id`, whether further cards precede these")
    ]
