"""Servers behind a router, for the checks of routers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 180
MODEL = os.environ["TERCET_MODEL"]
NUM_TOKENS = 12
QUESTIONS = ["The capital of France is", "Water boils at", "A week has", "The first month of the year is"]
NUM_CHATS, CHATS_PER_S = 40, 8
"""The load while a server is killed."""
NUM_BAD_REQUESTS = 24


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises RuntimeError if the process ends first, or after START_TIMEOUT_S."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if is_so():
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args} did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def running(command: Sequence[str], is_ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers. At the end it is killed, with its children."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_until(is_ready, process, log)
            yield process
        finally:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


class Fleet:
    """Two servers and a router in front of them."""

    def __init__(self, url: str, servers: dict[str, subprocess.Popen[bytes]]) -> None:
        """`url`: the router's. `servers`: the servers by their URLs."""
        self.url = url
        self.servers = servers

    def kill_one(self) -> None:
        kill(next(iter(self.servers.values())))

    def post(self, path: str, body: dict[str, Any], url: str = "") -> httpx.Response:
        """`url`: a server's, to ask it directly."""
        return httpx.post(f"{url or self.url}{path}", json=body, timeout=120)


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def answers(url: str) -> bool:
    return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200


@contextlib.contextmanager
def fleet(router: Callable[[int, list[str]], Sequence[str]]) -> Iterator[Fleet]:
    """`router`: the router's command for its port and the servers' URLs."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for port in (free_port(), free_port()):
            serve = [os.environ["TERCET_PYTHON"], "-m", "tercet", "serve", os.environ["TERCET_TOKENIZER"]]
            flags = ["--port", str(port), "--served-model-name", MODEL, "--max-total-tokens", "16384"]
            servers[url_of(port)] = stack.enter_context(
                running([*serve, *flags], lambda port=port: answers(url_of(port)))
            )
        port = free_port()
        stack.enter_context(running(router(port, list(servers)), lambda: knows_two_servers(url_of(port))))
        yield Fleet(url_of(port), servers)


def knows_two_servers(url: str) -> bool:
    """Both routers list their workers, and add them in the background."""
    workers = httpx.get(f"{url}/workers", timeout=5).json()["workers"]
    return sum(worker.get("is_healthy", True) for worker in workers) == 2 and answers(url)


def chat(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, **more}


def same_answers(fleet: Fleet) -> None:
    """Chats, streamed chats, completions and /generate have the same answers as without a router."""
    direct = next(iter(fleet.servers))
    for question in QUESTIONS:
        wanted = fleet.post("/v1/chat/completions", chat(question), direct).json()["choices"][0]
        routed = fleet.post("/v1/chat/completions", chat(question))
        assert routed.status_code == 200, routed.text
        assert routed.json()["choices"][0] == wanted
        stream = fleet.post("/v1/chat/completions", chat(question, stream=True))
        assert stream.text.rstrip().endswith("data: [DONE]"), stream.text
        completion = {"model": MODEL, "prompt": question, "max_tokens": NUM_TOKENS, "temperature": 0}
        text = fleet.post("/v1/completions", completion, direct).json()["choices"][0]["text"]
        assert fleet.post("/v1/completions", completion).json()["choices"][0]["text"] == text
        body = {"text": question, "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0}}
        generated = fleet.post("/generate", body)
        assert generated.status_code == 200, generated.text
        assert generated.json()["text"] == text


def statuses_while_a_server_is_killed(fleet: Fleet) -> list[int]:
    """The statuses of chats that are sent at a fixed rate, a server being killed after a quarter of them."""
    with ThreadPoolExecutor(NUM_CHATS) as pool:
        chats = []
        for index in range(NUM_CHATS):
            if index == NUM_CHATS // 4:
                pool.submit(fleet.kill_one)
            body = chat(f"{index}: {QUESTIONS[index % len(QUESTIONS)]}")
            chats.append(pool.submit(fleet.post, "/v1/chat/completions", body))
            time.sleep(1 / CHATS_PER_S)
        return [one.result().status_code for one in chats]


def status_after_bad_requests(fleet: Fleet) -> int:
    """The status of a good request after one client has sent requests that the servers refuse with 400."""
    for index in range(NUM_BAD_REQUESTS):
        bad = {"model": MODEL, "prompt": f"a{index}", "max_tokens": 4, "temperature": -1}
        assert fleet.post("/v1/completions", bad).status_code in (400, 503)
    return fleet.post("/v1/chat/completions", chat(QUESTIONS[0])).status_code
