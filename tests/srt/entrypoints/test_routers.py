"""The bodies that sglang-router and smg make of their clients' bodies, and what they ask of a worker."""

from __future__ import annotations

from typing import Any

import pytest
from fake_http import Site

SGLANG_ROUTER_CHAT = {
    "logprobs": False,
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "max_completion_tokens": 3,
}
SGLANG_ROUTER_COMPLETION = {
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
    "max_tokens": 3,
}
ROUTED_GENERATE = {
    "return_text_in_logprobs": False,
    "stream": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "own", "added"),
    [
        ("/v1/chat/completions", {"messages": HI, "seed": 1, "rid": "a"}, SGLANG_ROUTER_CHAT),
        ("/v1/chat/completions", {"messages": HI, "seed": 1, "rid": "a"}, {"logprobs": False, "stream": False}),
        ("/v1/completions", {"prompt": "a", "seed": 1, "rid": "a"}, SGLANG_ROUTER_COMPLETION),
        ("/v1/completions", {"prompt": "a", "seed": 1, "rid": "a"}, {"echo": False, "stream": False}),
        ("/generate", {"text": "a", "rid": "a"}, {**ROUTED_GENERATE, "model": None}),
        ("/generate", {"text": "a", "rid": "a"}, {**ROUTED_GENERATE, "model": "unknown"}),
    ],
)
def test_what_a_router_adds_changes_nothing(site: Site, path: str, own: dict[str, Any], added: dict[str, Any]) -> None:
    if path == "/generate":
        own = {**own, "sampling_params": {"max_new_tokens": 3, "sampling_seed": 1}}
    limit = {name: 3 for name in ("max_completion_tokens", "max_tokens") if name in added}
    answers = [site.good(path, {**own, **limit}), site.good(path, {**own, **added})]
    first, second = site.scheduler.received
    assert first.options == second.options and first.input_ids == second.input_ids
    for answer in answers:
        answer.pop("created", None)
        answer.get("meta_info", {}).pop("e2e_latency", None)
    assert answers[0] == answers[1]


def test_separate_reasoning_in_a_stream(site: Site) -> None:
    body = {"messages": HI, "max_tokens": 3, "separate_reasoning": True, "stream_reasoning": True}
    assert len(site.stream("/v1/chat/completions", body)) == 4


@pytest.mark.parametrize("path", ["/health", "/model_info", "/server_info", "/v1/models", "/version", "/get_load"])
def test_what_a_router_asks_before_it_takes_a_worker(site: Site, path: str) -> None:
    assert site.get(path).status_code == 200
