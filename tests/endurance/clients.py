"""Clients of a server under test: well-behaved ones, which check every byte, and others, which behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from endurance.answers import Failed, Incomplete, difference, recoveries, streamed_answer, whole_answer
from endurance.cases import Case
from endurance.tally import Failure, StreamRecord, Tally

from tercet.benchmarks.http_client import HttpClient, HttpError, Response

_NEVER_S = 600.0
"""A request that takes longer hangs. In a chaos run a request may meet many restarts."""
_AT_ONCE = 16


class Client:
    """Sends one request after the other, and compares each answer with the undisturbed one."""

    def __init__(self, url: str, tally: Tally, answers: dict[tuple[str, bool], Any]) -> None:
        """`answers`: the undisturbed answer of each case, streamed or not."""
        self._url = url
        self._http = HttpClient(url)
        self._tally = tally
        self._answers = answers

    async def learn(self, cases: Sequence[Case]) -> None:
        """Asks every case, streamed and not, and notes its answer. Raises Failed and Incomplete."""
        few = asyncio.Semaphore(_AT_ONCE)

        async def one(case: Case, streamed: bool) -> None:
            record = StreamRecord(case.name)
            async with few:
                response = await self._exchange(case, streamed, record)
            with _named(case, streamed):
                self._answers[case.name, streamed] = _answer_of(response, record.data)

        both = [(case, streamed) for case in cases for streamed in (False, True) if case.can_stream or not streamed]
        await asyncio.gather(*(one(case, streamed) for case, streamed in both))

    async def ask(self, case: Case, streamed: bool) -> None:
        """Sends the request, waits for its end, and notes what has come of it."""
        tally, name = self._tally, f"{case.name}{', streamed' if streamed else ''}"
        record = StreamRecord(name)
        data = record.data
        fate = "wrong"
        try:
            async with asyncio.timeout(_NEVER_S):
                response = await self._exchange(case, streamed, record)
            answer = _answer_of(response, data)
        except Failed as error:
            self._note_failure(name, error, record)
            fate = "lost" if data else "refused"
        except (Incomplete, HttpError) as error:
            tally.wrong.append(f"{name}: {error}; after {bytes(data[-200:])!r}")
        except TimeoutError:
            tally.wrong.append(f"{name}: no end after {_NEVER_S:.0f} s; after {bytes(data[-200:])!r}")
        else:
            if answer != self._answers[case.name, streamed]:
                what = difference(answer, self._answers[case.name, streamed])
                tally.wrong.append(f"{name}: another answer than undisturbed: {what}")
            else:
                has_waited = streamed and recoveries(data) > 0
                fate = "completed after a restart" if has_waited else "completed"
                tally.completed += 1
                if streamed:
                    tally.streams += 1
                    tally.resumed[case.path] += has_waited
        tally.new_schemas[fate] += case.has_new_schema
        tally.note_waits(record.waits)

    async def leave(self, case: Case, streamed: bool, after_s: float) -> None:
        """Breaks the connection after that time, in the middle of whatever is there then."""
        with contextlib.suppress(TimeoutError, HttpError):
            async with asyncio.timeout(after_s):
                await self._exchange(case, streamed, StreamRecord(case.name))
        self._tally.left += 1

    async def abort(self, case: Case, after_s: float) -> None:
        """Ends a request of /generate by its name. The text must be the beginning of the undisturbed one."""
        rid = f"abort-{random.randrange(1 << 60)}"
        record = StreamRecord(case.name)
        task = asyncio.ensure_future(self._exchange(case, False, record, rid=rid))
        await asyncio.sleep(after_s)
        try:
            async with asyncio.timeout(_NEVER_S):
                with contextlib.suppress(HttpError):  # then the request has failed, too
                    await self._http.request("POST", "/abort_request", f'{{"rid": "{rid}"}}'.encode())
                response = await task
            answer, wanted = whole_answer(response.status, response.body), self._answers[case.name, False]
        except Failed as error:
            self._note_failure(f"{case.name}, aborted", error, record)
        except (Incomplete, HttpError, TimeoutError) as error:
            self._tally.wrong.append(f"{case.name}, aborted: {error!r}")
        else:
            self._tally.left += 1
            if not _is_start(answer, wanted):
                self._tally.wrong.append(f"{case.name}, aborted: {answer} is no start of {wanted}")

    async def read_slowly(self, case: Case, for_s: float) -> None:
        """Reads a byte a second, and then goes away."""
        body = case.encoded(streamed=True)
        head = f"POST {case.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        with contextlib.suppress(OSError):
            reader, writer = await self._connect(limit=1)
            writer.write(head.encode() + body)
            until = time.monotonic() + for_s
            while time.monotonic() < until and await reader.read(1):
                await asyncio.sleep(min(1.0, for_s))
            writer.transport.abort()
        self._tally.left += 1

    async def drop_in_body(self, case: Case, rng: random.Random) -> None:
        """Breaks the connection in the middle of a chunk of the request's body."""
        body = case.encoded(streamed=False)
        head = f"{case.method} {case.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = f"{len(body):x}\r\n".encode() + body
        with contextlib.suppress(OSError):
            _, writer = await self._connect()
            writer.write(head.encode() + chunk[: rng.randrange(len(chunk))])
            await writer.drain()
            writer.transport.abort()
        self._tally.left += 1

    async def close(self) -> None:
        await self._http.close()

    def _note_failure(self, name: str, error: Failed, record: StreamRecord) -> None:
        failure = Failure(name, str(error), bool(record.data), record.began, record.end())
        self._tally.failures.append(failure)

    async def _connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection whose bytes the client chooses."""
        url = urlsplit(self._url)
        tls = ssl.create_default_context() if url.scheme == "https" else None
        return await asyncio.open_connection(url.hostname, url.port, ssl=tls, **options)

    async def _exchange(self, case: Case, streamed: bool, record: StreamRecord, **more: Any) -> Response:
        """The response. `record` gets the data of a stream, and its end, whatever that is."""
        try:
            if streamed:
                return await self._http.stream(case.path, case.encoded(True, **more), record.on_data)
            return await self._http.request(case.method, case.path, case.encoded(False, **more) if case.body else b"")
        finally:
            record.end()


def _answer_of(response: Response, data: bytearray) -> Any:
    if data:
        return streamed_answer(bytes(data))
    return whole_answer(response.status, response.body)


def _is_start(answer: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether an aborted answer is the beginning of this one. It may end inside a character."""
    ids = answer["output_ids"]
    return ids == wanted["output_ids"][: len(ids)] and wanted["text"].startswith(answer["text"].rstrip("\ufffd"))


