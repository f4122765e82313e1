"""Finds the HTTP workers of a server, and connects clients to the worker that a test wants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
from patience import PATIENCE_S
from toy_engine import ServerProcess

_MAX_ATTEMPTS = 200
"""With two workers, that all of these connections reach the other one is as likely as one in 2 ** 200."""


def worker_pids(server: ServerProcess, count: int = 2) -> list[int]:
    """The process ids of the workers, oldest first. Waits until there are so many."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = sorted(psutil.Process(server.pid).children(), key=lambda child: child.create_time())
        pids = [child.pid for child in found if child.cmdline()[-1:] == ["http_worker"]]
        if len(pids) == count:
            return pids
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


@contextmanager
def client_of(server: ServerProcess, pid: int) -> Iterator[httpx.Client]:
    """A client whose only connection is to this worker."""
    clients: list[httpx.Client] = []
    try:
        for _ in range(_MAX_ATTEMPTS):
            # The kernel chooses the worker by the client's port. So the others stay open, and no port comes twice.
            client = httpx.Client(base_url=server.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=1))
            clients.append(client)
            if _is_connected(client, pid):
                yield client
                return
        raise AssertionError(f"no connection reached the worker {pid}")
    finally:
        for client in clients:
            client.close()


def _is_connected(client: httpx.Client, pid: int) -> bool:
    stream = client.get("/version").extensions["network_stream"]
    port = stream.get_extra_info("client_addr")[1]
    return any(one.raddr and one.raddr.port == port for one in psutil.Process(pid).net_connections("inet"))
