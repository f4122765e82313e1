"""A client that goes away, over real sockets: what it asked for is aborted at once, streaming or not."""

from __future__ import annotations

import http.client
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_http import events_of, text_of
from live_site import LiveSite, live_site
from patience import PATIENCE_S

BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/generate", {"text": "a"}, 1),
    ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 3}}, 6),
    ("/v1/completions", {"prompt": ["a", "b"]}, 2),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}, 2),
]


@pytest.fixture
def live() -> Iterator[LiveSite]:
    with live_site() as site:
        yield site


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def reset(connection: socket.socket) -> None:
    """Closes with RST, as a client that was killed may."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Says that no more requests come. The server cannot tell this from `close`."""
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""
    connection.close()


@pytest.mark.parametrize("close", [socket.socket.close, reset, half_close])
@pytest.mark.parametrize(("path", "body", "count"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(
    live: LiveSite, path: str, body: dict[str, Any], count: int, stream: bool, close: Callable[[socket.socket], None]
) -> None:
    live.scheduler.mute = True
    connection = live.send("POST", path, {**body, "stream": stream})
    wait_for(lambda: len(live.scheduler.running) == count, "the request")
    close(connection)
    wait_for(lambda: not live.scheduler.running and live.manager.num_unfinished == 0, "the abort")
    assert len(live.scheduler.aborted) == count
    assert httpx.get(live.url + "/health").status_code == 200


@pytest.mark.parametrize(("path", "body", "count"), BODIES)
def test_in_the_middle_of_a_stream(live: LiveSite, path: str, body: dict[str, Any], count: int) -> None:
    live.scheduler.delay_s = 0.05
    key = "max_tokens" if path.startswith("/v1") else "sampling_params"
    long = 200 if key == "max_tokens" else {**body.get(key, {}), "max_new_tokens": 200}
    connection = live.send("POST", path, {**body, "stream": True, key: long})
    received = b""
    while received.count(b"data: ") < 3:
        received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200")
    connection.close()
    wait_for(lambda: not live.scheduler.running and live.manager.num_unfinished == 0, "the abort")
    assert len(live.scheduler.aborted) == count


def test_a_client_that_stays_is_left_alone(live: LiveSite) -> None:
    with httpx.Client(base_url=live.url) as client:
        for _ in range(3):  # on one connection
            body = {"text": "a", "sampling_params": {"max_new_tokens": 20}}
            assert client.post("/generate", json=body).json()["text"] == text_of(20)
            events = events_of(client.post("/generate", json={**body, "stream": True}).content)
            assert events[-1]["text"] == text_of(20)
    assert live.scheduler.aborted == []


def test_headers_wait_for_the_first_output_and_events_for_nothing(live: LiveSite) -> None:
    live.scheduler.gate = True
    connection = live.send("POST", "/generate", {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 3}})
    received = b""
    for token in range(1, 4):
        wait_for(lambda: len(live.scheduler.held) == 1, "the next token")
        assert received.count(b"data: ") == token - 1
        if token == 1:
            connection.settimeout(0.05)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(20)
        live.scheduler.release()
        while received.count(b"data: ") < token:
            received += connection.recv(65536)
    connection.close()


def test_a_slow_reader_loses_nothing(live: LiveSite) -> None:
    connection = live.send(
        "POST", "/generate", {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 255}}
    )
    wait_for(lambda: live.manager.num_unfinished == 0, "the end of the generation")
    response = http.client.HTTPResponse(connection)
    response.begin()
    events = events_of(response.read())
    connection.close()
    assert live.scheduler.aborted == []
    assert events[-1]["text"] == text_of(255)
