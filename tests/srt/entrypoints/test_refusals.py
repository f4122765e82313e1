"""Every field of every body is honoured or refused by name: walked from the declarations themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_adapters import WITH_PIRATE
from fake_http import Site, loaded_weights

from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.native_protocol import NativeSampling
from tercet.srt.entrypoints.openai.chat_protocol import TextPart
from tercet.srt.entrypoints.openai.protocol import StreamOptions
from tercet.srt.entrypoints.openapi import body_types
from tercet.srt.entrypoints.response_store import Turn
from tercet.srt.entrypoints.wire import fields_of
from tercet.srt.profile_messages import ProfileReply, StartProfileReq
from tercet.srt.weight_messages import UpdateWeightsReq

HI = {"role": "user", "content": "hi"}
VALID: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [HI], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [HI], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [HI]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/abort_request": {"rid": "r"},
    "/pause_generation": {"mode": "in_place"},
    "/continue_generation": {},
    "/start_profile": {},
    "/update_weights_from_disk": {"model_path": "a"},
    "/load_lora_adapter": {"lora_name": "other", "lora_path": "a"},
    "/unload_lora_adapter": {"lora_name": "pirate"},
}
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
HONOURED: dict[str, Any] = {
    "store": True,
    "previous_response_id": "resp_1",
    "truncation": "auto",
    "text": "b",
    "sampling_params": {"max_new_tokens": 2},
    "stream": True,
    "rid": "name",
    "cache_salt": "s",
    "lora_path": "pirate",
    "tenant": "me",
    "priority": 3,
    "mode": "retract",
    "waiting_timeout": 2.5,
    "running_timeout": 2.5,
    "session_id": "agent 7",
    "retention_seconds": 45.5,
    "extra_key": "s",
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
    "token_ids_logprob": [1],
    "return_text_in_logprobs": True,
    "top_logprobs": 20,
    "echo": True,
    "suffix": "b",
    "model": "tiny",
    "stream_options": None,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "stop": "x",
    "stop_regex": "x+y",
    "seed": 1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"1": 1},
    "top_k": 3,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 1,
    "stop_token_ids": [3],
    "ignore_eos": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "user": "me",
    "metadata": {"a": "b"},
    "prompt": "b",
    "max_tokens": 1,
    "add_special_tokens": False,
    "messages": [HI],
    "max_completion_tokens": 1,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {"mood": "x"},
    "prompt_cache_key": "k",
    "safety_identifier": "k",
    "tokens": [5],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "separate_reasoning": False,
    "stream_reasoning": False,
    "return_cached_tokens_details": True,
    "return_token_strs": True,
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "json_schema": {"type": "object"},
    "structural_tag": '{"structures": [], "triggers": []}',
    "structured_outputs": {"choice": ["a"]},
    "input": "b",
    "instructions": "S",
    "system": "S",
    "thinking": {"type": "enabled"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
    "max_output_tokens": 1,
    "reasoning": {"effort": "low"},
    "query": "b",
    "items": "c",
    "label_token_ids": [2, 3],
    "apply_softmax": True,
    "item_first": True,
    "encoding_format": "base64",
    "dimensions": 2,
    "pooling": "mean",
    "documents": ["b", {"text": "c"}],
    "top_n": 1,
    "return_documents": False,
    "return_hidden_states": True,
    "output_dir": "traces",
    "model_path": "b",
    "load_format": "gguf",
    "abort_all_requests": True,
    "weight_version": "v2",
    "drain_timeout": 5,
    "num_steps": 5,
    "activities": ["CPU"],
    "record_shapes": True,
    "with_stack": True,
    "profile_prefix": "a",
}
"""A good value of every field that is honoured."""
REPEATABLE = sorted(VALID.keys() - {"/load_lora_adapter", "/unload_lora_adapter"})
"""Requests that may be sent again and again. test_lora.py has the others."""
OTHER_VALUES: dict[tuple[str, str], Any] = {
    ("/v1/completions", "logprobs"): 5,
    ("/v1/chat/completions", "logprobs"): True,
    ("/v1/chat/completions", "documents"): [{"title": "A", "text": "b"}],
    ("/v1/responses", "client_metadata"): {"thread": {"id": 1}},
    ("/v1/responses", "text"): {"format": {"type": "text"}},
    ("/v1/responses", "tools"): [{"type": "function", "name": "f"}],
    ("/v1/messages", "metadata"): {"user_id": "me"},
    **{(path, "tools"): [{"name": "f", "input_schema": {}}] for path in MESSAGES},
    **{(path, "tool_choice"): {"type": "auto"} for path in MESSAGES},
}
"""A good value of a field that differs between endpoints."""
OUTLANDISH = {"not": ["a", "value"]}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """With everything on that a server can switch off, and with a stored response."""
    folder = str(tmp_path)
    site = Site(profile_dir=folder, update_weights_dir=folder, response_store_mib=1, **WITH_PIRATE)
    assert site.server.responses is not None
    site.server.responses.add("resp_1", "/", b"{}", Turn(None, b"[]", b"[]"))
    site.scheduler.answers = {
        StartProfileReq: lambda message: ProfileReply(message.call_id, message.path),
        UpdateWeightsReq: loaded_weights,
    }
    yield site
    site.close()


def test_every_endpoint_with_a_body_is_here() -> None:
    assert set(VALID) == {one.path for one in ENDPOINTS if one.body is not None}


def cases(restricted: bool) -> list[tuple[str, str, str | None]]:
    """Path, field and accepted values of every top-level field."""
    return [
        (endpoint.path, field.name, field.allowed)
        for endpoint in ENDPOINTS
        if endpoint.body is not None
        for field in fields_of(endpoint.body.type)
        if (field.allowed is not None) == restricted
    ]


@pytest.mark.parametrize("path", REPEATABLE)
def test_restricted_fields_take_only_what_they_say(site: Site, path: str) -> None:
    for where, name, allowed in cases(restricted=True):
        if where != path:
            continue
        assert allowed is not None
        for value in map(msgspec.json.decode, allowed.split(" or ")):
            site.good(path, {**VALID[path], name: value})
        error = site.refused(path, {**VALID[path], name: OUTLANDISH})
        assert error["param"] == name and name in error["message"] and error["code"] == "unsupported_field"
    assert site.idle()


@pytest.mark.parametrize("path", REPEATABLE)
def test_honoured_fields_take_null_and_a_good_value(site: Site, path: str) -> None:
    for where, name, _ in cases(restricted=False):
        if where != path or path == "/abort_request":
            continue
        if name not in VALID[path]:
            site.good(path, {**VALID[path], name: None})
        if name in ("input_ids", "stream_options", "thinking_token_budget", "prediction") or (
            path == "/tokenize" and name in _CHAT_ONLY
        ):
            continue  # these need another field, exclude one, or need a setting: their own tests have them
        value = OTHER_VALUES[path, name] if (path, name) in OTHER_VALUES else HONOURED[name]
        answer = site.post(path, {**VALID[path], name: value})
        assert answer.status_code == 200, (name, answer.text)
        refused = site.refused(path, {**VALID[path], name: [[None]]})
        assert (refused["param"] or "").split("[")[0] == name
    assert site.idle()


_CHAT_ONLY = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


@pytest.mark.parametrize("path", sorted(VALID))
def test_an_unknown_field_is_refused(site: Site, path: str) -> None:
    error = site.refused(path, {**VALID[path], "frobnicate": None})
    assert error["param"] == "frobnicate" and "unknown field 'frobnicate'" in error["message"]


@pytest.mark.parametrize(
    ("cls", "path", "around"),
    [
        (NativeSampling, "/generate", lambda inner: {"text": "a", "sampling_params": {"max_new_tokens": 1} | inner}),
        (
            StreamOptions,
            "/v1/completions",
            lambda inner: {"prompt": "a", "stream": True, "stream_options": inner, "max_tokens": 1},
        ),
        (
            TextPart,
            "/v1/chat/completions",
            lambda inner: {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"} | inner]}],
                "max_tokens": 1,
            },
        ),
        (None, "/v1/chat/completions", lambda inner: {"messages": [HI | inner], "max_tokens": 1}),
    ],
)
def test_restricted_fields_of_inner_objects(site: Site, cls: Any, path: str, around: Any) -> None:
    if cls is None:
        cls = next(one for one in body_types(ENDPOINTS) if one.__name__ == "Message")
    for field in fields_of(cls):
        if field.allowed is None:
            continue
        for value in map(msgspec.json.decode, field.allowed.split(" or ")):
            answer = site.post(path, around({field.name: value}))
            assert answer.status_code == 200, (field.name, answer.text)
        error = site.refused(path, around({field.name: OUTLANDISH}))
        assert error["param"].endswith(f".{field.name}") and error["code"] == "unsupported_field"


def test_real_clients_are_understood(site: Site) -> None:
    """What SGLang's bench_serving, vLLM's bench serve and the OpenAI library send."""
    site.stream(
        "/generate",
        {
            "text": "a",
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
            "lora_path": "",
            "return_logprob": False,
            "return_routed_experts": False,
            "logprob_start_len": -1,
        },
    )
    site.stream(
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": "a",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "best_of": 1,
            "max_tokens": 4,
            "logprobs": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    )
    site.good(
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": "Hi!", "refusal": None, "annotations": [], "tool_calls": None},
                {"role": "user", "content": "hi"},
            ],
            "n": 1,
            "store": False,
            "user": "u",
            "metadata": {},
            "logprobs": False,
            "top_logprobs": 0,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "service_tier": "auto",
            "modalities": ["text"],
            "max_completion_tokens": 4,
        },
    )
