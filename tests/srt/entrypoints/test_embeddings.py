from __future__ import annotations

import base64
import re
from collections.abc import Iterator

import fake_http
import numpy as np
import pytest
from fake_http import Site
from live_site import live_site

from tercet.srt.entrypoints.openai.embedding_protocol import EmbeddingBody
from tercet.srt.io_struct import AbortFinish

PATH = "/v1/embeddings"


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def unit(*numbers: float) -> np.ndarray:
    vector = np.array(numbers)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def test_the_answer(site: Site) -> None:
    answer = site.post(PATH, {"input": ["abc", "b"], "model": "tiny"}).json()
    assert [one["index"] for one in answer["data"]] == [0, 1]
    for one, last in zip(answer["data"], (ord("c"), ord("b")), strict=True):
        assert np.float32(one["embedding"]).tolist() == unit(last, *range(2, 9)).tolist()
    assert answer["object"] == "list" and {one["object"] for one in answer["data"]} == {"embedding"}
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4} and answer["model"] == "tiny"
    assert all(req.options.sampling.max_new_tokens == 0 for req in site.scheduler.received)
    assert all(req.options.sampling.temperature == 0 for req in site.scheduler.received)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_form_of_input(site: Site, given, prompts) -> None:
    assert len(site.post(PATH, {"input": given}).json()["data"]) == len(prompts)
    assert site.scheduler.prompts() == prompts


def test_base64_and_fewer_dimensions(site: Site) -> None:
    body = {"input": "a", "encoding_format": "base64", "dimensions": 3, "pooling": "mean"}
    data = base64.b64decode(site.post(PATH, body).json()["data"][0]["embedding"])
    assert np.frombuffer(data, "<f4").tolist() == unit(ord("a"), 2, 3).tolist()


@pytest.mark.parametrize("dimensions", [1, 8])
def test_the_fewest_and_the_most_dimensions(site: Site, dimensions: int) -> None:
    (found,) = site.good(PATH, {"input": "a", "dimensions": dimensions})["data"]
    assert np.float32(found["embedding"]).tolist() == unit(ord("a"), *range(2, 1 + dimensions)).tolist()


def test_a_vector_of_zeros_stays_as_it_is(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its direction is not known. A division by its length would write null for each number."""
    monkeypatch.setattr(fake_http, "fake_embedding", lambda request: np.zeros(8, np.float32).tobytes())
    assert site.good(PATH, {"input": "a"})["data"][0]["embedding"] == [0.0] * 8
    results = site.good("/v1/rerank", {"query": "a", "documents": ["b"]})["results"]
    assert [one["relevance_score"] for one in results] == [0.0]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "at least one prompt"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": ["a"] * 1025}, "input", "input must have at most 1024 prompts, got 1025"),
        ({"input": ["a", 5]}, "input", "not a mix"),
        ({"input": [258]}, "input", "must be in"),
        ({"input": "a" * 300}, "input", "maximum context length is 256 tokens"),
        ({"input": "a", "dimensions": 0}, "dimensions", r"in \[1, 8\], got 0"),
        ({"input": "a", "dimensions": 9}, "dimensions", r"in \[1, 8\], got 9"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid enum value"),
        ({"input": "a", "pooling": "max"}, "pooling", "invalid enum value"),
        ({}, "input", "input"),
    ],
)
def test_what_is_refused(site: Site, body, param, message) -> None:
    error = site.refused(PATH, body)
    assert error["param"] == param and re.search(message, error["message"]), error


@pytest.mark.parametrize("why", ["aborted by the client", "the request has run for 2 s"])
def test_a_request_that_ends_early_is_an_error_that_says_why(site: Site, why: str) -> None:
    site.scheduler.fail = (0, AbortFinish(why))
    answer = site.post(PATH, {"input": "a"})
    assert answer.status_code == 499 and why in answer.json()["error"]["message"]


def test_the_openai_library() -> None:
    openai = pytest.importorskip("openai", reason="the extra `test` has the openai library")
    with live_site() as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as client:
        for encoding in ({}, {"encoding_format": "float"}):
            found = client.embeddings.create(model="tiny", input=["ab", "c"], dimensions=2, user="me", **encoding)
            expected = [unit(98, 2).tolist(), unit(99, 2).tolist()]
            assert [np.float32(one.embedding).tolist() for one in found.data] == expected
        assert found.usage.total_tokens == 3


def test_every_field_of_the_openai_library_is_known() -> None:
    params = pytest.importorskip("openai.types.embedding_create_params")
    assert set(params.EmbeddingCreateParams.__annotations__) <= set(EmbeddingBody.__struct_fields__)
