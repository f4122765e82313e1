"""Bodies that nobody sends on purpose: the answer is 200, 400, 404 or 413, in the right shape, and the server goes on.

Ten thousand: TERCET_FUZZ_EXAMPLES=10000 python -m pytest tests/srt/entrypoints/test_fuzz.py --timeout 0
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_http import Site, error_of, events_of
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tercet.srt.entrypoints.admin import AbortBody
from tercet.srt.entrypoints.anthropic.messages_protocol import (
    ContentBlock,
    CountTokensBody,
    InputMessage,
    MessagesBody,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    OutputFormat,
    ResultPart,
    Thinking,
)
from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.native_protocol import GenerateBody, NativeSampling
from tercet.srt.entrypoints.openai.chat_protocol import ChatBody, Message, TextPart
from tercet.srt.entrypoints.openai.completion_protocol import CompletionBody
from tercet.srt.entrypoints.openai.embedding_protocol import EmbeddingBody
from tercet.srt.entrypoints.openai.protocol import OpenAIBody, StreamOptions
from tercet.srt.entrypoints.openai.responses_protocol import (
    InputItem,
    InputPart,
    ReasoningConfig,
    ResponsesBody,
    ResponsesFunction,
    ResponsesStreamOptions,
    ResponsesTool,
    ResponsesToolChoice,
    TextConfig,
)
from tercet.srt.entrypoints.openai.tool_protocol import Function, GivenFunctionCall, GivenToolCall, Tool, ToolChoice
from tercet.srt.entrypoints.rerank import RerankBody
from tercet.srt.entrypoints.response_store import Turn
from tercet.srt.entrypoints.score import ScoreBody
from tercet.srt.entrypoints.tokenize import DetokenizeBody, TokenizeBody
from tercet.srt.entrypoints.wire import Wire, fields_of

EXAMPLES = int(os.environ.get("TERCET_FUZZ_EXAMPLES", "500"))
CHECKED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
PATHS = {one.path: one.body.type for one in ENDPOINTS if one.body is not None}
STORED = "resp_1"
"""A stored response, which others may drop."""
CLOSED = {"/start_profile", "/update_weights_from_disk", "/load_lora_adapter"}
"""Status 403 without a folder in the settings."""


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Site]:
    site = Site(reasoning_parser="qwen3", response_store_mib=1)
    site.scheduler.step = 64
    assert site.server.responses is not None
    site.server.responses.add(STORED, "/", b"{}", Turn(None, b"[]", b"[]"))
    yield site
    site.close()


TEXTS = st.one_of(
    st.sampled_from(
        ["", "a", "tiny", "default", "user", "assistant", "text", "x" * 300, "\ud800", "\x00", "é🙂", "{{ 1/0 }}"]
    ),
    st.text(st.characters(codec=None), max_size=20),
)
NUMBERS = st.one_of(
    st.sampled_from(
        [0, 1, 2, 3, -1, 128, 129, 257, 258, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 0.0, 0.5, 1.0, -0.0]
    ),
    st.integers(-300, 300),
    st.floats(),
)
SCALARS = st.one_of(st.none(), st.booleans(), TEXTS, NUMBERS)
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)
IDS = st.lists(st.one_of(st.integers(0, 257), st.integers()), max_size=6)
NAMED: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(TEXTS, IDS, st.lists(TEXTS, max_size=4), st.lists(IDS, max_size=4)),
    "text": st.one_of(TEXTS, st.lists(TEXTS, max_size=4)),
    "input_ids": st.one_of(IDS, st.lists(IDS, max_size=4)),
    "query": TEXTS,
    "documents": st.one_of(st.lists(TEXTS, min_size=1, max_size=3), st.lists(st.dictionaries(TEXTS, JUNK, max_size=2))),
    "tokens": st.one_of(IDS, st.lists(IDS, max_size=4)),
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=4)),
    "stop_token_ids": IDS,
    "logit_bias": st.dictionaries(st.one_of(TEXTS, st.integers(-1, 300).map(str)), NUMBERS, max_size=4),
    "role": st.sampled_from(["system", "user", "assistant", "developer", "tool", "nobody"]),
    "type": st.sampled_from(["text", "image_url", ""]),
    "stream": st.booleans(),
    "model": st.sampled_from(["tiny", "default", "other", ""]),
    "previous_response_id": st.sampled_from([STORED, "resp_2", ""]),
    "chat_template_kwargs": st.dictionaries(
        st.one_of(TEXTS, st.sampled_from(["messages", "self", "tools", "mood", "bos_token"])), JUNK, max_size=3
    ),
}
"""Values that get past the first check."""
FITTING = {
    "int": st.sampled_from([1, 2, 3]),
    "number": st.sampled_from([0.5, 1]),
    "bool": st.booleans(),
    "string": TEXTS,
}


@functools.cache
def objects(cls: type[Wire]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with up to three fields of this type besides the required ones, mostly well-formed."""
    inner: dict[str, st.SearchStrategy[Any]] = {}
    if cls in (ChatBody, TokenizeBody):
        inner["messages"] = st.lists(objects(Message), min_size=1, max_size=2)
        inner["tools"] = st.lists(objects(Tool), max_size=2)
        inner["tool_choice"] = st.one_of(st.sampled_from(["none", "auto", "required"]), objects(ToolChoice))
    elif cls is Message:
        inner["tool_calls"] = st.lists(objects(GivenToolCall), max_size=2)
        inner["content"] = st.one_of(TEXTS, TEXTS, st.lists(objects(TextPart), max_size=2))
    elif cls is ResponsesBody:
        inner["input"] = st.one_of(TEXTS, st.lists(objects(InputItem), min_size=1, max_size=3))
        inner["tools"] = st.lists(objects(ResponsesTool), max_size=2)
        inner["tool_choice"] = st.one_of(st.sampled_from(["none", "auto", "required"]), objects(ResponsesToolChoice))
        inner["text"] = objects(TextConfig)
        inner["reasoning"] = objects(ReasoningConfig)
        inner["stream_options"] = objects(ResponsesStreamOptions)
    elif cls in (MessagesBody, CountTokensBody):
        inner["messages"] = st.lists(objects(InputMessage), min_size=1, max_size=3)
        inner["system"] = st.one_of(TEXTS, st.lists(objects(ResultPart), max_size=2))
        inner["tools"] = st.lists(objects(MessagesTool), max_size=2)
        inner["tool_choice"] = objects(MessagesToolChoice)
        inner["thinking"] = objects(Thinking)
        inner["output_config"] = objects(OutputConfig)
    elif cls is OutputConfig:
        inner["format"] = objects(OutputFormat)
    elif cls is InputMessage:
        inner["content"] = st.one_of(TEXTS, st.lists(objects(ContentBlock), max_size=3))
    elif cls is ContentBlock:
        inner["content"] = st.one_of(TEXTS, st.lists(objects(ResultPart), max_size=2))
        inner["type"] = st.sampled_from(["text", "thinking", "tool_use", "tool_result"])
    elif cls is ResponsesTool:
        inner["tools"] = st.lists(objects(ResponsesFunction), max_size=2)
        inner["type"] = st.sampled_from(["function", "namespace"])
    elif cls is InputItem:
        inner["content"] = inner["output"] = st.one_of(TEXTS, st.lists(objects(InputPart), max_size=2))
        inner["type"] = st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])
    elif cls in (Tool, GivenToolCall):
        inner["function"] = objects(Function if cls is Tool else GivenFunctionCall)
        inner["type"] = st.just("function")
    elif cls is GenerateBody:
        inner["sampling_params"] = st.one_of(objects(NativeSampling), st.lists(objects(NativeSampling), max_size=2))
    if issubclass(cls, OpenAIBody):
        inner["stream_options"] = objects(StreamOptions)
    values: dict[str, st.SearchStrategy[Any]] = {}
    for field in fields_of(cls):
        good = {**NAMED, **inner}.get(field.name, FITTING.get(field.type, SCALARS))
        if field.allowed is not None:
            good = st.sampled_from([json.loads(one) for one in field.allowed.split(" or ")])
        values[field.name] = st.one_of(*[good] * 9, JUNK)
    names = st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True)
    base = st.fixed_dictionaries({field.name: values[field.name] for field in fields_of(cls) if field.required})
    if cls in BASES:
        base = st.one_of(*[st.sampled_from(BASES[cls])] * 4, base)
    extra = st.one_of(*[st.just({})] * 19, st.dictionaries(TEXTS, JUNK, min_size=1, max_size=1))

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        body = draw(base) | {name: draw(values[name]) for name in draw(names)} | draw(extra)
        return dict(sorted(body.items()))

    return build()


