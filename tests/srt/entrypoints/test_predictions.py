"""`prediction` of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import CONTEXT_LEN, Site, byte_tokenizer

from tercet.srt.io_struct import unpack_ids

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def drafting() -> Iterator[Site]:
    site = Site(speculative_algorithm="NGRAM")
    yield site
    site.close()


@pytest.mark.parametrize("content", ["ab\n", [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]])
def test_the_engine_gets_the_tokens_of_a_prediction(drafting: Site, content: Any) -> None:
    drafting.scheduler.num_drafts, drafting.scheduler.num_accepted_drafts = 9, 7
    body = {"messages": HI, "max_tokens": 3, "prediction": {"type": "content", "content": content}}
    details = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}
    assert drafting.good(PATH, body)["usage"]["completion_tokens_details"] == details
    events = drafting.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"]["completion_tokens_details"] == details
    assert [bytes(unpack_ids(one.options.prediction).tolist()) for one in drafting.scheduler.received] == [b"ab\n"] * 2
    both = drafting.good(PATH, {**body, "n": 2})["usage"]["completion_tokens_details"]
    assert both == {"accepted_prediction_tokens": 14, "rejected_prediction_tokens": 4}


def test_without_a_prediction_drafts_are_not_counted(drafting: Site) -> None:
    drafting.scheduler.num_drafts = 9
    for prediction in (None, {"type": "content", "content": ""}):
        answer = drafting.good(PATH, {"messages": HI, "max_tokens": 3, "prediction": prediction})
        assert ("completion_tokens_details" in answer["usage"]) == (prediction is not None)
        assert not drafting.scheduler.received[-1].options.prediction


@pytest.mark.parametrize(
    ("prediction", "param", "message"),
    [
        ({"type": "content", "content": "a" * (CONTEXT_LEN + 1)}, "prediction", "the prediction has"),
        ({"type": "content", "content": "a" * (300 * CONTEXT_LEN)}, "prediction", "characters"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type", "image_url"),
        ({"type": "text", "content": "a"}, "prediction.type", "content"),
        ({"type": "content"}, "prediction.content", "required"),
        ("a", "prediction", "object"),
    ],
)
def test_a_prediction_that_cannot_be_used_is_refused(drafting: Site, prediction: Any, param: str, message: str) -> None:
    answer = drafting.post(PATH, json.dumps({"messages": HI, "prediction": prediction}).encode())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert not drafting.scheduler.received


def test_a_token_that_the_model_does_not_have_is_no_draft(drafting: Site) -> None:
    """A step computes every draft, so its token needs an embedding."""
    drafting.manager.inputs.tokenizer = tokenizer = byte_tokenizer("<new>")
    assert tokenizer.encode("<new>") == [drafting.manager.facts.vocab_size]
    answer = drafting.post(PATH, {"messages": HI, "prediction": {"type": "content", "content": "a<new>"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")
    assert "vocabulary" in answer.json()["error"]["message"]


def test_a_prediction_needs_a_server_with_drafts(site: Site) -> None:
    answer = site.post(PATH, {"messages": HI, "prediction": {"type": "content", "content": "a"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "prediction", "unsupported_field")
    assert "--speculative-algorithm NGRAM" in error["message"]
