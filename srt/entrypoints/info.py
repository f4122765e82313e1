"""Small endpoints that clients and routers of other engines expect: /version, /load and /tokenizer_info."""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..errors import InvalidRequest
from .routing import Server, json_response
from .wire import doc


class Version(msgspec.Struct, frozen=True):
    version: Annotated[str, doc("Tercet's version")]


class ServerLoad(msgspec.Struct, frozen=True):
    server_load: Annotated[int, doc("Samples of all requests that have not ended")]


class TokenizerInfo(msgspec.Struct, frozen=True):
    """Answer of /tokenizer_info. A client can tokenise and render chats itself with it."""

    tokenizer_class: Annotated[str, doc("Always `PreTrainedTokenizerFast`: the class of `transformers` for such files")]
    vocab_size: Annotated[int, doc("Tokens of the tokenizer, special tokens included")]
    model_max_length: Annotated[int, doc("Maximum number of tokens of a prompt and its answer together")]
    bos_token: Annotated[str | None, doc("Text of the token that begins a text, if there is one")]
    eos_token: Annotated[str | None, doc("Text of the token that ends a text, if there is one")]
    unk_token: Annotated[str | None, doc("Text of the token for unknown text, if there is one")]
    pad_token: Annotated[str | None, doc("Text of the padding token, if there is one")]
    eos_token_ids: Annotated[list[int], doc("Ids of all tokens that end an answer")]
    chat_template: Annotated[str | None, doc("Jinja source of the chat template, if there is one")]


async def version(server: Server, request: Request, body: None) -> ASGIApp:
    return json_response(Version(server.version))


async def load(server: Server, request: Request, body: None) -> ASGIApp:
    """What this process knows of its load. It does not ask the scheduler."""
    return json_response(ServerLoad(server.manager.num_unfinished))


async def tokenizer_info(server: Server, request: Request, body: None) -> ASGIApp:
    """Raises InvalidRequest with --skip-tokenizer-init."""
    tokenizer = server.manager.inputs.tokenizer
    if tokenizer is None:
        raise InvalidRequest("this engine has no tokenizer: it runs with --skip-tokenizer-init")
    special = tokenizer.special_tokens
    return json_response(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            vocab_size=tokenizer.vocab_size,
            model_max_length=server.manager.facts.context_len,
            bos_token=special.get("bos_token"),
            eos_token=special.get("eos_token"),
            unk_token=special.get("unk_token"),
            pad_token=special.get("pad_token"),
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            chat_template=tokenizer.chat_template_source,
        )
    )
