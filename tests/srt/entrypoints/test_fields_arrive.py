"""Every honoured field of every endpoint and of the Engine has its effect at the scheduler's door or in the answer.

The tables are compared with the declarations: a new field needs an entry. An entry is a value, and what it must change;
`field_walks.NO_EFFECT` names the fields that are declared to change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from fake_http import FakeScheduler, Site, make_manager
from field_walks import (
    BOS,
    NO_EFFECT,
    STREAM,
    Effect,
    Seen,
    Table,
    Walk,
    check,
    happens,
    honoured,
    logprobs,
    sampling,
    see,
    tokenizer,
)

from tercet.srt.entrypoints.admin import AbortBody
from tercet.srt.entrypoints.engine import _body
from tercet.srt.entrypoints.engine_request import EngineRequest, make_sample_limit
from tercet.srt.entrypoints.http_server import ENDPOINTS
from tercet.srt.entrypoints.native_protocol import GenerateBody, NativeSampling
from tercet.srt.entrypoints.openai.chat_protocol import Message, TextPart
from tercet.srt.entrypoints.openai.protocol import StreamOptions
from tercet.srt.entrypoints.openai.structured_protocol import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from tercet.srt.entrypoints.openai.tool_protocol import (
    Function,
    FunctionName,
    GivenFunctionCall,
    GivenToolCall,
    NamedTool,
    Tool,
)
from tercet.srt.entrypoints.openapi import body_types
from tercet.srt.entrypoints.routing import Server
from tercet.srt.entrypoints.wire import fields_of
from tercet.srt.errors import ModelNotFound


def message_of(seen: Seen) -> dict[str, Any]:
    message: dict[str, Any] = seen.answer["choices"][0]["message"]
    return message


def calls_of(seen: Seen) -> list[Any]:
    return message_of(seen).get("tool_calls", [])


def thoughts_of(seen: Seen) -> list[str]:
    return [one["choices"][0]["delta"].get("reasoning_content", "") for one in seen.answer]


SAMPLING: Table = {
    "temperature": sampling("temperature", 0.5),
    "top_p": sampling("top_p", 0.25),
    "top_k": sampling("top_k", 7),
    "min_p": sampling("min_p", 0.125),
    "frequency_penalty": sampling("frequency_penalty", 0.5),
    "presence_penalty": sampling("presence_penalty", 0.5),
    "repetition_penalty": sampling("repetition_penalty", 1.5),
    "stop": sampling("stop", ["x"]),
    "stop_regex": sampling("stop_regex", ["x+y"]),
    "stop_token_ids": sampling("stop_token_ids", [3]),
    "logit_bias": sampling("logit_bias", {"1": 1.0}),
    "ignore_eos": sampling("ignore_eos", True),
    "no_stop_trim": sampling("no_stop_trim", True),
    "skip_special_tokens": sampling("skip_special_tokens", False),
    "n": (3, lambda seen: len(seen.reqs) == 3),
}
GRAMMARS: Table = {
    "json_schema": sampling("json_schema", '{"type":"integer"}'),
    "regex": sampling("regex", "a+"),
    "ebnf": sampling("ebnf", 'root ::= "a"'),
    "structural_tag": sampling("structural_tag", '{"format":{"type":"any_text"}}'),
}
NATIVE_SAMPLING: Table = {
    **SAMPLING,
    **GRAMMARS,
    "max_new_tokens": sampling("max_new_tokens", 5),
    "min_new_tokens": sampling("min_new_tokens", 1),
    "sampling_seed": sampling("sampling_seed", 4711),
}
SALT: tuple[Any, Effect] = ("pepper", lambda seen: seen.req.options.cache_salt == "pepper")


GENERATE: Table = {
    "text": ("b", lambda seen: seen.prompt == "b"),
    "input_ids": ([99, 100], lambda seen: seen.prompt == "cd"),
    "stream": STREAM,
    "rid": ("me", lambda seen: seen.answer["meta_info"]["id"] == "me"),
    "priority": (7, lambda seen: seen.req.options.priority == 7),
    "cache_salt": SALT,
    "extra_key": SALT,
    "return_logprob": (True, lambda seen: len(seen.answer["meta_info"]["output_token_logprobs"]) == 2),
    "logprob_start_len": logprobs("logprob_start_len", 0, "input_token_logprobs"),
    "top_logprobs_num": logprobs("top_logprobs_num", 2, "output_top_logprobs"),
    "token_ids_logprob": logprobs("token_ids_logprob", [7], "output_token_ids_logprobs"),
    "return_text_in_logprobs": (True, lambda seen: seen.answer["meta_info"]["output_token_logprobs"][0][2] == "\x00"),
    "model": ("gpt", lambda seen: seen.answer["error"]["code"] == "model_not_found"),
}
LOGPROB_MODIFIERS = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs")
"""Fields of GENERATE that have no effect without `return_logprob`."""
OPENAI: Table = {
    **SAMPLING,
    **GRAMMARS,
    "seed": sampling("sampling_seed", 4711),
    "min_tokens": sampling("min_new_tokens", 1),
    "max_tokens": sampling("max_new_tokens", 5),
    "model": GENERATE["model"],
    "stream": STREAM,
    "rid": ("me", lambda seen: seen.answer["id"] == "me"),
    "priority": (7, lambda seen: seen.req.options.priority == 7),
    "cache_salt": SALT,
    "return_cached_tokens_details": (
        True,
        lambda seen: (
            seen.answer["sglext"]["cached_tokens_details"]
            == {"device": seen.answer["usage"]["prompt_tokens"] - 1, "host": 0}
        ),
    ),
}
COMPLETIONS: Table = {
    **OPENAI,
    "return_token_ids": (True, lambda seen: seen.answer["choices"][0]["prompt_token_ids"] == [BOS, 97]),
    "prompt": ("b", lambda seen: seen.prompt == "b"),
    "add_special_tokens": (False, lambda seen: seen.ids == [97]),
    "logprobs": (2, lambda seen: len(seen.answer["choices"][0]["logprobs"]["top_logprobs"][1]) == 2),
    "echo": (True, lambda seen: seen.answer["choices"][0]["text"].startswith("a")),
}
CHAT: Table = {
    **OPENAI,
    "return_token_ids": (True, lambda seen: seen.answer["prompt_token_ids"][:6] == [*b"<user>"]),
    "max_completion_tokens": sampling("max_new_tokens", 5),
    "add_generation_prompt": (False, lambda seen: seen.prompt == "<user>a\n"),
    "continue_final_message": (True, lambda seen: seen.prompt == "<user>a"),
    "chat_template_kwargs": ({"mood": "!"}, lambda seen: seen.prompt.endswith("<assistant>!")),
    "logprobs": (True, lambda seen: len(seen.answer["choices"][0]["logprobs"]["content"]) == 2),
    "top_logprobs": (3, lambda seen: len(seen.answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3),
    "tools": ([{"type": "function", "function": {"name": "f"}}], lambda seen: len(calls_of(seen)) == 2),
    "tool_choice": ("none", lambda seen: "<tools>" not in seen.prompt and calls_of(seen) == []),
    "parallel_tool_calls": (False, lambda seen: len(calls_of(seen)) == 1),
    "separate_reasoning": (False, lambda seen: message_of(seen)["content"].startswith("hm</think>")),
    "stream_reasoning": (False, lambda seen: [text for text in thoughts_of(seen) if text] == ["hm"]),
    "reasoning_effort": ("high", lambda seen: seen.prompt.endswith("<assistant>(high)")),
}
MESSAGE: Table = {
    "role": ("system", lambda seen: seen.prompt.startswith("<system>")),
    "content": ("b", lambda seen: seen.prompt.startswith("<user>b")),
    "name": ("me", lambda seen: "(me)" in seen.prompt),
    "reasoning_content": ("why", lambda seen: "[why]" in seen.prompt),
    "tool_calls": ([{"function": {"name": "f"}}], lambda seen: "<tool_call> f{}" in seen.prompt),
    "tool_call_id": ("c1", lambda seen: "<tool>a(c1)" in seen.prompt),
}
TOOL: Table = {
    "type": ("custom", lambda seen: "'custom'" in seen.answer["error"]["message"]),
    "function": ({"name": "g"}, lambda seen: seen.prompt.startswith('<tools>{"name": "g"}')),
}
FUNCTION: Table = {
    "name": ("g", lambda seen: seen.prompt.startswith('<tools>{"name": "g"}')),
    "description": ("D", lambda seen: '"description": "D"' in seen.prompt),
    "parameters": ({"type": "object"}, lambda seen: '"parameters": {"type": "object"}' in seen.prompt),
    "strict": (True, lambda seen: seen.req.options.sampling.structural_tag is not None),
}
GIVEN_CALL: Table = {
    "function": ({"name": "g"}, lambda seen: "<tool_call> g{}" in seen.prompt),
    "id": ("c1", lambda seen: "<tool_call>c1 f{}" in seen.prompt),
    "type": ("custom", lambda seen: seen.answer["error"]["param"] == "messages[0].tool_calls[0].type"),
}
GIVEN_FUNCTION: Table = {
    "name": ("g", lambda seen: "<tool_call> g{}" in seen.prompt),
    "arguments": ('{"a": 1}', lambda seen: '<tool_call> f{"a": 1}' in seen.prompt),
}
TEXT_PART: Table = {
    "type": ("image_url", lambda seen: seen.answer["error"]["code"] == "unsupported_field"),
    "text": ("b", lambda seen: seen.prompt.startswith("<user>b")),
}
STREAM_OPTIONS: Table = {
    "include_usage": (True, lambda seen: seen.answer[-1]["usage"]["completion_tokens"] == 2),
    "continuous_usage_stats": (True, lambda seen: seen.answer[0]["usage"]["completion_tokens"] == 1),
}
SCORE: Table = {
    "query": ("c", lambda seen: seen.prompt == "cb"),
    "items": (["c"], lambda seen: seen.prompt == "ac"),
    "label_token_ids": ([7], lambda seen: seen.req.options.logprobs.token_ids_logprob == [7]),
    "apply_softmax": (True, lambda seen: sum(seen.answer["scores"][0]) == 1.0),
    "item_first": (True, lambda seen: seen.prompt == "ba"),
    "model": OPENAI["model"],
    "cache_salt": SALT,
}
EMBEDDINGS: Table = {
    "input": ([98], lambda seen: seen.ids == [98]),
    "model": OPENAI["model"],
    "encoding_format": ("base64", lambda seen: isinstance(seen.answer["data"][0]["embedding"], str)),
    "dimensions": (3, lambda seen: len(seen.answer["data"][0]["embedding"]) == 3),
    "pooling": ("mean", lambda seen: seen.req.options.pooling == "mean"),
    "add_special_tokens": COMPLETIONS["add_special_tokens"],
    "cache_salt": SALT,
}
TOKENIZE: Table = {
    "model": OPENAI["model"],
    "prompt": ("b", lambda seen: seen.answer["tokens"] == [BOS, 98]),
    "add_special_tokens": (False, lambda seen: seen.answer["tokens"] == [97]),
    "return_token_strs": (True, lambda seen: seen.answer["token_strs"] == ["<bos>", "a"]),
}
TOKENIZE_CHAT: Table = {
    "add_generation_prompt": (False, lambda seen: bytes(seen.answer["tokens"]) == b"<user>a\n"),
    "continue_final_message": (True, lambda seen: bytes(seen.answer["tokens"]) == b"<user>a"),
    "chat_template_kwargs": ({"mood": "!"}, lambda seen: bytes(seen.answer["tokens"]).endswith(b"<assistant>!")),
    "tools": (
        [{"type": "function", "function": {"name": "f"}}],
        lambda seen: bytes(seen.answer["tokens"]).startswith(b"<tools>"),
    ),
}
DETOKENIZE: Table = {
    "model": OPENAI["model"],
    "tokens": ([98], lambda seen: seen.answer["text"] == "b"),
    "skip_special_tokens": (False, lambda seen: seen.answer["text"] == "a<eos>"),
}

HI = {"role": "user", "content": "a"}
ONE_TOOL = {"type": "function", "function": {"name": "f"}}


def plain(base: dict[str, Any]) -> Callable[[str, Any], dict[str, Any]]:
    def body(name: str, value: Any) -> dict[str, Any]:
        made = {**base, name: value}
        if name == "input_ids":
            del made["text"]
        if name == "max_completion_tokens":
            del made["max_tokens"]
        if name in LOGPROB_MODIFIERS:
            made["return_logprob"] = True
        if name == "top_logprobs":
            made["logprobs"] = True
        if name in ("tool_choice", "parallel_tool_calls"):
            made["tools"] = [ONE_TOOL]
        if name == "stream_reasoning":
            made["stream"] = True
        return made

    return body


def walks() -> list[Walk]:
    types = {one.path: one.body.type for one in ENDPOINTS if one.body is not None}
    chat = {"messages": [HI], "max_tokens": 2}

    def in_sampling(name: str, value: Any) -> dict[str, Any]:
        return {"text": "a", "sampling_params": {"max_new_tokens": 2, name: value}}

    def in_message(name: str, value: Any) -> dict[str, Any]:
        role = {"tool_calls": "assistant", "tool_call_id": "tool"}.get(name, "user")
        return {**chat, "messages": [{**HI, "role": role, name: value}]}

    def in_tool(name: str, value: Any) -> dict[str, Any]:
        return {**chat, "tools": [{**ONE_TOOL, name: value}]}

    def in_function(name: str, value: Any) -> dict[str, Any]:
        return in_tool("function", {"name": "f", name: value})

    def in_call(name: str, value: Any) -> dict[str, Any]:
        return in_message("tool_calls", [{"function": {"name": "f"}, name: value}])

    def in_called(name: str, value: Any) -> dict[str, Any]:
        return in_call("function", {"name": "f", name: value})

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
        Walk("/v1/chat/completions", Tool, TOOL, in_tool),
        Walk("/v1/chat/completions", Function, FUNCTION, in_function),
        Walk("/v1/chat/completions", GivenToolCall, GIVEN_CALL, in_call),
        Walk("/v1/chat/completions", GivenFunctionCall, GIVEN_FUNCTION, in_called),
        Walk("/v1/chat/completions", TextPart, TEXT_PART, in_part),
        Walk("/v1/score", types["/v1/score"], SCORE, plain({"query": "a", "items": ["b"], "label_token_ids": [4]})),
        Walk("/v1/embeddings", types["/v1/embeddings"], EMBEDDINGS, plain({"input": "a"})),
        Walk("/tokenize", types["/tokenize"], {**TOKENIZE, **TOKENIZE_CHAT}, tokenize),
        Walk("/detokenize", types["/detokenize"], DETOKENIZE, plain({"tokens": [97, 256]})),
    ]


@pytest.fixture
def site() -> Iterator[Site]:
    """With a tokenizer that begins a text with <bos>, where it is let. Two tokens say all that chat looks for."""
    site = Site(reasoning_parser="deepseek-r1")
    site.scheduler.words = ("h", "m</think>" + '<tool_call>{"name": "f"}</tool_call>' * 2)
    site.manager.inputs.tokenizer = tokenizer()
    yield site
    site.close()


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: f"{walk.path} {walk.cls.__name__}")
def test_every_honoured_field_arrives(site: Site, walk: Walk) -> None:
    check(site, walk)


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
    constraints = {ResponseFormat, JsonSchemaFormat, StructuredOutputs}  # test_structured.py
    walked = {walk.cls for walk in walks()} | constraints | {AbortBody, NamedTool, FunctionName}  # tests of their own
    # test_fields_of_responses.py and test_rerank.py
    elsewhere = [one for one in ENDPOINTS if one.path in ("/v1/responses", "/v1/rerank")]
    assert walked == set(body_types(ENDPOINTS)) - set(body_types(elsewhere))


ENGINE = {
    **{name: GENERATE[name] for name in GENERATE if name not in ("stream", "model")},
    **NATIVE_SAMPLING,
}


@pytest.mark.parametrize("name", sorted(ENGINE))
@pytest.mark.parametrize("stream", [False, True])
def test_every_field_of_an_engines_call_arrives(name: str, stream: bool) -> None:
    assert set(ENGINE) == (honoured(GenerateBody) | honoured(NativeSampling)) - {"stream", "model"}
    value, effect = ENGINE[name]
    for given, expected in ((value, True), (None, False)):
        assert happens(effect, engine_call(name, given, stream)) == expected


def test_an_engines_call_may_name_its_model() -> None:
    for model in ("tiny", "unknown", None):
        assert engine_call("model", model, stream=False).reqs
    with pytest.raises(ModelNotFound, match="the served model is 'tiny'"):
        engine_call("model", "gpt", stream=False)


def engine_call(name: str, value: Any, stream: bool) -> Seen:
    scheduler = FakeScheduler()
    manager = make_manager(scheduler)
    manager.inputs.tokenizer = tokenizer()
    sampling: dict[str, Any] = {"max_new_tokens": 2}
    fields: dict[str, Any] = {}
    (sampling if name in NATIVE_SAMPLING else fields)[name] = value
    if name in LOGPROB_MODIFIERS:
        fields["return_logprob"] = True
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
