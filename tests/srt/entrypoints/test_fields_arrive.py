"""Every honoured field of every endpoint and of the Engine has its effect at the scheduler's door or in the answer.

The tables are compared with the declarations: a new field needs an entry. An entry is a value, and what it must change;
NO_EFFECT names the fields that are declared to change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from fake_http import FakeScheduler, Site, byte_tokenizer, make_manager
from tokenizers.processors import TemplateProcessing

from tercet.srt.entrypoints.admin import AbortBody
from tercet.srt.entrypoints.engine import _body
from tercet.srt.entrypoints.engine_request import EngineRequest, make_sample_limit
from tercet.srt.entrypoints.http_server import ENDPOINTS
from tercet.srt.entrypoints.native import GenerateBody, NativeSampling
from tercet.srt.entrypoints.openai.protocol import Message, StreamOptions, TextPart
from tercet.srt.entrypoints.openapi import body_types
from tercet.srt.entrypoints.routing import Server
from tercet.srt.entrypoints.wire import Wire, fields_of
from tercet.srt.io_struct import GenerateReq, unpack_ids
from tercet.srt.text.tokenizer import Tokenizer

NO_EFFECT = {"user", "metadata", "prompt_cache_key", "safety_identifier"}
BY_THEMSELVES = {"messages", "sampling_params", "stream_options"}
"""Objects: their own fields are in tables of their own."""
BOS = 257


@dataclass
class Seen:
    """What came of a request: what the scheduler got, and the answer (of a stream, its events)."""

    reqs: list[GenerateReq]
    answer: Any

    @property
    def req(self) -> GenerateReq:
        return self.reqs[0]

    @property
    def ids(self) -> list[int]:
        return unpack_ids(self.req.input_ids).tolist()

    @property
    def prompt(self) -> str:
        return bytes(token for token in self.ids if token != BOS).decode()


Effect = Callable[[Seen], bool]
Table = dict[str, tuple[Any, Effect]]


def sampling(name: str, value: Any) -> tuple[Any, Effect]:
    return value, lambda seen: getattr(seen.req.options.sampling, name) == value


SAMPLING: Table = {
    "temperature": sampling("temperature", 0.5),
    "top_p": sampling("top_p", 0.25),
    "top_k": sampling("top_k", 7),
    "min_p": sampling("min_p", 0.125),
    "frequency_penalty": sampling("frequency_penalty", 0.5),
    "presence_penalty": sampling("presence_penalty", 0.5),
    "repetition_penalty": sampling("repetition_penalty", 1.5),
    "stop": sampling("stop", ["x"]),
    "stop_token_ids": sampling("stop_token_ids", [3]),
    "logit_bias": sampling("logit_bias", {"1": 1.0}),
    "ignore_eos": sampling("ignore_eos", True),
    "no_stop_trim": sampling("no_stop_trim", True),
    "skip_special_tokens": sampling("skip_special_tokens", False),
    "n": (3, lambda seen: len(seen.reqs) == 3),
}
NATIVE_SAMPLING: Table = {
    **SAMPLING,
    "max_new_tokens": sampling("max_new_tokens", 5),
    "min_new_tokens": sampling("min_new_tokens", 1),
    "sampling_seed": sampling("sampling_seed", 4711),
}
SALT: tuple[Any, Effect] = ("pepper", lambda seen: seen.req.options.cache_salt == "pepper")
STREAM: tuple[Any, Effect] = (True, lambda seen: seen.req.options.stream and isinstance(seen.answer, list))
GENERATE: Table = {
    "text": ("b", lambda seen: seen.prompt == "b"),
    "input_ids": ([99, 100], lambda seen: seen.prompt == "cd"),
    "stream": STREAM,
    "rid": ("me", lambda seen: seen.answer["meta_info"]["id"] == "me"),
    "cache_salt": SALT,
    "extra_key": SALT,
}
OPENAI: Table = {
    **SAMPLING,
    "seed": sampling("sampling_seed", 4711),
    "min_tokens": sampling("min_new_tokens", 1),
    "max_tokens": sampling("max_new_tokens", 5),
    "model": ("gpt", lambda seen: seen.answer["error"]["code"] == "model_not_found"),
    "stream": STREAM,
    "rid": ("me", lambda seen: seen.answer["id"] == "me"),
    "cache_salt": SALT,
}
COMPLETIONS: Table = {
    **OPENAI,
    "return_token_ids": (True, lambda seen: seen.answer["choices"][0]["prompt_token_ids"] == [BOS, 97]),
    "prompt": ("b", lambda seen: seen.prompt == "b"),
    "add_special_tokens": (False, lambda seen: seen.ids == [97]),
}
CHAT: Table = {
    **OPENAI,
    "return_token_ids": (True, lambda seen: seen.answer["prompt_token_ids"][:6] == [*b"<user>"]),
    "max_completion_tokens": sampling("max_new_tokens", 5),
    "add_generation_prompt": (False, lambda seen: seen.prompt == "<user>a\n"),
    "continue_final_message": (True, lambda seen: seen.prompt == "<user>a"),
    "chat_template_kwargs": ({"mood": "!"}, lambda seen: seen.prompt.endswith("<assistant>!")),
}
MESSAGE: Table = {
    "role": ("system", lambda seen: seen.prompt.startswith("<system>")),
    "content": ("b", lambda seen: seen.prompt.startswith("<user>b")),
    "name": ("me", lambda seen: "(me)" in seen.prompt),
    "reasoning_content": ("why", lambda seen: "[why]" in seen.prompt),
}
TEXT_PART: Table = {
    "type": ("image_url", lambda seen: seen.answer["error"]["code"] == "unsupported_field"),
    "text": ("b", lambda seen: seen.prompt.startswith("<user>b")),
}
STREAM_OPTIONS: Table = {
    "include_usage": (True, lambda seen: seen.answer[-1]["usage"]["completion_tokens"] == 2),
    "continuous_usage_stats": (True, lambda seen: seen.answer[0]["usage"]["completion_tokens"] == 1),
}
TOKENIZE: Table = {
    "model": OPENAI["model"],
    "prompt": ("b", lambda seen: seen.answer["tokens"] == [BOS, 98]),
    "add_special_tokens": (False, lambda seen: seen.answer["tokens"] == [97]),
}
TOKENIZE_CHAT: Table = {
    "add_generation_prompt": (False, lambda seen: bytes(seen.answer["tokens"]) == b"<user>a\n"),
    "continue_final_message": (True, lambda seen: bytes(seen.answer["tokens"]) == b"<user>a"),
    "chat_template_kwargs": ({"mood": "!"}, lambda seen: bytes(seen.answer["tokens"]).endswith(b"<assistant>!")),
}
DETOKENIZE: Table = {
    "model": OPENAI["model"],
    "tokens": ([98], lambda seen: seen.answer["text"] == "b"),
    "skip_special_tokens": (False, lambda seen: seen.answer["text"] == "a<eos>"),
}

HI = {"role": "user", "content": "a"}


def plain(base: dict[str, Any]) -> Callable[[str, Any], dict[str, Any]]:
    def body(name: str, value: Any) -> dict[str, Any]:
        made = {**base, name: value}
        if name == "input_ids":
            del made["text"]
        if name == "max_completion_tokens":
            del made["max_tokens"]
        return made

    return body


@dataclass
class Walk:
    """One kind of object: the fields of `cls` in `table`, set in a request to `path` that `body` makes."""

    path: str
    cls: type[Wire]
    table: Table
    body: Callable[[str, Any], dict[str, Any]]


def walks() -> list[Walk]:
    types = {one.path: one.body.type for one in ENDPOINTS if one.body is not None}
    chat = {"messages": [HI], "max_tokens": 2}

    def in_sampling(name: str, value: Any) -> dict[str, Any]:
        return {"text": "a", "sampling_params": {"max_new_tokens": 2, name: value}}

    def in_message(name: str, value: Any) -> dict[str, Any]:
        return {**chat, "messages": [{**HI, name: value}]}

    def in_part(name: str, value: Any) -> dict[str, Any]:
        return {**chat, "messages": [{**HI, "content": [{"type": "text", "text": "a", name: value}]}]}

    def in_options(name: str, value: Any) -> dict[str, Any]:
        return {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {name: value}}

    def tokenize(name: str, value: Any) -> dict[str, Any]:
        return {**({"messages": [HI]} if name in TOKENIZE_CHAT else {"prompt": "a"}), name: value}

    return [
        Walk("/generate", types["/generate"], GENERATE, plain(in_sampling("max_new_tokens", 2))),
        Walk("/generate", NativeSampling, NATIVE_SAMPLING, in_sampling),
        Walk("/v1/completions", types["/v1/completions"], COMPLETIONS, plain({"prompt": "a", "max_tokens": 2})),
        Walk("/v1/completions", StreamOptions, STREAM_OPTIONS, in_options),
        Walk("/v1/chat/completions", types["/v1/chat/completions"], CHAT, plain(chat)),
        Walk("/v1/chat/completions", Message, MESSAGE, in_message),
        Walk("/v1/chat/completions", TextPart, TEXT_PART, in_part),
        Walk("/tokenize", types["/tokenize"], {**TOKENIZE, **TOKENIZE_CHAT}, tokenize),
        Walk("/detokenize", types["/detokenize"], DETOKENIZE, plain({"tokens": [97, 256]})),
    ]


def honoured(cls: type[Wire]) -> set[str]:
    return {field.name for field in fields_of(cls) if field.allowed is None} - NO_EFFECT - BY_THEMSELVES


def see(site: Site, path: str, body: dict[str, Any]) -> Seen:
    site.scheduler.received.clear()
    answer = site.stream(path, body) if body.get("stream") else site.post(path, body).json()
    return Seen(list(site.scheduler.received), answer)


def happens(effect: Effect, seen: Seen) -> bool:
    try:
        return effect(seen)
    except (KeyError, IndexError, TypeError):
        return False  # nothing reached the scheduler, or the answer is of another kind


@pytest.fixture
def site() -> Iterator[Site]:
    """With a tokenizer that begins a text with <bos>, where it is let."""
    site = Site()
    site.manager.inputs.tokenizer = tokenizer()
    yield site
    site.close()


def tokenizer() -> Tokenizer:
    made = byte_tokenizer()
    made.backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return made


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: f"{walk.path} {walk.cls.__name__}")
def test_every_honoured_field_arrives(site: Site, walk: Walk) -> None:
    assert set(walk.table) == honoured(walk.cls)
    for name, (value, effect) in walk.table.items():
        assert happens(effect, see(site, walk.path, walk.body(name, value))), name
        assert not happens(effect, see(site, walk.path, walk.body(name, None))), f"{name}: the effect is always there"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_that_is_a_label_changes_nothing(site: Site, path: str) -> None:
    cls = next(one.body.type for one in ENDPOINTS if one.path == path and one.body is not None)
    labels = NO_EFFECT & {field.name for field in fields_of(cls)}
    assert labels
    base = {"prompt": "a", "max_tokens": 2} if path == "/v1/completions" else {"messages": [HI], "max_tokens": 2}
    base |= {"seed": 1, "rid": "me"}
    plain_one = see(site, path, base)
    for name in labels:
        seen = see(site, path, {**base, name: {"a": "b"} if name == "metadata" else "label"})
        same = msgspec.structs.replace(seen.req, rid=plain_one.req.rid)
        assert same == plain_one.req and seen.answer["choices"] == plain_one.answer["choices"]


def test_every_type_of_object_is_walked() -> None:
    walked = {walk.cls for walk in walks()} | {AbortBody}  # which has tests of its own
    assert walked == set(body_types(ENDPOINTS))


ENGINE = {
    **{name: GENERATE[name] for name in ("text", "input_ids", "rid", "cache_salt", "extra_key")},
    **NATIVE_SAMPLING,
}


@pytest.mark.parametrize("name", sorted(ENGINE))
@pytest.mark.parametrize("stream", [False, True])
def test_every_field_of_an_engines_call_arrives(name: str, stream: bool) -> None:
    assert set(ENGINE) == (honoured(GenerateBody) | honoured(NativeSampling)) - {"stream"}
    value, effect = ENGINE[name]
    for given, expected in ((value, True), (None, False)):
        assert happens(effect, engine_call(name, given, stream)) == expected


def engine_call(name: str, value: Any, stream: bool) -> Seen:
    scheduler = FakeScheduler()
    manager = make_manager(scheduler)
    manager.inputs.tokenizer = tokenizer()
    sampling: dict[str, Any] = {"max_new_tokens": 2}
    fields: dict[str, Any] = {}
    (sampling if name in NATIVE_SAMPLING else fields)[name] = value
    prompt = None if name == "input_ids" and value is not None else fields.pop("text", None) or "a"

    async def work() -> Any:
        request = EngineRequest(
            Server(manager, "0"), make_sample_limit(manager.server_args), _body(prompt, sampling, fields, stream=stream)
        )
        if not stream:
            return await request.run(False)
        await request.open()
        last = None
        while (answer := await request.next()) is not None:
            last = answer
        return last

    answer = asyncio.run(work())
    assert all(req.options.stream == stream for req in scheduler.received)
    return Seen(scheduler.received, answer)
