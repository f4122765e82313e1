"""A real Prometheus scrapes a real server, and answers each query of the dashboard. scripts/dashboard runs this."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
from grafana_board import panel_queries, read_board, variable_queries
from patience import PATIENCE_S
from toy_engine import REAL_SERVER, ServerProcess, write_toy_config

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"),
]
KEY = "scraped"


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the server on `port`, and a client of it."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        "scrape_configs:\n"
        "  - job_name: tercet\n"
        f"    authorization: {{credentials: {KEY}}}\n"
        f'    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]\n',
        encoding="utf-8",
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
            until(lambda: is_ready(client), lambda: (folder / "prometheus.log").read_text())
            yield client
    finally:
        process.kill()
        process.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool], problem: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, problem()
        time.sleep(0.2)


def send_traffic(server: ServerProcess, should_stop: threading.Event) -> None:
    """Three tenants, and prompts that return at once, soon and late: the pool, host memory and the files have hits.

    The header names the tenants `a` and `b`, and the field of the body names `c`.
    """
    rng = Random(0)
    prompts = [[rng.randrange(200) for _ in range(300)] for _ in range(24)]
    order = [0, 0, 1, 2, 3, 4, 0, *range(24)]
    with server.client() as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        for number in range(10_000):
            if should_stop.is_set():
                return
            body = {
                "input_ids": prompts[order[number % len(order)]],
                "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
                "tenant": "c",
            }
            header = ({"x-tenant": "a"}, {"x-tenant": "b"}, {})[number % 3]
            answer = client.post("/generate", json=body, headers=header)
            assert answer.status_code == 200, answer.text


def series_of(client: httpx.Client, query: str) -> list[tuple[dict[str, str], float]]:
    """The labels and values of all series of a panel's query. Grafana's variables are those of a new dashboard."""
    query = query.replace("$__rate_interval", "1m").replace("$model", ".*")
    answer = client.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]


def answer_of(client: httpx.Client, query: str) -> list[float]:
    return [value for _, value in series_of(client, query)]


def tenants_of(client: httpx.Client, query: str) -> set[str]:
    """The tenants with a number in the answer."""
    return {labels["tenant"] for labels, value in series_of(client, query) if math.isfinite(value)}


def test_each_query_of_the_dashboard_returns_a_series(tmp_path: Path) -> None:
    board = read_board()
    model = write_toy_config(tmp_path, max_position_embeddings=2048, hidden_size=64, num_hidden_layers=2)
    flags = ["--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--port", "0"]
    # Host memory must hold fewer prompts than there are: float32 on every processor.
    flags += ["--dtype", "float32", "--max-total-tokens", "1024", "--max-running-requests", "4"]
    flags += ["--enable-metrics", "--api-key", KEY]
    flags += ["--enable-hierarchical-cache", "--hicache-size", "0.003", "--hicache-storage-dir", str(tmp_path / "kv")]
    should_stop = threading.Event()
    with ServerProcess(tmp_path, flags, module=REAL_SERVER) as server:
        server.ready()
        traffic = threading.Thread(target=send_traffic, args=(server, should_stop))
        traffic.start()
        try:
            with server.client() as one:
                port = one.base_url.port
            assert port is not None
            with prometheus(tmp_path, port) as client:
                until(lambda: answer_of(client, "up") == [1.0], lambda: client.get("/api/v1/targets").text)
                left = panel_queries(board)

                def all_answered() -> bool:
                    left[:] = [query for query in left if not any(map(math.isfinite, answer_of(client, query)))]
                    return not left

                until(all_answered, lambda: f"no series: {left}")
                of_tenants = [query for query in panel_queries(board) if "tenant" in query]
                assert len(of_tenants) == 8
                for query in of_tenants:
                    until(
                        lambda query=query: tenants_of(client, query) == set("abc"),
                        lambda query=query: (query, series_of(client, query)),
                    )
                for query in variable_queries(board):
                    metric, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
                    found = client.get(f"/api/v1/label/{label}/values", params={"match[]": metric}).json()
                    assert found["data"], query
                for tier in ("device", "host", "storage_files"):
                    until(
                        lambda tier=tier: any(
                            answer_of(client, f'sglang:cached_tokens_total{{cache_source="{tier}"}}')
                        ),
                        lambda tier=tier: f"no hits: {tier}",
                    )
        finally:
            should_stop.set()
            traffic.join()
