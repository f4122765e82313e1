"""Streams that a client can continue after its connection broke: `--resume-grace`.

Each event of such a stream has an id, `STREAM/NUMBER`. When the connection breaks, the request goes on for the grace
time. `GET /v1/streams` with the header `Last-Event-ID` continues the stream after that event.

A task reads the events of a request and keeps the last ones. While a client reads them, the task waits until it has
them all, so a slow client gets fewer and larger events, as without this feature. While no client reads them, the task
stops at MAX_STREAM_BYTES. Then the request's outputs are merged, and take no more memory than its answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from itertools import islice

from starlette.types import Receive

from ..errors import InvalidRequest, StreamGone, StreamNotFound
from .replay import Interrupted, Replay
from .stream_journal import StreamJournal
from .wire import shown

STREAM_HEADER = b"x-stream-id"
MAX_STREAM_BYTES = 1 << 20
"""Maximum size of the kept events of one stream, and at least its last output."""
MAX_HELD_BYTES = 256 << 20
"""Maximum size of the kept events of all streams. Beyond it, ended streams are dropped, and the others keep less."""
MAX_DETACHED = 1024
"""Maximum number of streams without a client. Of more, the oldest ended one goes, or else the oldest one."""


def new_stream_id() -> str:
    """A random name, which nobody can guess."""
    return secrets.token_hex(16)


class ResumableStream:
    """The events of one request. Its request outlives the connections of its client."""

    def __init__(
        self,
        streams: ResumableStreams,
        stream_id: str,
        owner: str,
        first: bytes,
        source: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
        replay: Replay | None = None,
    ) -> None:
        """`owner`: only its API key may continue it. `first`: its first events. `source`: yields whole events, and
        raises only Interrupted. `replay`: it is a stream of another server, whose events the source repeats."""
        self.id = stream_id
        self.owner = owner
        self.is_done = False
        """It has its last event, or has been ended."""
        self.is_interrupted = False
        """Its engine has ended before, and another server will continue it."""
        self._replay = replay
        self._streams = streams
        self._source = source
        self._on_end = on_end
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._last = 0
        """Number of the newest event. The first one is 1."""
        self._num_sent = 0
        """All events up to this number have been written to a connection. The client may still lack them."""
        self._reader: Reader | None = None
        self._changed = asyncio.Event()
        self._has_begun = False
        """The task has begun. A task that is cancelled before never runs, not even to clean up."""
        self._keep(first)
        self._pump = asyncio.create_task(self._run())

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def check_event(self, after: int) -> None:
        """Raises StreamGone if the events after this number are no longer kept, and InvalidRequest if there is no such
        event."""
        if after > self._last and self._replay is not None:
            raise StreamGone(f"the events after {self._last} are lost")
        if after > self._last:
            raise InvalidRequest(
                f"the stream has no event {after}; its last one is {self._last}", param="Last-Event-ID"
            )
        if after < self._last - len(self._events):
            raise StreamGone("the events after this one are no longer kept")

    def attach(self, after: int) -> Reader:
        """A reader of the events after this number. An earlier reader ends. Raises as `check_event`."""
        self.check_event(after)
        earlier, self._reader = self._reader, Reader(self, after)
        if earlier is not None:
            earlier.leave()
        self._streams.on_attached(self)
        if self._replay is not None:
            self._replay.is_wanted.set()
        self.notify()
        return self._reader

    def detach(self, reader: Reader) -> None:
        """This reader is gone. Has no effect if it is not the newest one."""
        if self._reader is reader:
            self._reader = None
            self._streams.on_detached(self)
            self.notify()

    def end(self) -> None:
        """Ends the request, and forgets the events."""
        self._pump.cancel()
        if not self._has_begun:
            self._on_end()
        self._streams.num_held_bytes -= self._num_bytes
        self._events.clear()
        self._num_bytes = 0

    def events_after(self, number: int) -> bytes:
        num_new = self._last - number
        return b"".join(islice(self._events, len(self._events) - num_new, None)) if num_new else b""

    @property
    def last(self) -> int:
        return self._last

    def on_sent(self, number: int) -> None:
        """All events up to this number have been written to the client's connection."""
        self._num_sent = max(self._num_sent, number)
        self.notify()

    def flush(self) -> None:
        """Writes what the journal has of the new events. Call it before they are sent."""
        self._streams.flush()

    def notify(self) -> None:
        self._changed.set()

    async def change(self) -> None:
        """Waits until something happens after this call."""
        self._changed.clear()
        await self._changed.wait()

    async def _run(self) -> None:
        self._has_begun = True
        try:
            async for data in self._source:
                self._keep(data)
                self.notify()
                while self._is_full:
                    await self.change()
        except Interrupted:
            self.is_interrupted = True
        finally:
            self.is_done = True
            self._on_end()
            self.notify()
            await self._source.aclose()

    async def until(self, event: asyncio.Event) -> None:
        """Waits until the event is set or the stream has ended."""
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait([waiting, self._pump], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    @property
    def _is_full(self) -> bool:
        if self._is_replaying:
            return False
        if self._reader is not None:
            return self._reader.position < self._last
        is_too_much = self._num_bytes > MAX_STREAM_BYTES or self._streams.num_held_bytes > MAX_HELD_BYTES
        return is_too_much and self._num_sent < self._last

    @property
    def _is_replaying(self) -> bool:
        return self._replay is not None and not self._replay.is_replayed.is_set()

    def _keep(self, data: bytes) -> None:
        for event in data.split(b"\n\n")[:-1]:  # the JSON of an event has no line breaks
            self._last += 1
            named = b"id: %s/%d\n%s\n\n" % (self.id.encode(), self._last, event)
            self._events.append(named)
            self._num_bytes += len(named)
            self._streams.num_held_bytes += len(named)
        self._streams.drop_ended()
        if self._is_replaying:
            self._num_sent = self._last  # the other server may have sent them all
        num_read = self._num_sent if self._reader is None else self._reader.position
        while (self._num_bytes > MAX_STREAM_BYTES or self._streams.num_held_bytes > MAX_HELD_BYTES) and (
            self._last - len(self._events) < num_read
        ):
            num_bytes = len(self._events.popleft())
            self._num_bytes -= num_bytes
            self._streams.num_held_bytes -= num_bytes


class Reader:
    """One connection that reads a stream."""

    def __init__(self, stream: ResumableStream, position: int) -> None:
        self.position = position
        """All events up to this number have been written."""
        self._stream = stream
        self._is_gone = False
        self._watch: asyncio.Task[None] | None = None

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The events, until the last one, or until the connection is gone. Raises Interrupted."""
        stream = self._stream
        while not self._is_gone:
            last = stream.last
            data = stream.events_after(self.position)
            if data:
                stream.flush()
                yield data
                self.position = max(self.position, last)
                stream.on_sent(last)
            elif stream.is_interrupted:
                raise Interrupted
            elif stream.is_done:
                return
            else:
                await stream.change()

    def watch(self, receive: Receive) -> None:
        """Leaves when the client of this connection disconnects."""
        self._watch = asyncio.create_task(self._leave_after(receive))

    async def _leave_after(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        """Ends `parts`. The stream waits for another reader."""
        self._is_gone = True
        self._stream.detach(self)
        self._stream.notify()

    def close(self) -> None:
        """Called at the end of the connection."""
        if self._watch is not None:
            self._watch.cancel()
        self.leave()


class ResumableStreams:
    """The streams that have a client, or may get one within the grace time."""

    def __init__(self, grace_s: float, journal: StreamJournal | None = None) -> None:
        """`journal`: of `--resume-file`; None without it."""
        self.num_held_bytes = 0
        self.is_draining = False
        """The server is shutting down: the next one continues the streams that have no client."""
        self._journal = journal
        self._grace_s = grace_s
        self._streams: dict[str, ResumableStream] = {}
        self._detached: OrderedDict[ResumableStream, asyncio.TimerHandle] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    def __getitem__(self, stream_id: str) -> ResumableStream:
        return self._streams[stream_id]

    def open(
        self,
        stream_id: str,
        owner: str,
        first: bytes,
        source: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
    ) -> ResumableStream:
        """Begins to read the events of a request. Attach a reader at once. `on_end` is called once, at the end."""
        stream = self._streams[stream_id] = ResumableStream(self, stream_id, owner, first, source, on_end)
        return stream

    def restore(
        self, replay: Replay, owner: str, source: AsyncGenerator[bytes, None], on_end: Callable[[], None]
    ) -> ResumableStream:
        """Begins to repeat the events of a stream of another server."""
        stream = ResumableStream(self, replay.stream_id, owner, b"", source, on_end, replay)
        self._streams[stream.id] = stream
        self.on_detached(stream)
        return stream

    def drain(self) -> None:
        """The server will end. Ends the requests without a client, whose streams are continued by the next server."""
        if self._journal is not None:
            self.is_draining = True
            for stream in list(self._detached):
                self._leave(stream)

    def flush(self) -> None:
        if self._journal is not None:
            self._journal.flush()

    def find(self, last_event_id: str, owner: str) -> tuple[ResumableStream, int]:
        """The stream, and the number of the event. Raises InvalidRequest, StreamNotFound."""
        stream_id, _, number = last_event_id.partition("/")
        if not (number.isascii() and number.isdecimal() and len(number) < 19):
            raise InvalidRequest(
                f"the header must be the id of an event, or STREAM/0; got {shown(last_event_id)}", param="Last-Event-ID"
            )
        stream = self._streams.get(stream_id)
        if stream is None or stream.owner != owner:
            raise StreamNotFound("there is no such stream, or it was not continued in time")
        return stream, int(number)

    def on_attached(self, stream: ResumableStream) -> None:
        timer = self._detached.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def on_detached(self, stream: ResumableStream) -> None:
        if self.is_draining:
            self._leave(stream)
            return
        loop = asyncio.get_running_loop()
        self._detached[stream] = loop.call_later(self._grace_s, self._end, stream)
        if len(self._detached) > MAX_DETACHED:
            self._end(self._first_ended() or next(iter(self._detached)))

    def drop_ended(self) -> None:
        """Drops ended streams without a client while the streams hold too much."""
        while self.num_held_bytes > MAX_HELD_BYTES:
            ended = self._first_ended()
            if ended is None:
                return
            self._end(ended)

    def _first_ended(self) -> ResumableStream | None:
        return next((stream for stream in self._detached if stream.is_done), None)

    def _end(self, stream: ResumableStream) -> None:
        self._leave(stream)
        if self._journal is not None and not stream.is_interrupted:
            self._journal.forget(stream.id)

    def _leave(self, stream: ResumableStream) -> None:
        """Ends the stream here. The journal still has it."""
        timer = self._detached.pop(stream, None)
        if timer is not None:
            timer.cancel()
        del self._streams[stream.id]
        stream.end()