BASES: dict[type[Wire], list[dict[str, Any]]] = {
    GenerateBody: [{"text": "a"}, {"text": ["a", "b"]}, {"input_ids": [1]}, {"input_ids": [[1], [2]]}],
    CompletionBody: [{"prompt": "a"}, {"prompt": ["a", "b"]}, {"prompt": [1]}, {"prompt": [[1], [2]]}],
    ChatBody: [{"messages": [{"role": "user", "content": "a"}]}],
    Message: [
        {"role": "user", "content": "a"},
        {"role": "tool", "content": "a"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]},
    ],
    ResponsesBody: [{"input": "a"}, {"input": [{"role": "user", "content": "a"}]}],
    MessagesBody: [{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}],
    CountTokensBody: [{"messages": [{"role": "user", "content": "a"}]}],
    InputMessage: [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}],
    ContentBlock: [
        {"type": "text", "text": "a"},
        {"type": "thinking", "thinking": "a"},
        {"type": "tool_use", "id": "c", "name": "a", "input": {}},
        {"type": "tool_result", "tool_use_id": "c"},
    ],
    ResultPart: [{"type": "text", "text": "a"}],
    MessagesTool: [{"name": "a", "input_schema": {}}],
    MessagesToolChoice: [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "a"}],
    Thinking: [{"type": "enabled", "budget_tokens": 1024}],
    OutputFormat: [{"type": "json_schema", "schema": {"type": "object"}}],
    InputItem: [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
        {"type": "reasoning", "summary": []},
    ],
    InputPart: [{"type": "input_text", "text": "a"}],
    ResponsesFunction: [{"type": "function", "name": "a"}],
    ResponsesTool: [
        {"type": "function", "name": "a"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a"}]},
    ],
    ResponsesToolChoice: [
        {"type": "function", "name": "a"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]},
    ],
    Tool: [{"type": "function", "function": {"name": "a"}}],
    ToolChoice: [
        {"type": "function", "function": {"name": "a"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "a"}}]},
        },
    ],
    TextPart: [{"type": "text", "text": "a"}],
    EmbeddingBody: [{"input": "a"}, {"input": ["a", "b"]}, {"input": [1]}],
    RerankBody: [{"query": "a", "documents": ["b", "c"]}],
    ScoreBody: [{"query": "a", "items": ["b"], "label_token_ids": [1, 2]}],
    TokenizeBody: [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}],
    DetokenizeBody: [{"tokens": [1]}],
    AbortBody: [{"rid": "a"}, {"abort_all": True}],
}
REQUESTS = st.one_of(
    *[st.tuples(st.just(path), objects(cls).map(lambda body: json.dumps(body).encode())) for path, cls in PATHS.items()]
)


