"""A client that begins a stream at one server, and continues it at the next ones."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from typing import Any

from patience import PATIENCE_S


class ResumingClient:
    """One stream. `events` has the name and the data of each event, from all servers."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.events: list[tuple[str, str]] = []
        self.status = 0
        self.error = ""
        self._path = path
        self._body = {**body, "stream": True}
        self._name = ""
        self._thread: threading.Thread
        self._has_enough = threading.Condition()

    def go_on(self, url: str) -> ResumingClient:
        """Begins the stream at this server, or continues it there."""
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()
        return self

    def has(self, num_events: int) -> None:
        with self._has_enough:
            assert self._has_enough.wait_for(lambda: len(self.events) >= num_events or self.is_over, PATIENCE_S)

    def wait(self) -> ResumingClient:
        """Until its connection has ended."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the client still waits"
        return self

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1][1] == "[DONE]"

    def _read(self, url: str) -> None:
        address = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)
        try:
            if self._name:
                connection.request("GET", "/v1/streams", headers={"Last-Event-ID": self._name})
            else:
                connection.request("POST", self._path, json.dumps(self._body), {"Content-Type": "application/json"})
            self._take(connection.getresponse())
        except (OSError, http.client.HTTPException):
            pass  # the server has died
        finally:
            connection.close()

    def _take(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        if response.status != 200:
            self.error = response.read().decode()
            return
        name = ""
        while line := response.readline():
            key, _, value = line.decode().rstrip("\n").partition(": ")
            if key == "id":
                name = value
            elif key == "data":  # the event is whole only with its empty line
                if response.readline() != b"\n":
                    return
                with self._has_enough:
                    self.events.append((name, value))
                    self._name = name
                    self._has_enough.notify_all()
