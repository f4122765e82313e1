from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_http import Site
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "tercet.json"
METRIC = re.compile(r"\b(?:sglang|tercet):\w+")


@pytest.fixture(scope="module")
def board() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def names() -> Iterator[set[str]]:
    """The names of all series on the page of a server that has answered a request."""
    site = Site(enable_metrics=True)
    site.good("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 2}})
    site.get("/get_load")
    page = site.get("/metrics").text
    yield {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    site.close()


def queries(board: Any) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]] + [
        variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"
    ]


def test_every_query_names_a_metric_that_exists(board: Any, names: set[str]) -> None:
    for query in queries(board):
        named = set(METRIC.findall(query))
        assert named and named <= names, query


def test_the_panels_do_not_overlap(board: Any) -> None:
    cells = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cell = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & cell and place["x"] + place["w"] <= 24
        cells |= cell
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