@st.composite
def broken_requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good body with some bytes cut, changed, doubled or added; or just bytes."""
    path, body = draw(REQUESTS)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        upto = min(len(body), at + draw(st.integers(0, 8)))
        filling = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"[" * 2000, b'"', b"\\", b"\\ud800", b"1e999"]))
        )
        body = draw(st.sampled_from([body[:at], body[:at] + filling + body[upto:], body[:upto] + body[at:], filling]))
    return path, body


def check(site: Site, path: str, body: bytes) -> httpx.Response:
    answer = site.post(path, body)
    assert answer.status_code in (403 if path in CLOSED else 200, 400, 404, 413), answer.text
    if answer.status_code != 200:
        assert error_of(answer)["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "error" not in events_of(answer.content)[-1]
    else:
        answer.json()
    assert site.idle()
    assert site.get("/health").status_code == 200
    return answer


@settings(CHECKED, max_examples=EXAMPLES * 7 // 10)
@given(request=REQUESTS)
def test_bodies_of_the_declared_fields(fuzzed: Site, request: tuple[str, bytes]) -> None:
    check(fuzzed, *request)


@settings(CHECKED, max_examples=EXAMPLES * 3 // 10)
@given(request=broken_requests())
def test_broken_bytes(fuzzed: Site, request: tuple[str, bytes]) -> None:
    check(fuzzed, *request)


def test_the_fuzzer_gets_through() -> None:
    """Bodies that are all refused at the first field would show nothing."""
    site = Site()
    site.scheduler.step = 64
    seen: set[tuple[str, int]] = set()
    wanted = {(path, status) for path in PATHS for status in (403 if path in CLOSED else 200, 400)}
    wanted.remove(("/unload_lora_adapter", 200))  # no adapter is loaded

    @settings(CHECKED, max_examples=300, database=None)
    @given(request=REQUESTS)
    def collect(request: tuple[str, bytes]) -> None:
        seen.add((request[0], check(site, *request).status_code))

    # Without seeds, hypothesis would draw the same bodies in each round under CI.
    for number in range(20):
        if not seen >= wanted:
            seed(number)(collect)()
    site.close()
    assert seen >= wanted
