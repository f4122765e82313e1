"""GET /v1/models: the pages of the list, for clients of OpenAI and of Anthropic."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from fake_http import Site
from hypothesis import given
from hypothesis import strategies as st

from tercet.srt.adapters import AdapterFacts

NAMES = [f"adapter-{number}" for number in range(4)]
IDS = ["tiny", *NAMES]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site(
        adapters=[AdapterFacts(name, f"/adapters/{name}", f"f-{name}", 1) for name in NAMES],
        lora_paths=[f"{name}=/adapters/{name}" for name in NAMES],
    )
    yield site
    site.close()


def page(site: Site, query: str) -> tuple[list[str], bool]:
    """The ids of a page, and `has_more`."""
    answer: dict[str, Any] = site.get(f"/v1/models?{query}").json()
    ids = [card["id"] for card in answer["data"]]
    assert (answer["first_id"], answer["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, answer["has_more"]


def test_a_card_has_the_fields_of_both_apis(site: Site) -> None:
    answer = site.get("/v1/models").json()
    assert (answer["object"], answer["has_more"], len(answer["data"])) == ("list", False, len(IDS))
    for card in answer["data"]:
        assert card["object"] == card["type"] == "model" and card["lifecycle"] == "active"
        assert card["display_name"] == card["id"]
        assert datetime.fromisoformat(card["created_at"]) == datetime.fromtimestamp(card["created"], UTC)
        assert site.get(f"/v1/models/{card['id']}").json() == card


@given(st.integers(1, len(IDS) + 1))
def test_pages_that_follow_each_other_have_all_models(site: Site, limit: int) -> None:
    ids, has_more = page(site, f"limit={limit}")
    while has_more:
        more, has_more = page(site, f"limit={limit}&after_id={ids[-1]}")
        assert len(more) == limit or not has_more
        ids += more
    assert ids == IDS
    assert page(site, f"after_id={IDS[-1]}") == ([], False)


@given(st.integers(1, len(IDS) + 1))
def test_pages_that_precede_each_other_have_all_models_but_the_last(site: Site, limit: int) -> None:
    ids, has_more = page(site, f"limit={limit}&before_id={IDS[-1]}")
    while has_more:
        more, has_more = page(site, f"limit={limit}&before_id={ids[0]}")
        assert len(more) == limit or not has_more
        ids = more + ids
    assert ids == IDS[:-1]
    assert page(site, f"before_id={IDS[0]}") == ([], False)


@given(st.integers(0, len(IDS) - 1), st.integers(0, len(IDS) - 1), st.integers(1, len(IDS)))
def test_a_page_between_two_models_has_the_last_ones(site: Site, after: int, before: int, limit: int) -> None:
    between = IDS[after + 1 : before]
    expected = between[-limit:], len(between) > limit
    assert page(site, f"limit={limit}&after_id={IDS[after]}&before_id={IDS[before]}") == expected


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("limit=0", "limit", "must be a number in [1, 1000], got '0'"),
        ("limit=1001", "limit", "in [1, 1000]"),
        ("after_id=nobody", "after_id", "must be the id of a model of the list, got 'nobody'"),
        ("before_id=", "before_id", "got ''"),
        ("order=asc", "order", "order"),
    ],
)
def test_other_values_are_refused(site: Site, query: str, param: str, message: str) -> None:
    answer = site.get(f"/v1/models?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]
