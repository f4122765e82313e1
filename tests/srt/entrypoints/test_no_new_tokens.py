"""A request of 0 tokens warms the prefix cache: its answer has no text, no token ids, and the counts of its prompt."""

from __future__ import annotations

from typing import Any

import pytest
from fake_http import Site

NONE_OF = {"max_new_tokens": 0}
HI = [{"role": "user", "content": "hi"}]
CHAT_TOKENS = len("<user>hi\n<assistant>")


def test_the_native_answer(site: Site) -> None:
    answer = site.good("/generate", {"text": "abc", "sampling_params": NONE_OF})
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["e2e_latency"] > 0
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 0, 2)
    assert site.scheduler.received[0].options.sampling.max_new_tokens == 0


def test_the_native_stream_is_one_event_for_each_sample(site: Site) -> None:
    body = {"text": ["abc", "de"], "sampling_params": {**NONE_OF, "n": 2}}
    events = site.stream("/generate", body)
    assert sorted(event["index"] for event in events) == [0, 1, 2, 3]
    assert {event["text"] for event in events} == {""} and all(event["output_ids"] == [] for event in events)
    assert all(event["meta_info"]["finish_reason"]["length"] == 0 for event in events)
    assert [answer["meta_info"]["prompt_tokens"] for answer in site.good("/generate", body)] == [3, 3, 2, 2]


def usage(prompt_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": prompt_tokens - 1},
    }


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_chat(site: Site, field: str) -> None:
    body = {"messages": HI, field: 0, "n": 2}
    answer = site.good("/v1/chat/completions", body)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["", ""]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"] == usage(CHAT_TOKENS)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = site.stream("/v1/chat/completions", {**body, "stream_options": options})
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}] * 2
    assert last["choices"] == [] and last["usage"] == usage(CHAT_TOKENS)


def test_completions(site: Site) -> None:
    body = {"prompt": ["abc", "de"], "max_tokens": 0, "return_token_ids": True}
    answer = site.good("/v1/completions", body)
    assert [(choice["text"], choice["token_ids"]) for choice in answer["choices"]] == [("", []), ("", [])]
    assert answer["usage"] == {**usage(5), "prompt_tokens_details": {"cached_tokens": 3}}
    events = site.stream("/v1/completions", body)
    assert [event["choices"][0]["finish_reason"] for event in events] == ["length", "length"]


def test_a_minimum_does_not_fit_into_none(site: Site) -> None:
    error = site.refused("/v1/completions", {"prompt": "a", "max_tokens": 0, "min_tokens": 1})
    assert error["param"] == "min_tokens" and "at most max_tokens (0)" in error["message"]
