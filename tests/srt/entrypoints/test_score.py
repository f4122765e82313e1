from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import fake_http
import msgspec
import numpy as np
import pytest
from fake_http import Site
from fake_results import fake_logprobs

from tercet.srt.io_struct import AbortFinish, unpack_ids
from tercet.srt.logprobs import NewLogprobs

PATH = "/v1/score"
BODY = {"query": "a", "items": ["b", "c"], "label_token_ids": [4, 8]}


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def test_the_answer(site: Site) -> None:
    """The fake engine's log probability of a token is -id / 4."""
    answer = site.post(PATH, BODY).json()
    assert answer["scores"] == [[pytest.approx(math.exp(-1)), pytest.approx(math.exp(-2))]] * 2
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4} and answer["object"] == "scoring"
    assert site.scheduler.prompt_texts() == ["ab", "ac"]
    assert all(req.options.sampling.max_new_tokens == 1 for req in site.scheduler.received)
    assert all(req.options.sampling.temperature == 0 for req in site.scheduler.received)


def test_softmax_over_the_labels(site: Site) -> None:
    (scores,) = site.post(PATH, {**BODY, "items": "bc", "apply_softmax": True}).json()["scores"]
    assert site.scheduler.prompt_texts() == ["abc"], "a text is one item"
    assert sum(scores) == pytest.approx(1) and scores[0] / scores[1] == pytest.approx(math.e)


def test_the_shares_of_labels_do_not_depend_on_how_unlikely_all_are(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exponential of -1000 is 0."""

    def logprobs(*args: Any) -> NewLogprobs:
        new = fake_logprobs(*args)
        asked = np.array([-1000, -1001], np.float32)
        return msgspec.structs.replace(new, output=msgspec.structs.replace(new.output, asked=asked.tobytes()))

    monkeypatch.setattr(fake_http, "fake_logprobs", logprobs)
    (scores,) = site.good(PATH, {**BODY, "items": "b", "apply_softmax": True})["scores"]
    assert scores == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])


def test_labels_that_are_all_impossible_have_no_shares(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a model may be -inf. Then the sum is 0, and JSON has no NaN."""

    def logprobs(*args: Any) -> NewLogprobs:
        new = fake_logprobs(*args)
        second = -1 if unpack_ids(args[0].input_ids)[1] == ord("b") else -math.inf
        asked = np.array([-math.inf, second], np.float32)
        return msgspec.structs.replace(new, output=msgspec.structs.replace(new.output, asked=asked.tobytes()))

    monkeypatch.setattr(fake_http, "fake_logprobs", logprobs)
    assert site.good(PATH, BODY)["scores"] == [[0, pytest.approx(math.exp(-1))], [0, 0]]
    assert site.good(PATH, {**BODY, "items": "b", "apply_softmax": True})["scores"] == [[0, 1]]
    error = site.refused(PATH, {**BODY, "apply_softmax": True})
    assert error["param"] == "apply_softmax" and "probability 0 after items[1]" in error["message"]


@pytest.mark.parametrize(("first", "prompts"), [(False, [[1, 2, 3], [1, 2, 4]]), (True, [[3, 1, 2], [4, 1, 2]])])
def test_token_ids_in_either_order(site: Site, first, prompts) -> None:
    body = {"query": [1, 2], "items": [[3], [4]], "label_token_ids": [5], "item_first": first}
    assert len(site.post(PATH, body).json()["scores"]) == 2
    assert site.scheduler.prompts() == prompts


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"items": []}, "items", "at least one prompt"),
        ({"items": ["a"] * 1025}, "items", "items must have at most 1024 prompts, got 1025"),
        ({"items": [[1]]}, "items", "not a mix"),
        ({"items": ["a", [1]]}, "items", "not a mix"),
        ({"query": "", "items": ["a", ""]}, "items[1]", "empty"),
        ({"query": "", "items": ""}, "items", "empty"),
        ({"label_token_ids": [5, -1]}, "label_token_ids", "got -1"),
        ({"label_token_ids": []}, "label_token_ids", "1 to 1024 ids, got 0"),
        ({"label_token_ids": [258]}, "label_token_ids", "got 258"),
        ({"label_token_ids": [1] * 1025}, "label_token_ids", "got 1025"),
    ],
)
def test_what_is_refused(site: Site, change, param, message) -> None:
    error = site.refused(PATH, {**BODY, **change})
    assert error["param"] == param and message in error["message"], error


@pytest.mark.parametrize(("query", "item"), [("a" * 400_000, "b"), ([1] * 50_000, [2])])
def test_a_long_query_is_not_copied_for_each_item(site: Site, query, item) -> None:
    """16 MiB of a query before 1024 items would be 16 GiB."""
    tracemalloc.start()
    try:
        error = site.refused(PATH, {"query": query, "items": [item] * 1024, "label_token_ids": [1]})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error["param"] == "items[0]" and "at most" in error["message"]
    assert peak < 32 << 20


def test_the_most_labels_and_the_first_and_the_last_token(site: Site) -> None:
    labels = [0, 257] * 512
    (scores,) = site.good(PATH, {"query": "a", "items": "b", "label_token_ids": labels})["scores"]
    assert scores == pytest.approx([1, math.exp(-257 / 4)] * 512)


@pytest.mark.parametrize("why", ["aborted by the client", "the request has run for 2 s"])
def test_a_request_that_ends_early_is_an_error_that_says_why(site: Site, why: str) -> None:
    site.scheduler.fail = (0, AbortFinish(why))
    answer = site.post(PATH, BODY)
    assert answer.status_code == 499 and why in answer.json()["error"]["message"]
