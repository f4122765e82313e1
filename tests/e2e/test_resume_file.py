"""Streams on a real server that is killed, then on one that is shut down, then on a third one: they say the same.

How far each one is at the deaths depends on the machine. `srt/entrypoints/test_resume_file.py` cuts at chosen events.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from resuming_client import ResumingClient
from toy_engine import REAL_SERVER, ServerProcess

from tercet.benchmarks.peers.models import make_toy

pytestmark = pytest.mark.e2e

NUM_TOKENS = 100
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
FORMAT = {"name": "a", "schema": SCHEMA}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "Who was king?"}], "max_tokens": NUM_TOKENS}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Greedy, seeded, penalised, stop strings, log probabilities, several samples, a JSON schema, a required call."""
    greedy = {"max_new_tokens": 4 * NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    seeded = {"max_new_tokens": 2 * NUM_TOKENS, "temperature": 1.5, "sampling_seed": 7, "ignore_eos": True}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    completion = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 5}
    return [
        ("/generate", {"text": "Once upon a time", "sampling_params": greedy, "return_logprob": True}),
        ("/generate", {"text": "Once upon a time", "sampling_params": {**seeded, **penalties}}),
        ("/generate", {"text": "There was", "sampling_params": {**seeded, "n": 2, "stop": ["qqq", "the", "\n\n"]}}),
        ("/v1/completions", {**completion, "n": 2, "logprobs": 2, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {**completion, "temperature": 1.5, "seed": 3, "stop": ["impossible text"]}),
        (
            "/v1/chat/completions",
            {**CHAT, "seed": 6, "response_format": {"type": "json_schema", "json_schema": FORMAT}},
        ),
        ("/v1/chat/completions", {**CHAT, "tools": [LOOK], "tool_choice": "required", "temperature": 1.5, "seed": 4}),
        ("/v1/responses", {"input": "Who was king?", "max_output_tokens": NUM_TOKENS, "temperature": 0}),
    ]


def said(events: Sequence[tuple[str, str]]) -> dict[Any, Any]:
    """What the events say together, however they divide it."""
    numbers = [int(name.partition("/")[2]) for name, _ in events]
    assert numbers == list(range(1, len(events) + 1)) and events[-1][1] == "[DONE]"
    found: dict[Any, Any] = {}

    def add(key: Any, value: Any) -> None:
        found[key] = found[key] + value if key in found else value

    for _, data in events[:-1]:
        event = json.loads(data)
        assert "error" not in event
        found["usage"] = event.get("usage")
        index = event.get("index", 0)
        if "meta_info" in event:  # --incremental-streaming-output
            add((index, "text"), event["text"])
            add((index, "ids"), event["output_ids"])
            add((index, "logprobs"), event["meta_info"].get("output_token_logprobs", []))
            found[index, "finish"] = event["meta_info"]["finish_reason"]
        if event.get("type", "").endswith("delta"):
            add("delta", event["delta"])
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            place = choice["index"]
            add((place, "text"), delta.get("content") or delta.get("text") or "")
            found[place, "finish"] = choice["finish_reason"]
            add((place, "logprobs"), (choice.get("logprobs") or {}).get("token_logprobs", []))
            for call in delta.get("tool_calls") or ():
                add((place, "call"), call["function"].get("name", "") + call["function"]["arguments"])
    return found


@pytest.mark.timeout(600)
def test_streams_outlive_their_servers(tmp_path: Path) -> None:
    flags = ["--model-path", str(make_toy(tmp_path / "toy.gguf")), "--port", "0", "--max-total-tokens", "16384"]
    flags += ["--resume-grace", "600", "--resume-file", str(tmp_path / "streams"), "--engine-restarts", "0"]
    flags += ["--incremental-streaming-output", "--random-seed", "1"]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    clients = [ResumingClient(path, body) for path, body in requests()]

    def server() -> ServerProcess:
        return ServerProcess(tmp_path, flags, module=REAL_SERVER, **cache)

    with server() as first:
        first.ready()
        for client in reversed(clients):  # the first ones are the longest, and begin when the others have begun
            client.go_on(first.url).has(1)
        for place, client in enumerate(clients):
            client.has(2 + 3 * place)
        first.signal(signal.SIGKILL)
        for client in clients:
            client.wait()
    with server() as second:
        second.ready()
        begun = [len(client.events) for client in clients]
        continued = [client.go_on(second.url) for client in clients if not client.is_over]
        for client, num_events in zip(clients, begun, strict=True):
            client.has(num_events + 20)
        second.signal(signal.SIGTERM)
        second.signal(signal.SIGTERM)
        assert second.exit_code() == 0
        assert all(client.wait().status == 200 for client in continued), [client.error for client in clients]
    assert os.stat(tmp_path / "streams").st_mode & 0o777 == 0o600
    with server() as third:
        third.ready()
        for client in clients:
            if not client.is_over:
                client.go_on(third.url)
            client.wait()
        undisturbed = [ResumingClient(path, body).go_on(third.url) for path, body in requests()]
        assert [said(client.events) for client in clients] == [said(one.wait().events) for one in undisturbed]
        third.signal(signal.SIGTERM)
        assert third.exit_code() == 0
