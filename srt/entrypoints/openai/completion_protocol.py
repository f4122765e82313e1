"""The body and the answers of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..wire import Int32, Int64, doc, only
from .logprobs import CompletionLogprobs
from .protocol import Extension, FinishName, OpenAIBody, Usage


class CompletionBody(OpenAIBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]], doc("A text, token ids, or a list of texts or of token id lists")
    ]
    suffix: Annotated[
        str | None,
        doc("Insert text between each prompt and this text (fill in the middle); not with token ids or `echo`"),
    ] = None
    max_tokens: Annotated[
        Int64 | None, doc("Maximum number of tokens to generate, default 16; 0: only compute and cache the prompt")
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its special tokens to a text, default true")
    ] = None
    logprobs: Annotated[
        Int32 | bool | None,
        doc(
            "Return the log probability of each token, and of this many of the most probable tokens, 0 to 20; "
            "false is null, true is refused"
        ),
    ] = None
    echo: Annotated[
        bool | None, doc("Begin the text with the prompt; with `logprobs`, also return those of the prompt's tokens")
    ] = None
    top_logprobs: Annotated[Any, only("`logprobs` is the number of tokens in this API", 0)] = None


class CompletionChoice(msgspec.Struct, frozen=True):
    index: Annotated[int, doc("Index of the choice, from 0")]
    text: Annotated[str, doc("The text, with `echo` after the prompt; in a stream: the new text")]
    logprobs: Annotated[CompletionLogprobs | None, doc("Only with `logprobs`, else null; in a stream: what is new")]
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

    id: Annotated[str, doc("The request's name: its `rid`, or a random one")]
    object: Annotated[Literal["text_completion"], doc("The type of this object")]
    created: Annotated[int, doc("Unix time at which the request arrived, in seconds")]
    model: Annotated[str, doc("The served name")]
    choices: Annotated[
        list[CompletionChoice],
        doc("The samples, prompt by prompt; in a stream: one with new content, or none beside `usage` or `sglext`"),
    ]
    usage: Annotated[Usage | UnsetType | None, doc("Counts of tokens; in a stream see stream_options")] = UNSET
    sglext: Annotated[Extension | UnsetType, doc("Only with `return_cached_tokens_details`")] = UNSET