@contextlib.contextmanager
def _named(case: Case, streamed: bool):
    try:
        yield
    except (Failed, Incomplete) as error:
        raise type(error)(f"{case.name}{', streamed' if streamed else ''}: {error}") from None


async def population(
    make_client: Callable[[random.Random], Client],
    cases: Sequence[Case],
    rng: random.Random,
    *,
    size: int,
    go_on: Callable[[], bool],
    bad_manners: float = 0.1,
) -> None:
    """Runs `size` clients, each with its own seed, until `go_on` is false.

    `make_client`: gets random numbers of the client's own.
    `bad_manners`: the share of requests whose client leaves, aborts, reads slowly or breaks the connection.
    """

    async def one(rng: random.Random) -> None:
        client = make_client(random.Random(rng.getrandbits(62)))
        streams = [case for case in cases if case.can_stream]
        whole = [case for case in cases if case.path == "/generate" and "n" not in case.body["sampling_params"]]
        whole = [case for case in whole if isinstance(case.body.get("text"), str)]
        while go_on():
            case = rng.choice(cases).drawn(rng)
            streamed = case.can_stream and rng.random() < 0.7
            if rng.random() >= bad_manners:
                await client.ask(case, streamed)
                continue
            manner = rng.randrange(4)
            if manner == 0:
                await client.leave(case, streamed, rng.uniform(0.0, 0.5))
            elif manner == 1:
                await client.abort(rng.choice(whole).drawn(rng), rng.uniform(0.0, 0.3))
            elif manner == 2:
                await client.read_slowly(rng.choice(streams), rng.choice((0.05, 0.5, 3.0)))
            else:
                await client.drop_in_body(case, rng)
        await client.close()

    seeds = [rng.randrange(1 << 62) for _ in range(size)]
    await asyncio.gather(*(one(random.Random(seed)) for seed in seeds))
