"""The journal of resumable streams: `--resume-file`. It has what another server process needs to continue them.

A stream has a record of its request, and one for each batch of outputs that became events. The tokens, the seed and the
options are all that a sample needs to go on; the batches give the events the same numbers and bytes again.

An event is sent only after its record has been written (`flush`), so no client can have an event that the file lacks.
The records of the streams that are kept are in memory, too. The file is rewritten from them when most of it is
records of other streams.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ..io_struct import TextOut
from ..record_file import RECORDS_START, RecordFile, frame, whole_records
from ..request_options import RequestOptions

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Maximum size of the records of all streams. Beyond it, a stream that grows is no longer recorded."""
WEIGHTS = "weight_version"
"""The setting that an update of the weights changes while the server runs."""
_MIN_REWRITE_BYTES = 16 << 20
"""A smaller file is not rewritten."""
_RETRY_S = 5.0
"""The pause after an attempt to write that has failed."""
_WARN_S = 60.0
"""Time between two warnings that there is no room."""
_HEAD = struct.Struct("<c16sI")
"""Kind of the record, the stream's id, and the number of the batch: 0 for the request."""
_REQUEST, _BATCH, _END = b"r", b"b", b"e"


class SavedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as the engine got it. `options`: of its first sample, with its seed. `ids`: see `pack_ids`."""

    ids: bytes
    options: RequestOptions


class SavedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request of a stream."""

    path: str
    body: bytes
    owner: str
    """Who may continue the stream (`tenants.owner_of`). It is the third field in every version (see `_Owned`)."""
    nonce: bytes
    began_s: float
    """With `nonce`: its RequestNames."""
    settings: dict[str, str]
    """What the answer depends on besides the request (`answer_settings.py`)."""
    prompts: list[SavedPrompt]

    @property
    def weight_version(self) -> str:
        """The name of the weights that computed the outputs."""
        return self.settings[WEIGHTS]


