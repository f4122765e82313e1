from __future__ import annotations

from collections.abc import Iterator

import fake_http
import numpy as np
import pytest
from fake_adapters import PIRATE, WITH_PIRATE
from fake_http import Site
from field_tables import LIMITS
from field_walks import Table, Walk, check
from hypothesis import given
from hypothesis import strategies as st

from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.openapi import body_types
from tercet.srt.entrypoints.rerank import RerankBody, RerankDocument
from tercet.srt.io_struct import AbortFinish

PATH = "/v1/rerank"
BODY = {"query": "b", "documents": ["z", "b", {"text": "!"}, "b"]}


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(**WITH_PIRATE)
    yield site
    site.close()


def cosine(left: str, right: str) -> float:
    """The fake engine's embedding of a text is its last token and then 2, 3, ... 8."""
    one, two = (np.array([ord(text[-1]), *range(2, 9)], float) for text in (left, right))
    return float(one @ two / np.linalg.norm(one) / np.linalg.norm(two))


def test_the_answer(site: Site) -> None:
    answer = site.post(PATH, BODY).json()
    assert [(one["index"], one["document"]["text"]) for one in answer["results"]] == [
        (1, "b"),
        (3, "b"),
        (0, "z"),
        (2, "!"),
    ]
    expected = [cosine("b", text) for text in ("b", "b", "z", "!")]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(expected, abs=1e-9)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5} and answer["model"] == "tiny"
    assert all(req.options.sampling.max_new_tokens == 0 for req in site.scheduler.received)
    assert {req.options.pooling for req in site.scheduler.received} == {"mean"}


@given(
    st.lists(st.integers(-3, 3), min_size=3, max_size=3), st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=3)
)
def test_a_score_is_a_cosine_of_any_vectors(query: tuple[int, ...], numbers: list[float]) -> None:
    """Also of equal, opposite and orthogonal ones, and of zeros."""
    documents = [query, [-2 * number for number in query], [0, 0, 0], *zip(*[iter(numbers)] * 3, strict=False)]
    vectors = iter([np.array(vector, np.float32) for vector in (query, *documents)])
    site = Site()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_http, "fake_embedding", lambda request: next(vectors).tobytes())
        results = site.post(PATH, {"query": "a", "documents": ["a"] * len(documents)}).json()["results"]
    site.close()
    scores = [one["relevance_score"] for one in sorted(results, key=lambda one: one["index"])]
    assert all(-1 <= score <= 1 for score in scores)
    assert scores[:3] == pytest.approx([1, -1, 0] if any(query) else [0, 0, 0])
    assert [one["relevance_score"] for one in results] == sorted(scores, reverse=True)


@pytest.mark.parametrize("top_n", [1, 3, 9])
def test_the_best_documents_without_their_texts(site: Site, top_n: int) -> None:
    results = site.post(PATH, {**BODY, "top_n": top_n, "return_documents": False}).json()["results"]
    assert [one["index"] for one in results] == [1, 3, 0, 2][:top_n]
    assert all(set(one) == {"index", "relevance_score"} for one in results)


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"documents": []}, "documents", "at least one"),
        ({"documents": ["a", ""]}, "documents[1]", "empty"),
        ({"documents": ["a"] * 1024}, "documents", "at most 1023 texts beside the query, got 1024"),
        ({"documents": [{"image": "a"}]}, "documents[0].image", "unknown field"),
        ({"query": ""}, "query", "empty"),
        ({"top_n": 0}, "top_n", "at least 1, got 0"),
        ({"pooling": "max"}, "pooling", "invalid enum value"),
        ({"max_chunks_per_doc": 3}, "max_chunks_per_doc", "unknown"),
    ],
)
def test_what_is_refused(site: Site, change, param, message) -> None:
    error = site.refused(PATH, {**BODY, **change})
    assert error["param"] == param and message in error["message"], error


@pytest.mark.parametrize("why", ["aborted by the client", "the request has run for 2 s"])
def test_a_request_that_ends_early_is_an_error_that_says_why(site: Site, why: str) -> None:
    site.scheduler.fail = (0, AbortFinish(why))
    answer = site.post(PATH, BODY)
    assert answer.status_code == 499 and why in answer.json()["error"]["message"]


FIELDS: Table = {
    "query": ("c", lambda seen: seen.answer["results"][0]["index"] == 1),
    "documents": (["b"], lambda seen: [one["document"]["text"] for one in seen.answer["results"]] == ["b"]),
    "top_n": (1, lambda seen: len(seen.answer["results"]) == 1),
    "return_documents": (False, lambda seen: "document" not in seen.answer["results"][0]),
    "pooling": ("last", lambda seen: seen.req.options.pooling == "last"),
    "model": ("gpt", lambda seen: seen.answer["error"]["code"] == "model_not_found"),
    "lora_path": ("pirate", lambda seen: seen.req.options.adapter == PIRATE.ref),
    "cache_salt": ("pepper", lambda seen: seen.req.options.cache_salt == "pepper"),
    "user": ("ann", lambda seen: seen.req.options.tenant == "ann"),
    **LIMITS,
}
DOCUMENT: Table = {"text": ("b", lambda seen: seen.answer["results"][0]["document"] == {"text": "b"})}
WALKS = [
    Walk(PATH, RerankBody, FIELDS, lambda name, value: {"query": "a", "documents": ["a", "c"], name: value}),
    Walk(PATH, RerankDocument, DOCUMENT, lambda name, value: {"query": "a", "documents": [{name: value}]}),
]


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.cls.__name__)
def test_every_honoured_field_arrives(site: Site, walk: Walk) -> None:
    check(site, walk)


def test_every_type_of_object_is_walked() -> None:
    assert {walk.cls for walk in WALKS} == set(body_types([one for one in ENDPOINTS if one.path == PATH]))
