"""/v1/responses/{response_id}/input_items: what the model has read, in pages. Also what the queries of it may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site, error_of

PATH = "/v1/responses"


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(response_store_mib=1)
    site.scheduler.say("Hi", " there")
    yield site
    site.close()


def create(site: Site, given: Any = "hi", previous: str | None = None) -> Any:
    return site.good(PATH, {"input": given, "previous_response_id": previous})


def list_of(site: Site, response_id: str, query: str = "?order=asc&limit=100") -> Any:
    answer = site.get(f"{PATH}/{response_id}/input_items{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_items_of_a_response(site: Site) -> None:
    first = create(site, [{"role": "developer", "content": "be"}, {"type": "reasoning", "summary": []}])
    given_items = [
        {"role": "assistant", "id": "msg_1", "status": "incomplete", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": "r", "id": "fco_1"},
    ]
    second = create(site, given_items, first["id"])
    found = list_of(site, second["id"])
    new_id, empty_id = (item["id"] for item in found["data"][:2])
    assert new_id.startswith("msg_") and empty_id.startswith("rs_")
    assert found["data"] == [
        {
            "type": "message",
            "id": new_id,
            "status": "completed",
            "role": "developer",
            "content": [{"type": "input_text", "text": "be"}],
        },
        {"type": "reasoning", "id": empty_id, "summary": [], "content": [], "status": "completed"},
        *first["output"],
        {
            "type": "message",
            "id": "msg_1",
            "status": "incomplete",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {**given_items[1], "content": [], "status": "completed"},
        {**given_items[2], "status": "completed"},
        {**given_items[3], "status": "completed"},
    ]
    assert (found["object"], found["first_id"], found["last_id"], found["has_more"]) == ("list", new_id, "fco_1", False)


@pytest.mark.parametrize("order", ["asc", "desc", None])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_have_every_item_once(site: Site, order: str | None, limit: int) -> None:
    previous = None
    for _ in range(3):  # the same id again and again: each item still has a name of its own
        previous = create(site, [{"role": "user", "id": "x", "content": "a"}] * 2, previous)["id"]
    everything = list_of(site, previous)["data"]
    assert len({item["id"] for item in everything}) == len(everything) == 8
    got: list[Any] = []
    while True:
        query = f"?limit={limit}" + (f"&order={order}" if order else "") + (f"&after={got[-1]['id']}" if got else "")
        page = list_of(site, previous, query)
        assert 1 <= len(page["data"]) <= limit
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        got += page["data"]
        if not page["has_more"]:
            break
    assert got == (everything if order == "asc" else everything[::-1])
    assert list_of(site, previous, f"?after={got[-1]['id']}" + (f"&order={order}" if order else "")) == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_a_page_has_twenty_items(site: Site) -> None:
    name = create(site, [{"role": "user", "content": ""}] * 21)["id"]
    page = list_of(site, name, "")
    assert len(page["data"]) == 20 and page["has_more"]


@pytest.mark.parametrize(
    ("path", "param", "says"),
    [
        ("?stream=true", "stream", "not supported"),
        ("?stream=1", "stream", "true or false"),
        ("?starting_after=1", "starting_after", "unknown query parameter"),
        ("?include[]=reasoning.encrypted_content", "include[]", "unknown query parameter"),
        ("/input_items?limit=0", "limit", "in [1, 100], got '0'"),
        ("/input_items?limit=101", "limit", "in [1, 100]"),
        ("/input_items?limit=x", "limit", "in [1, 100]"),
        ("/input_items?order=up", "order", "asc or desc, got 'up'"),
        ("/input_items?after=nobody", "after", "got 'nobody'"),
        ("/input_items?before=x", "before", "unknown query parameter"),
    ],
)
def test_bad_queries_are_refused(site: Site, path: str, param: str, says: str) -> None:
    answer = site.get(f"{PATH}/{create(site)['id']}{path}")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param and says in error_of(answer)["message"]