class _Owned(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a SavedRequest of any version."""

    path: str
    body: bytes
    owner: str


class SavedOut(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An output of one sample, and what its Generation said when it became an event."""

    place: int
    out: TextOut
    num_recoveries: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    timings: tuple[float | None, ...] | None = None


class SavedStream(msgspec.Struct, frozen=True):
    """All that the journal has of a stream."""

    request: SavedRequest
    batches: list[list[SavedOut]]


_encode = msgspec.msgpack.Encoder().encode
_decode_owned = msgspec.msgpack.Decoder(_Owned).decode
_decode_request = msgspec.msgpack.Decoder(SavedRequest).decode
_decode_batch = msgspec.msgpack.Decoder(list[SavedOut]).decode


class StreamJournal:
    """The journal of one server. It belongs to an event loop, and never raises OSError after `open`.

    While the file cannot be written, the records are only in memory. A client that then has events which the file lacks
    is refused by the next server.
    """

    def __init__(self, file: RecordFile, records: dict[str, list[bytes]], *, is_shared: bool = False) -> None:
        """`is_shared`: several API keys share the room. The records of one have at most as many bytes as are left free
        then, so no key can take all of the room, and one key alone can take half of it."""
        self.num_bytes = sum(len(framed) for one in records.values() for framed in one)
        self._file = file
        self._records = records
        """The framed records of each stream, by its id."""
        self._is_shared = is_shared
        self._owners: dict[str, str] = {}
        """Of each stream, if the room is shared."""
        self._owner_bytes: Counter[str] = Counter()
        for stream_id in records if is_shared else ():
            self._note_owner(stream_id)
        self._no_warning_until = 0.0
        self._unwritten = bytearray()
        self._rewrite: asyncio.Task[None] | None = None
        self._since = bytearray()
        """What has been recorded since the rewrite began."""
        self._retry_at: float | None = None
        """When the next attempt to write follows; None: the last one has succeeded."""
        self._is_closed = False

    @classmethod
    def open(cls, path: Path, *, is_shared: bool = False) -> StreamJournal:
        """The journal with the streams of the server before. Raises ValueError or OSError: see `RecordFile.open`."""
        file, data = RecordFile.open(path)
        try:
            records, num_lost = _read(data, file.mark)
            if num_lost:
                logger.warning("%s: %d places were damaged; streams continue only up to the damage", path, num_lost)
            file.adopt(file.write_new(_joined(records.values())), b"")
        except BaseException:
            file.close()
            raise
        return cls(file, records, is_shared=is_shared)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._records

    def ids(self) -> list[str]:
        return list(self._records)

    def request(self, stream_id: str) -> SavedRequest:
        """The request of a stream. Raises KeyError, and msgspec.DecodeError for a record of another version."""
        return _decode_request(self._payload(self._records[stream_id][0]))

    def owner(self, stream_id: str) -> str | None:
        """Who may continue the stream, also if another version has recorded it. None: nobody, or it is not known."""
        records = self._records.get(stream_id)
        if not records:
            return None
        try:
            return _decode_owned(self._payload(records[0])).owner
        except msgspec.DecodeError:
            return None

    def load(self, stream_id: str) -> SavedStream:
        """What is recorded of a stream. Raises as `request` does.

        A long stream takes tenths of a second. A thread may do this if no record of the stream is added or removed
        meanwhile.
        """
        batches = [_decode_batch(self._payload(framed)) for framed in self._records[stream_id][1:]]
        return SavedStream(self.request(stream_id), batches)

    def _payload(self, framed: bytes) -> bytes | memoryview:
        (found,) = whole_records(framed, self._file.mark)
        assert not isinstance(found, int)
        return found.payload[_HEAD.size :]

    def begin(self, stream_id: str, request: SavedRequest) -> bool:
        """Records a new stream. Returns whether there was room."""
        assert stream_id not in self._records
        self._records[stream_id] = []
        if self._is_shared:
            self._owners[stream_id] = request.owner
        return self._add(_REQUEST, stream_id, 0, request)

    def note(self, stream_id: str, number: int, outs: Sequence[SavedOut]) -> bool:
        """Records a batch of outputs. The first one has the number 1. Returns whether the stream is still recorded."""
        return stream_id in self._records and self._add(_BATCH, stream_id, number, outs)

    def forget(self, stream_id: str) -> None:
        """Nobody will continue the stream. It need not be known."""
        records = self._records.pop(stream_id, None)
        if records is not None:
            self._count(stream_id, -sum(map(len, records)))
            self._owners.pop(stream_id, None)
            self._unwritten += frame(self._file.mark, _HEAD.pack(_END, bytes.fromhex(stream_id), 0))

    def flush(self) -> None:
        """Writes what has been recorded. Call it before a client gets the events."""
        if self._unwritten and not self._is_closed:
            self._write()

    def close(self) -> None:
        """Leaves the file to the next server. If it lacks records, the last attempt to write them is made now."""
        self.flush()
        self._is_closed = True
        if self._rewrite is not None:
            self._rewrite.cancel()
        if self._retry_at is not None:
            try:
                self._file.adopt(self._file.write_new(_joined(self._records.values())), b"")
            except OSError as error:
                logger.error("%s lacks the last records: %s", self._file.path, error.strerror or error)
        self._file.close()

    def _add(self, kind: bytes, stream_id: str, number: int, value: object) -> bool:
        data = frame(self._file.mark, _HEAD.pack(kind, bytes.fromhex(stream_id), number) + _encode(value))
        if not self._has_room(stream_id, len(data)):
            self._warn_of_no_room(stream_id)
            self.forget(stream_id)
            return False
        self._count(stream_id, len(data))
        self._records[stream_id].append(data)
        self._unwritten += data
        return True

    def _has_room(self, stream_id: str, num_bytes: int) -> bool:
        num_left = MAX_BYTES - self.num_bytes - num_bytes
        owner = self._owners.get(stream_id)
        return num_left >= (0 if owner is None else self._owner_bytes[owner] + num_bytes)

    def _count(self, stream_id: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        owner = self._owners.get(stream_id)
        if owner is not None:
            self._owner_bytes[owner] += num_bytes
            if not self._owner_bytes[owner]:
                del self._owner_bytes[owner]

    def _note_owner(self, stream_id: str) -> None:
        owner = self._owners[stream_id] = self.owner(stream_id) or ""
        self._owner_bytes[owner] += sum(map(len, self._records[stream_id]))

    def _warn_of_no_room(self, stream_id: str) -> None:
        now = time.monotonic()
        if now >= self._no_warning_until:
            self._no_warning_until = now + _WARN_S
            logger.warning(
                "%s: no room for the stream %s, which will end with this server; no further such warning for %g s",
                self._file.path,
                stream_id,
                _WARN_S,
            )

    def _write(self) -> None:
        if self._rewrite is not None:
            self._since += self._unwritten
        if self._retry_at is None:
            try:
                self._file.append(self._unwritten)
            except OSError as error:
                self._fail(error)
            else:
                if self._rewrite is None and self._file.size > max(_MIN_REWRITE_BYTES, 2 * self.num_bytes):
                    self._begin_rewrite()
        elif self._rewrite is None and time.monotonic() >= self._retry_at:
            self._begin_rewrite()
        self._unwritten.clear()

    def _begin_rewrite(self) -> None:
        self._since.clear()
        self._rewrite = asyncio.create_task(self._write_anew([[*one] for one in self._records.values()]))

    async def _write_anew(self, records: list[list[bytes]]) -> None:
        try:
            file = await asyncio.to_thread(lambda: self._file.write_new(_joined(records)))
            self._file.adopt(file, self._since + self._unwritten)
        except OSError as error:
            self._fail(error)
        else:
            self._unwritten.clear()
            if self._retry_at is not None:
                logger.info("%s is written again", self._file.path)
            self._retry_at = None
        finally:
            self._rewrite = None

    def _fail(self, error: OSError) -> None:
        if self._retry_at is None:
            reason = error.strerror or error
            logger.error("%s cannot be written, so streams may end with this server: %s", self._file.path, reason)
        self._retry_at = time.monotonic() + _RETRY_S


def _joined(records: Iterable[list[bytes]]) -> list[bytes]:
    """The records of each stream in one piece, which takes one call of the system."""
    return [b"".join(one) for one in records]


def _read(data: bytes, mark: bytes) -> tuple[dict[str, list[bytes]], int]:
    """The records of each stream that has not ended, as far as they are whole, and the number of damaged places."""
    records: dict[str, list[bytes]] = {}
    next_number: dict[str, int] = {}
    num_lost = 0
    for found in whole_records(data, mark, RECORDS_START):
        if isinstance(found, int):
            num_lost += 1
            continue
        kind, name, number = _HEAD.unpack_from(found.payload)
        stream_id = name.hex()
        if kind == _END:
            records.pop(stream_id, None)
        elif kind == _REQUEST:
            records[stream_id], next_number[stream_id] = [bytes(found.framed)], 1
        elif stream_id in records and number == next_number[stream_id]:
            records[stream_id].append(bytes(found.framed))
            next_number[stream_id] += 1
    return records, num_lost
