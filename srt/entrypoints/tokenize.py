"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.input_processor import check_token_ids
from ..errors import InvalidRequest
from ..text.tokenizer import Tokenizer
from .lora import target_of
from .native import check_not_empty, check_num_prompts, split_ids
from .openai.chat import render_chat
from .openai.chat_protocol import Message
from .openai.tool_protocol import Tool
from .openai.tools import plan_answer
from .routing import Server, in_thread_if_large, json_response
from .wire import BodyCodec, Wire, doc

_encode = msgspec.json.Encoder().encode


class TokenizeBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /tokenize: one of `prompt` and `messages`."""

    model: Annotated[str | None, doc("As in /v1/completions")] = None
    prompt: Annotated[str | list[str] | None, doc("A text, or a list of texts")] = None
    messages: Annotated[list[Message] | None, doc("A conversation, which the chat template renders as text")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its special tokens; default true with prompt, false with messages")
    ] = None
    add_generation_prompt: Annotated[bool | None, doc("As in /v1/chat/completions; only with messages")] = None
    continue_final_message: Annotated[bool | None, doc("As in /v1/chat/completions; only with messages")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("As in /v1/chat/completions; only with messages")] = None
    tools: Annotated[list[Tool] | None, doc("As in /v1/chat/completions; only with messages")] = None
    return_token_strs: Annotated[bool | None, doc("Return `token_strs`")] = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """Lists of lists and of numbers for a list of texts."""

    tokens: Annotated[Sequence[int | list[int]], doc("Token ids; for a list of texts: a list of them for each text")]
    count: Annotated[int | list[int], doc("Number of tokens; for a list of texts: a list of numbers")]
    max_model_len: Annotated[int, doc("Maximum number of tokens of a prompt and its answer together")]
    token_strs: Annotated[
        Sequence[str | list[str | None] | None] | UnsetType,
        doc("The tokens as the vocabulary writes them; only with `return_token_strs`; for a list of texts: lists"),
    ] = UNSET


class _ListAnswer(msgspec.Struct, frozen=True):
    """A TokenizeAnswer for a list of texts, with the token ids as JSON.

    A token id takes about 6 bytes of JSON, and about 40 bytes as a Python object.
    """

    tokens: list[msgspec.Raw]
    count: list[int]
    max_model_len: int
    token_strs: list[list[str | None]] | UnsetType = UNSET


class DetokenizeBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    tokens: Annotated[list[int | list[int]], doc("Token ids, or a list of such lists")]
    model: Annotated[str | None, doc("As in /v1/completions")] = None
    skip_special_tokens: Annotated[bool | None, doc("Omit special tokens from the text, default true")] = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    text: Annotated[str | list[str], doc("The text; for a list of token id lists: a list of texts")]
    prompt: Annotated[str | list[str], doc("The same as `text`: vLLM's name for it")]


TOKENIZE_CODEC = BodyCodec(TokenizeBody)
DETOKENIZE_CODEC = BodyCodec(DetokenizeBody)


async def tokenize(server: Server, request: Request, body: TokenizeBody) -> ASGIApp:
    """Handler of /tokenize."""
    target_of(server.manager, body.model)
    if (body.prompt is None) == (body.messages is None):
        given = "neither" if body.prompt is None else "both"
        raise InvalidRequest(f"exactly one of prompt and messages is required, got {given}", param="prompt")
    if body.messages is not None:
        text = await in_thread_if_large(
            request,
            render_chat,
            server,
            body.messages,
            tools=plan_answer(server.manager, [tool.function for tool in body.tools or ()], None).tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            kwargs=body.chat_template_kwargs or {},
        )
        add_special_tokens = bool(body.add_special_tokens)
    else:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"{name} is allowed only with messages", param=name)
        if isinstance(body.prompt, list):
            return await _tokenize_list(server, request, body.prompt, body)
        assert body.prompt is not None
        text = body.prompt
        add_special_tokens = body.add_special_tokens is not False
    ids = await _encoded(server, text, add_special_tokens, "prompt" if body.messages is None else "messages")
    strs = await in_thread_if_large(request, _token_strs, server, ids) if body.return_token_strs else UNSET
    answer = TokenizeAnswer(ids, len(ids), server.manager.facts.context_len, strs)
    return await in_thread_if_large(request, json_response, answer)


async def _encoded(server: Server, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """The token ids of a text. Raises InvalidRequest that names `param`, the field of the text."""
    try:
        return await server.manager.inputs.encode_off_loop(text, add_special_tokens=add_special_tokens)
    except InvalidRequest as error:
        error.param = param
        raise


def _token_strs(server: Server, ids: list[int]) -> list[str | None]:
    tokenizer = server.manager.inputs.tokenizer
    assert tokenizer is not None, "the ids are from this tokenizer"
    return [tokenizer.id_to_token(token_id) for token_id in ids]


async def _tokenize_list(server: Server, request: Request, texts: list[str], body: TokenizeBody) -> ASGIApp:
    check_num_prompts(len(check_not_empty(texts, "prompt")), "prompt")
    tokens: list[msgspec.Raw] = []
    counts: list[int] = []
    strs: list[list[str | None]] = []
    for i, text in enumerate(texts):
        ids = await _encoded(server, text, body.add_special_tokens is not False, f"prompt[{i}]")
        if body.return_token_strs:
            strs.append(await in_thread_if_large(request, _token_strs, server, ids))
        tokens.append(msgspec.Raw(_encode(ids)))
        counts.append(len(ids))
        await asyncio.sleep(0)  # other streams make progress between two texts
    answer = _ListAnswer(tokens, counts, server.manager.facts.context_len, strs if body.return_token_strs else UNSET)
    return await in_thread_if_large(request, json_response, answer)


async def detokenize(server: Server, request: Request, body: DetokenizeBody) -> ASGIApp:
    """Handler of /detokenize."""
    target_of(server.manager, body.model)
    if server.manager.inputs.tokenizer is None:
        raise InvalidRequest("this engine has no tokenizer: it runs with --skip-tokenizer-init", param="tokens")
    answer = await in_thread_if_large(
        request,
        _detokenized,
        server.manager.inputs.tokenizer,
        server.manager.facts.vocab_size,
        body.tokens,
        body.skip_special_tokens is not False,
    )
    return await in_thread_if_large(request, json_response, answer)


def _detokenized(
    tokenizer: Tokenizer, vocab_size: int, tokens: list[int | list[int]], skip_special_tokens: bool
) -> DetokenizeAnswer:
    lists, is_list = split_ids(tokens, "tokens")
    check_num_prompts(len(lists), "tokens")
    texts = []
    for ids in lists:
        check_token_ids(ids, vocab_size, "tokens")
        texts.append(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
    text = texts if is_list else texts[0]
    return DetokenizeAnswer(text, text)
