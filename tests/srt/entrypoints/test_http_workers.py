"""`--tokenizer-worker-num 2`: two HTTP processes on one port. Real processes, made-up tokens."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from http_workers import client_of, worker_pids
from patience import PATIENCE_S
from toy_engine import ServerProcess, Stream, is_gone, text_of, toy_flags

from tercet.srt.entrypoints.http_listener import bind_group

pytestmark = pytest.mark.timeout(300)

LONG = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 150}}
MAX_CONCURRENT = 6
SHORT = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}}

_REPORT = re.compile("Wrote a report about this to (.*)")


class Pair(NamedTuple):
    """A server, and a client of each of its two workers."""

    server: ServerProcess
    pids: list[int]
    clients: list[httpx.Client]
    pool: ThreadPoolExecutor

    def post(self, index: int, body: dict[str, Any]) -> Future[httpx.Response]:
        return self.pool.submit(self.clients[index].post, "/generate", json=body)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer of whichever worker."""
        with self.server.client() as client:
            response = client.request(method, path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No request ends by itself inside the block."""
        self.call("POST", "/pause_generation", {"mode": "in_place"})
        yield
        self.call("POST", "/continue_generation")

    def until_running(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (load := self.call("GET", "/load")) != {"server_load": count}:
            assert time.monotonic() < deadline, f"{load} and not {count}"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture(scope="module")
def server(run_dirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = [*toy_flags(tmp_path_factory.mktemp("m")), "--port", "0", "--tokenizer-worker-num", "2"]
    flags += ["--max-concurrent-requests-per-key", str(MAX_CONCURRENT)]
    with ServerProcess(run_dirs, [*flags, "--enable-metrics", "--engine-restarts", "9"]) as server:
        yield server.ready()


@pytest.fixture
def pair(server: ServerProcess) -> Iterator[Pair]:
    with ExitStack() as stack:
        pids = worker_pids(server)
        clients = [stack.enter_context(client_of(server, pid)) for pid in pids]
        yield Pair(server, pids, clients, stack.enter_context(ThreadPoolExecutor()))


def counted(page: str, name: str) -> float:
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
    assert found is not None, name
    return float(found.group(1))


def test_every_worker_answers_for_the_whole_server(pair: Pair) -> None:
    first, second = pair.clients
    before = counted(first.get("/metrics").text, "sglang:num_requests_total")
    answers = [client.post("/generate", json=SHORT).json() for client in (first, second, first)]
    assert [answer["text"] for answer in answers] == [text_of(5)] * 3
    for client in (first, second):
        assert counted(client.get("/metrics").text, "sglang:num_requests_total") == before + 3
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post("/flush_cache").status_code == 200
        assert client.get("/server_info").json()["tokenizer_worker_num"] == 2
        assert client.get("/v1/loads", params={"include": "memory"}).json()["loads"][0]["memory"]
    assert first.get("/v1/models").json() == second.get("/v1/models").json()


def test_errors_of_forwarded_endpoints(pair: Pair) -> None:
    client = pair.clients[1]
    assert client.post("/abort_request", json={}).json()["error"]["param"] == "rid"
    assert client.get("/flush_cache", params={"timeout": "x"}).json()["error"]["param"] == "timeout"
    assert client.post("/start_profile").status_code == 403
    assert client.get("/health", params={"x": "1"}).status_code == 400
    assert client.post("/abort_request", content=b"{").status_code == 400


def test_a_request_of_another_worker_is_aborted(pair: Pair) -> None:
    with pair.paused(), client_of(pair.server, pair.pids[1]) as client:
        answers = [pair.post(0, {**LONG, "rid": "mine"}), pair.post(1, {**LONG, "rid": "other"})]
        pair.until_running(2)
        assert client.post("/abort_request", json={"rid": "min"}).json() == {"aborted": False}
        assert client.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": True}
        sample = answers[0].result(PATIENCE_S).json()
        assert sample["meta_info"]["finish_reason"]["type"] == "abort" and sample["meta_info"]["id"] == "mine"
        pair.until_running(1)
        assert client.post("/abort_request", json={"abort_all": True}).json() == {"aborted": True}
        assert answers[1].result(PATIENCE_S).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert client.post("/abort_request", json={"abort_all": True}).json() == {"aborted": False}


def test_a_client_that_leaves_ends_its_request(pair: Pair) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(client_of(pair.server, pair.pids[0]))
        with client.stream("POST", "/generate", json={**LONG, "stream": True}) as response:
            next(response.iter_lines())
            stack.enter_context(pair.paused())
        pair.until_running(0)


def test_a_pause_holds_for_all_workers(pair: Pair) -> None:
    with pair.paused():
        assert [client.get("/health").json() for client in pair.clients] == [{"status": "paused"}] * 2
        answer = pair.post(1, SHORT)
        pair.until_running(1)
    assert answer.result(PATIENCE_S).json()["text"] == text_of(5)
    assert [client.get("/health").json() for client in pair.clients] == [{"status": "ok"}] * 2


def test_requests_of_both_workers_go_on_in_a_new_engine(pair: Pair) -> None:
    streams = [Stream(pair.server, "/generate", LONG) for _ in range(4)]
    assert all(stream.begun.wait(PATIENCE_S) for stream in streams)
    with pair.paused():
        num_left = pair.call("GET", "/load")["server_load"]
        answers = [pair.post(index, {**LONG, "rid": f"of worker {index}"}) for index in (0, 1)]
        pair.until_running(num_left + 2)
        os.kill(pair.server.children["scheduler"], signal.SIGKILL)
        assert pair.server.logged("The engine runs again")
    samples = [answer.result(PATIENCE_S).json() for answer in answers]
    assert [sample["text"] for sample in samples] == [text_of(150)] * 2
    assert [sample["meta_info"]["num_recoveries"] for sample in samples] == [1, 1]
    assert [json.loads(stream.wait().data[-2])["text"] for stream in streams] == [text_of(150)] * 4
    assert pair.call("GET", "/server_info")["num_engine_restarts"] == 1
    report = json.loads(Path(_REPORT.findall(pair.server.log)[-1]).read_text())
    assert {"of worker 0", "of worker 1"} <= {one["id"] for one in report["requests"]}, "as the clients know them"


def test_a_worker_that_dies_is_started_again(pair: Pair) -> None:
    with pair.paused():
        answers = [pair.post(index, LONG) for index in (0, 1)]
        pair.until_running(2)
        os.kill(pair.pids[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            answers[0].result(PATIENCE_S)
        assert pair.server.logged("the http_worker process died (signal 9); starting another (1 of 9); 1 samples of")
        new = next(pid for pid in worker_pids(pair.server) if pid != pair.pids[1])
        with client_of(pair.server, new) as client:  # it waits in the socket that the old worker left
            assert client.get("/load").json() == {"server_load": 1}
            assert client.get("/tokenizer_info").status_code == 400
    assert answers[1].result(PATIENCE_S).json()["text"] == text_of(150)


def test_workers_count_the_requests_of_a_client_together(pair: Pair) -> None:
    with ExitStack() as stack, pair.paused():
        pids = pair.pids * (MAX_CONCURRENT // 2)
        others = [stack.enter_context(client_of(pair.server, pid)) for pid in pids]
        answers = [pair.pool.submit(client.post, "/generate", json=LONG) for client in others]
        pair.until_running(MAX_CONCURRENT)
        assert [client.post("/generate", json=SHORT).status_code for client in pair.clients] == [429, 429]
        os.kill(pair.pids[0], signal.SIGKILL)
        pair.until_running(MAX_CONCURRENT // 2)
        answers.append(pair.post(1, SHORT))
        pair.until_running(MAX_CONCURRENT // 2 + 1)
        pair.call("POST", "/continue_generation")
        assert [answer.result(PATIENCE_S).json()["text"] for answer in answers[1:-1:2]] == [text_of(150)] * 3
        assert answers[-1].result(PATIENCE_S).json()["text"] == text_of(5), "requests of the dead worker do not run"


def test_streams_and_probes_tell_that_the_parent_is_stopped(pair: Pair) -> None:
    stream = Stream(pair.server, "/generate", LONG)
    assert stream.begun.wait(PATIENCE_S)
    os.kill(pair.server.pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while ": waiting" not in stream.comments:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [client.get("/ready").status_code for client in pair.clients] == [503, 503]
    finally:
        os.kill(pair.server.pid, signal.SIGCONT)
    assert json.loads(stream.wait().data[-2])["text"] == text_of(150)
    while pair.clients[0].get("/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_drains_all_workers(pair: Pair, run_dirs: Path) -> None:
    """The last test: it ends the server."""
    with pair.paused():
        answers = [pair.post(index, LONG) for index in (0, 1)]
        pair.until_running(2)
    children = [*pair.server.children.values(), *pair.pids]
    for pid in (*children, pair.server.pid):
        os.kill(pid, signal.SIGTERM)
    assert [answer.result(PATIENCE_S).json()["text"] for answer in answers] == [text_of(150)] * 2
    assert pair.server.exit_code() == 0
    assert all(is_gone(pid) for pid in children)
    assert os.listdir(run_dirs) == []
    assert "Traceback" not in pair.server.log


def test_a_worker_that_hangs_is_started_again(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = [*toy_flags(tmp_path), "--port", "0", "--tokenizer-worker-num", "2", "--watchdog-timeout", "2"]
    with ServerProcess(tmp_path_factory.mktemp("r"), flags) as server:
        pids = worker_pids(server.ready())
        os.kill(pids[0], signal.SIGSTOP)
        assert server.logged("The http_worker's loop has not turned for")
        assert server.logged("the http_worker process died (signal 9); starting another (1 of 3)")
        new = next(pid for pid in worker_pids(server) if pid != pids[1])
        with client_of(server, new) as client:
            assert client.get("/health").json() == {"status": "ok"}


def test_a_worker_that_cannot_be_started_again_ends_the_server(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = [*toy_flags(tmp_path), "--port", "0", "--tokenizer-worker-num", "2", "--engine-restarts", "1"]
    run_dirs = tmp_path_factory.mktemp("r")
    with ServerProcess(run_dirs, flags, FAKE_CHILD="bad worker") as server:
        pids = worker_pids(server.ready())
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            bind_group("127.0.0.1", port, 2)
        os.kill(pids[0], signal.SIGKILL)
        assert server.exit_code() == 1
        assert "An HTTP worker could not start: the tokenizer is of the wrong kind" in server.log
        assert "died (exit code 1); --engine-restarts 1 is used up" in server.log and "Traceback" not in server.log
        assert is_gone(pids[1]) and os.listdir(run_dirs) == []
