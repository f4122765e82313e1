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
from fake_adapters import WITH_PIRATE
from fake_http import FakeScheduler, Site, make_manager
from field_tables import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    FUNCTION,
    GENERATE,
    GIVEN_CALL,
    GIVEN_FUNCTION,
    HI,
    LOGPROB_MODIFIERS,
    MESSAGE,
    NATIVE_SAMPLING,
    ONE_TOOL,
    SCORE,
    STREAM_OPTIONS,
    TEXT_PART,
    TOKENIZE,
    TOKENIZE_CHAT,
    TOOL,
)
from field_walks import (
    NO_EFFECT,
    Seen,
    Walk,
    check,
    happens,
    honoured,
    see,
    tokenizer,
)

from tercet.srt.entrypoints.admin import AbortBody
from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.engine import _body
from tercet.srt.entrypoints.engine_request import EngineRequest, make_sample_limit
from tercet.srt.entrypoints.lora import LoadAdapterBody, UnloadAdapterBody
from tercet.srt.entrypoints.native_protocol import GenerateBody, NativeSampling
from tercet.srt.entrypoints.openai.chat_protocol import Message, Prediction, TextPart
from tercet.srt.entrypoints.openai.protocol import StreamOptions
from tercet.srt.entrypoints.openai.structured_protocol import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from tercet.srt.entrypoints.openai.tool_protocol import (
    AllowedTools,
    Function,
    FunctionName,
    GivenFunctionCall,
    GivenToolCall,
    NamedTool,
    Tool,
    ToolChoice,
)
from tercet.srt.entrypoints.openapi import body_types
from tercet.srt.entrypoints.pausing import ContinueBody, PauseBody
from tercet.srt.entrypoints.profiling import StartProfileBody
from tercet.srt.entrypoints.routing import Server
from tercet.srt.entrypoints.weights import UpdateWeightsBody
from tercet.srt.entrypoints.wire import fields_of
from tercet.srt.errors import ModelNotFound


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
    site = Site(reasoning_parser="deepseek-r1", **WITH_PIRATE)
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
    choices = {ToolChoice, AllowedTools, NamedTool, FunctionName}  # test_tool_choice.py
    own = {
        AbortBody,
        PauseBody,
        ContinueBody,
        StartProfileBody,
        UpdateWeightsBody,
        LoadAdapterBody,
        UnloadAdapterBody,
        Prediction,
        *choices,
    }  # tests of their own
    walked = {walk.cls for walk in walks()} | constraints | own
    # test_fields_of_responses.py, test_fields_of_messages.py and test_rerank.py
    elsewhere = [one for one in ENDPOINTS if one.path.startswith(("/v1/responses", "/v1/messages", "/v1/rerank"))]
    assert walked == set(body_types(ENDPOINTS)) - set(body_types(elsewhere))


ENGINE = {
    **{name: GENERATE[name] for name in GENERATE if name not in ("stream", "model")},
    **NATIVE_SAMPLING,
}


@pytest.mark.parametrize("name", sorted(ENGINE))
@pytest.mark.parametrize("stream", [False, True])
def test_every_field_of_an_engines_call_arrives(name: str, stream: bool) -> None:
    assert set(ENGINE) == (honoured(GenerateBody) | honoured(NativeSampling)) - {"stream", "model"}
    if stream and name == "return_hidden_states":
        return  # test_hidden_states.py
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
    manager = make_manager(scheduler, **WITH_PIRATE)
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
