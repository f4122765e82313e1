from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site, error_of
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tercet.srt.errors import TercetError
from tercet.srt.io_struct import AbortFinish

LABELS = {"model_name": "tiny"}
BODY: dict[str, Any] = {"text": "abc", "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture
def counted() -> Iterator[Site]:
    site = Site(enable_metrics=True)
    yield site
    site.close()


def scrape(site: Site) -> dict[str, Metric]:
    answer = site.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(families: dict[str, Metric], family: str, sample: str = "") -> float:
    (found,) = (one for one in families[family].samples if one.name == (sample or family) and one.labels == LABELS)
    return found.value


def test_without_the_flag_nothing_is_counted(site: Site) -> None:
    answer = site.get("/metrics")
    assert answer.status_code == 404 and error_of(answer)["code"] == "metrics_off"
    meta = site.good("/generate", BODY)["meta_info"]
    assert not {"queue_time", "first_token_latency", "decode_throughput"} & set(meta)


def test_the_page_has_the_metrics_that_dashboards_read(counted: Site) -> None:
    """The names of docs/api.md, with SGLang's prefix and label."""
    for stream in (False, True):
        counted.post("/generate", {**BODY, "stream": stream})
    counted.post("/generate", {**BODY, "text": ["abc", "de"]})
    assert counted.get("/get_load").status_code == 200  # asks for the state, which the page shows
    page = scrape(counted)
    gauges = {
        "num_running_reqs": 0,
        "num_queue_reqs": 2,
        "token_usage": 0.2,
        "num_used_tokens": 200,
        "max_total_num_tokens": 1000,
        "cache_hit_rate": 0.25,
        "gen_throughput": 12.5,
    }
    counters = {
        "prompt_tokens": 3 + 3 + 3 + 2,
        "generation_tokens": 16,
        "num_requests": 4,
        "num_aborted_requests": 0,
        "num_retracted_requests": 3,
    }
    for name, expected in gauges.items():
        assert page[f"sglang:{name}"].type == "gauge" and value(page, f"sglang:{name}") == expected
    for name, expected in counters.items():
        family = page[f"sglang:{name}"]
        assert family.type == "counter" and value(page, family.name, f"sglang:{name}_total") == expected
    cached = {one.labels["cache_source"]: one.value for one in page["sglang:cached_tokens"].samples}
    assert cached == {"device": 2 + 2 + 2 + 1, "host": 0, "storage_files": 0}
    for name, count in (
        ("time_to_first_token_seconds", 4),
        ("inter_token_latency_seconds", 12),
        ("e2e_request_latency_seconds", 4),
        ("queue_time_seconds", 4),
    ):
        family = page[f"sglang:{name}"]
        assert family.type == "histogram" and value(page, family.name, f"sglang:{name}_count") == count
        bounds = [one.labels["le"] for one in family.samples if one.name.endswith("_bucket")]
        assert bounds[-1] == "+Inf" and len(bounds) > 15


def test_a_failed_request_is_counted(counted: Site) -> None:
    counted.scheduler.fail = (2, AbortFinish.of(TercetError("broken")))
    assert counted.post("/generate", BODY).status_code == 500
    page = scrape(counted)
    assert value(page, "sglang:num_aborted_requests", "sglang:num_aborted_requests_total") == 1
    assert value(page, "sglang:num_requests", "sglang:num_requests_total") == 1
    assert value(page, "sglang:generation_tokens", "sglang:generation_tokens_total") == 2


def test_restarts_are_counted(counted: Site) -> None:
    recovery = counted.manager.recovery
    recovery.num_restarts, recovery.num_resumed, recovery.num_fatal = 3, 2, 1
    page = scrape(counted)
    for name, expected in (("engine_restarts", 3), ("resumed_samples", 2), ("fatal_samples", 1)):
        assert value(page, f"tercet:{name}", f"tercet:{name}_total") == expected


def test_a_scrape_does_not_wait_for_the_scheduler(counted: Site) -> None:
    counted.scheduler.dead = True
    page = scrape(counted)
    assert "sglang:num_requests" in page and "sglang:num_running_reqs" not in page
    assert counted.scheduler.received == []


def test_the_names_are_the_same_for_every_prometheus(counted: Site) -> None:
    """Prometheus asks for OpenMetrics first."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    answer = counted.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = [sample.name for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert "sglang:num_requests_total" in samples and all(":" in name for name in samples)


def test_the_times_of_a_request(counted: Site) -> None:
    counted.scheduler.delay_s = 0.002
    meta = counted.good("/generate", BODY)["meta_info"]
    assert meta["queue_time"] == 0.25
    assert 0 < meta["first_token_latency"] < meta["e2e_latency"]
    assert meta["decode_throughput"] > 0
    assert meta["prefill_time"] == max(meta["first_token_latency"] - 0.25, 0.0)
    events = counted.stream("/generate", {**BODY, "stream": True})
    assert "queue_time" in events[-1]["meta_info"] and "queue_time" not in events[0]["meta_info"]


def test_what_a_router_reads(site: Site) -> None:
    answer = site.get("/v1/loads?include=core,disagg,queues,memory").json()
    assert answer["timestamp"] > 1_600_000_000 and answer["version"]
    assert answer["loads"] == [
        {
            "dp_rank": 0,
            "num_running_reqs": 0,
            "num_waiting_reqs": 2,
            "num_total_reqs": 2,
            "num_waiting_uncached_tokens": 70,
            "num_used_tokens": 200,
            "num_total_tokens": 270,
            "max_total_num_tokens": 1000,
            "max_running_requests": 16,
            "token_usage": 0.2,
            "gen_throughput": 12.5,
            "cache_hit_rate": 0.25,
            "is_paused": False,
            "age_s": 0.0,
            "memory": {"weight_gb": 1.0, "kv_cache_gb": 0.5, "graph_gb": 0.25, "token_capacity": 1000},
            "queues": {"waiting": 2, "retracted": 3},
        }
    ]


@pytest.mark.parametrize(
    ("query", "sections"),
    [
        ("", {"memory", "queues"}),
        ("?include=all", {"memory", "queues"}),
        ("?include=core", set()),
        *[(f"?include={name}", {name}) for name in ("memory", "queues")],
        ("?include=lora", set()),
    ],
)
def test_the_sections_that_are_asked_for(site: Site, query: str, sections: set[str]) -> None:
    load = site.get(f"/v1/loads{query}").json()["loads"][0]
    assert sections == {"memory", "queues", "lora"} & set(load)


@pytest.mark.parametrize("include", ["", "core,", "gpu", "core;memory"])
def test_an_unknown_section_is_refused(site: Site, include: str) -> None:
    answer = site.get(f"/v1/loads?include={include}")
    assert answer.status_code == 400 and error_of(answer)["param"] == "include"
