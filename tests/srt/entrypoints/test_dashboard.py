from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site
from grafana_board import panel_queries, read_board, variable_queries
from prometheus_client.parser import text_string_to_metric_families

from tercet.srt.speculation_state import SpeculationState
from tercet.srt.tier_state import FileTierState, TierState

METRIC = re.compile(r"\b(?:sglang|tercet):\w+")
FILES = FileTierState(
    used_bytes=10, max_bytes=20, read_tokens=3, written_tokens=4, read_bytes=30, written_bytes=40, num_damaged=5,
    num_removed=6, is_writing=False,
)  # fmt: skip
TIERS = TierState(
    host_used_tokens=64, host_total_tokens=128, saved_tokens=7, loaded_tokens=8, saved_bytes=70, loaded_bytes=80,
    dropped_tokens=9, files=FILES,
)  # fmt: skip


@pytest.fixture(scope="module")
def board() -> Any:
    return read_board()


@pytest.fixture(scope="module")
def names() -> Iterator[set[str]]:
    """The names of all series on the page of a server that has answered a request."""
    site = Site(enable_metrics=True)
    site.scheduler.tiers = TIERS
    site.good("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 2}})
    site.get("/get_load")
    page = site.get("/metrics").text
    yield {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    site.close()


def test_every_query_names_a_metric_that_exists(board: Any, names: set[str]) -> None:
    for query in [*panel_queries(board), *variable_queries(board)]:
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


def test_every_tier_has_its_own_numbers() -> None:
    site = Site(enable_metrics=True)
    site.scheduler.tiers = TIERS
    site.get("/get_load")
    families = text_string_to_metric_families(site.get("/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    site.close()
    expected = {
        "sglang:hicache_host_used_tokens": 64,
        "sglang:hicache_host_total_tokens": 128,
        "sglang:hicache_backup_tokens_total": 7,
        "sglang:hicache_backup_bytes_total": 70,
        "sglang:load_back_tokens_total": 8,
        "sglang:load_back_bytes_total": 80,
        "sglang:hicache_dropped_tokens_total": 9,
        "sglang:prefetched_tokens_total": 3,
        "sglang:backuped_tokens_total": 4,
        "tercet:kv_files_used_bytes": 10,
        "tercet:kv_files_max_bytes": 20,
        "tercet:kv_files_read_bytes_total": 30,
        "tercet:kv_files_written_bytes_total": 40,
        "tercet:kv_files_damaged_total": 5,
        "tercet:kv_files_removed_total": 6,
        "tercet:kv_files_writing": 0,
    }
    assert {name: values[name] for name in expected} == expected


def test_without_tiers_the_page_has_none() -> None:
    site = Site(enable_metrics=True)
    site.get("/get_load")
    page = site.get("/metrics").text
    site.close()
    assert "hicache" not in page and "kv_files" not in page and "spec_" not in page and "draft" not in page


def test_the_page_tells_what_drafts_have_brought() -> None:
    site = Site(enable_metrics=True)
    site.scheduler.speculation = SpeculationState(num_verifications=10, num_drafts=40, num_accepted_drafts=25)
    site.get("/get_load")
    families = text_string_to_metric_families(site.get("/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    (state,) = site.get("/server_info").json()["internal_states"]
    site.close()
    assert values["sglang:spec_accept_length"] == state["avg_spec_accept_length"] == 3.5
    assert values["sglang:spec_accept_rate"] == 0.625
    assert values["tercet:draft_tokens_total"] == 40 and values["tercet:accepted_draft_tokens_total"] == 25
    assert state["speculation"] == {"num_verifications": 10, "num_drafts": 40, "num_accepted_drafts": 25}


@pytest.mark.parametrize("is_paused", [False, True])
def test_the_page_tells_of_a_pause_and_of_retained_tokens(is_paused: bool) -> None:
    site = Site(enable_metrics=True)
    site.scheduler.is_paused = is_paused
    site.get("/get_load")
    families = text_string_to_metric_families(site.get("/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    site.close()
    assert values["tercet:paused"] == is_paused and values["tercet:retained_tokens"] == 30
