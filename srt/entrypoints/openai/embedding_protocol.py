"""The body and the answer of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...request_options import Pooling
from ..wire import Int32, Wire, doc
from .protocol import CacheSalt, LoraPath, Model, Priority, PromptUsage, RunningTimeout, User, WaitingTimeout


class EmbeddingBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/embeddings."""

    input: Annotated[
        str | list[str | int | list[int]], doc("A text, token ids, or a list of texts or of token id lists")
    ]
    model: Model = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, doc("`base64`: the bytes of float32 numbers, the lowest byte first")
    ] = None
    dimensions: Annotated[
        Int32 | None, doc("Return only the first numbers, normalised to length 1; default: all that the model has")
    ] = None
    pooling: Annotated[
        Pooling | None, doc("The hidden state of the last token (default), or the mean over all tokens")
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its special tokens to a text, default true")
    ] = None
    cache_salt: CacheSalt = None
    lora_path: LoraPath = None
    user: User = None
    priority: Priority = None
    waiting_timeout: WaitingTimeout = None
    running_timeout: RunningTimeout = None


class Embedding(msgspec.Struct, frozen=True):
    """The embedding of one input."""

    object: Annotated[Literal["embedding"], doc("Kind of object")]
    index: Annotated[int, doc("Which input this is of, counted from 0")]
    embedding: Annotated[list[float] | str, doc("A vector of length 1; base64 if asked for")]


class EmbeddingList(msgspec.Struct, frozen=True):
    """Answer of /v1/embeddings."""

    object: Annotated[Literal["list"], doc("Kind of object")]
    data: Annotated[list[Embedding], doc("The embeddings in the order of the inputs")]
    model: Annotated[str, doc("The served name")]
    usage: Annotated[PromptUsage, doc("Token counts")]
