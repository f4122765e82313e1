"""A client that outlives the process of its server: it continues its streams at the next one with `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from endurance.answers import Incomplete, whole_answer
from endurance.cases import Case
from endurance.clients import Client
from endurance.server_under_test import ServerUnderTest
from endurance.tally import StreamRecord, Tally

from tercet.benchmarks.http_client import HttpClient, HttpError, Response

_RETRY_S = 0.1
_END = b"\n\n"
_EVENT = b"id: "
_LAST = b"data: [DONE]"
_FROM_THE_LAST = 0.5
"""Share of the continued streams that go on after the last event. Others get some events again, or all."""


class ContinuingClient(Client):
    """Checks, too, that the events are numbered without a gap, and that an event that comes again has the same bytes.

    A request whose answer has not begun is sent again.
    """

    def __init__(
        self, server: ServerUnderTest, tally: Tally, answers: dict[tuple[str, bool], Any], rng: random.Random
    ) -> None:
        super().__init__(server.url, tally, answers)
        self._server = server
        self._rng = rng

    async def _exchange(self, case: Case, streamed: bool, record: StreamRecord, **more: Any) -> Response:
        try:
            if streamed:
                return await self._stream(case, record, **more)
            body = case.encoded(False, **more) if case.body else b""
            send = partial(self._http.request, case.method, case.path, body)
            num_attempts = 1
            while (response := await self._attempt(send)) is None:
                num_attempts += 1
            self._tally.sent_again += num_attempts > 1
            return response
        finally:
            record.end()

    async def _attempt(self, send: Callable[[], Awaitable[Response]]) -> Response | None:
        """The response. None, after a moment, if the server has ended or was not ready. Raises HttpError."""
        server = self._server
        num_changes, was_changing = server.num_changes, server.is_changing
        response: Response | None = None
        error: HttpError | None = None
        try:
            response = await send()
        except HttpError as broken:
            error = broken
        if response is not None and response.status != 503:
            return response
        if was_changing or server.num_changes > num_changes:
            await asyncio.sleep(_RETRY_S)
            return None
        if error is not None:
            raise error
        return response

    async def _stream(self, case: Case, record: StreamRecord, **more: Any) -> Response:
        """The response with the last event. `record` gets each event once."""
        parts: list[bytes] = []
        """Whole events and comments."""
        num_attempts = 0
        while True:
            events = [part for part in parts if part.startswith(_EVENT)]
            if events and events[-1].endswith(_LAST):
                return Response(200, "OK", b"")
            num_attempts += 1
            record.data.clear()
            if events:
                num_kept = self._num_kept(len(events))
                known, send = events[num_kept:], partial(self._continue, _stream_of(events), num_kept, record)
            else:
                known, send = [], partial(self._http.stream, case.path, case.encoded(True, **more), record.on_data)
                self._tally.sent_again += num_attempts == 2
            response = await self._attempt(send)
            self._tally.continued += bool(events and record.data)
            parts += _more(known, record.data)
            record.data[:] = b"".join(part + _END for part in parts)
            if response is not None:
                if events and response.status != 200:
                    whole_answer(response.status, response.body)  # raises Failed
                _check_numbers(parts)
                return response

    def _num_kept(self, num_events: int) -> int:
        """The number of events that are not asked for again."""
        return num_events if self._rng.random() < _FROM_THE_LAST else self._rng.randrange(num_events)

    async def _continue(self, stream: str, num_kept: int, record: StreamRecord) -> Response:
        client = HttpClient(self._url, {"Last-Event-ID": f"{stream}/{num_kept}"})
        try:
            return await client.stream("/v1/streams", b"", record.on_data, method="GET")
        finally:
            await client.close()


def _stream_of(events: list[bytes]) -> str:
    """The name of the stream, from the id of an event."""
    return events[0].removeprefix(_EVENT).partition(b"/")[0].decode()


def _more(known: list[bytes], data: bytes | bytearray) -> list[bytes]:
    """The whole events and comments of a continued stream, without the events that are known.

    Raises Incomplete if one of these has other bytes than before.
    """
    parts, left = [], list(known)
    for part in bytes(data).split(_END)[:-1]:
        if part.startswith(_EVENT) and left:
            before = left.pop(0)
            if part != before:
                raise Incomplete(f"an event was {before[-200:]!r}, and came again as {part[-200:]!r}")
        else:
            parts.append(part)
    return parts


def _check_numbers(parts: list[bytes]) -> None:
    numbers = [int(part.partition(b"\n")[0].rpartition(b"/")[2]) for part in parts if part.startswith(_EVENT)]
    if numbers != list(range(1, len(numbers) + 1)):
        raise Incomplete(f"the events of a continued stream have the numbers {numbers}")
