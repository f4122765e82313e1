# requires: smg==1.13.0 httpx==0.28.1 pytest==9.2.0
"""smg, the successor of sglang-router, in front of two servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from routed_servers import (
    NUM_CHATS,
    Fleet,
    fleet,
    free_port,
    same_answers,
    status_after_bad_requests,
    statuses_while_a_server_is_killed,
)


def launch(port: int, servers: list[str]) -> list[str]:
    flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return [sys.executable, "-m", "smg", "launch", *flags, "--worker-urls", *servers]


@pytest.fixture(scope="module")
def routed() -> Iterator[Fleet]:
    with fleet(launch) as made:
        yield made


def test_answers_are_the_same(routed: Fleet) -> None:
    same_answers(routed)


def test_bad_requests_take_no_server_out(routed: Fleet) -> None:
    assert status_after_bad_requests(routed) == 200


def test_a_server_is_killed(routed: Fleet) -> None:  # the last check: one server is left
    assert statuses_while_a_server_is_killed(routed) == [200] * NUM_CHATS
