"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..errors import InvalidRequest
from .job import MAX_PROMPTS
from .native import check_not_empty, split_ids
from .openai.chat import render_chat
from .openai.protocol import Message
from .routing import Server, json_response
from .wire import BodyCodec, Wire, doc, only


class TokenizeBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /tokenize: one of `prompt` and `messages`."""

    model: Annotated[str | None, doc("As in /v1/completions")] = None
    prompt: Annotated[str | list[str] | None, doc("A text, or a list of texts")] = None
    messages: Annotated[list[Message] | None, doc("A chat, made into a text by the chat template")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its special tokens: default true for a prompt, false for a chat")
    ] = None
    add_generation_prompt: Annotated[bool | None, doc("As in /v1/chat/completions; for a chat only")] = None
    continue_final_message: Annotated[bool | None, doc("As in /v1/chat/completions; for a chat only")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("As in /v1/chat/completions; for a chat only")] = None
    tools: Annotated[Any, only("tool calling is not there yet", [])] = None
    return_token_strs: Annotated[Any, only("/detokenize tells the text of a token", False)] = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """Lists of lists and of numbers for a list of texts."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    tokens: Annotated[list[int | list[int]], doc("Token ids, or a list of lists of them")]
    model: Annotated[str | None, doc("As in /v1/completions")] = None
    skip_special_tokens: Annotated[bool | None, doc("Leave special tokens out of the text, default true")] = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    text: str | list[str]


TOKENIZE_CODEC = BodyCodec(TokenizeBody)
DETOKENIZE_CODEC = BodyCodec(DetokenizeBody)


async def tokenize(server: Server, request: Request, body: TokenizeBody) -> ASGIApp:
    """Handler of /tokenize."""
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        given = "neither" if body.prompt is None else "both"
        raise InvalidRequest(f"one of prompt and messages is needed, got {given}", param="prompt")
    max_model_len = server.manager.facts.context_len
    if body.messages is not None:
        text = await render_chat(
            server,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            kwargs=body.chat_template_kwargs or {},
        )
        ids = await server.manager.encode(text, bool(body.add_special_tokens))
        return json_response(TokenizeAnswer(ids, len(ids), max_model_len))
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is for messages, not for a prompt", param=name)
    add_special_tokens = body.add_special_tokens is not False
    if isinstance(body.prompt, str):
        ids = await server.manager.encode(body.prompt, add_special_tokens)
        return json_response(TokenizeAnswer(ids, len(ids), max_model_len))
    assert body.prompt is not None
    lists = []
    for one in _check_amount(check_not_empty(body.prompt, "prompt"), "prompt"):
        lists.append(await server.manager.encode(one, add_special_tokens))
        await asyncio.sleep(0)  # streams go on in between
    return json_response(TokenizeAnswer(lists, [len(one) for one in lists], max_model_len))


async def detokenize(server: Server, request: Request, body: DetokenizeBody) -> ASGIApp:
    """Handler of /detokenize."""
    server.check_model(body.model)
    tokenizer = server.manager.tokenizer
    if tokenizer is None:
        raise InvalidRequest("this engine runs with --skip-tokenizer-init: it knows no text", param="tokens")
    prompts, is_list = split_ids(body.tokens, "tokens")
    vocab_size = server.manager.facts.vocab_size
    texts = []
    for ids in _check_amount(prompts, "tokens"):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(one for one in ids if not 0 <= one < vocab_size)
            raise InvalidRequest(f"token ids must be in [0, {vocab_size}), got {wrong}", param="tokens")
        texts.append(tokenizer.decode(ids, body.skip_special_tokens is not False))
        await asyncio.sleep(0)
    return json_response(DetokenizeAnswer(texts if is_list else texts[0]))


def _check_amount(prompts: list[Any], param: str) -> list[Any]:
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"{param} must be at most {MAX_PROMPTS}, got {len(prompts)}", param=param)
    return prompts
