"""Publishes KV events over ZeroMQ, and replays those that a reader has missed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from ..mem_cache.block_events import BlockEvents
from ..srt.adapters import AdapterFacts
from ..srt.kv_events import AllBlocksCleared, BlockStored, EventBatch, KVEvent, KVEventsConfig
from .kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)

_LINGER_MS = 200
_SEQ_BYTES = 8
_REPEAT_S = 60.0
"""How long after its start a publisher repeats everything for a new reader. ZeroMQ connects again after 0.1 s."""
_REPEAT_INTERVAL_S = 1.0
"""Repetitions come no faster, however many readers subscribe. Each takes a step some milliseconds."""
_MAX_REPEATED = 1 << 18
"""Tokens and hashes in the events that are repeated. If there are more, nothing is repeated any more."""
_END = (-1).to_bytes(_SEQ_BYTES, "big", signed=True)


class KVEventPublisher:
    """The publishing socket, and a thread that answers requests for a replay.

    The socket never blocks: a reader that is too slow misses messages, which it sees by their sequence numbers. With a
    replay endpoint, the last `buffer_steps` batches are kept. A replay has those from a given number on.

    A reader may know the blocks of an engine that died, and its socket connects again when the new engine has already
    published. So in the first minute, a subscription makes a batch repeat all events since the start, if these are few.
    The first one is AllBlocksCleared, so a reader may apply that batch at any time. A replay has only the new events of
    such a batch, so the buffer has each event once.
    """

    def __init__(self, config: KVEventsConfig, clock: Callable[[], float] = time.time) -> None:
        """Raises ValueError if an address cannot be used. `clock`: Unix time in seconds."""
        self._topic = config.topic.encode()
        self._clock = clock
        self._watched: tuple[KVCacheManager, BlockEvents] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._next_seq = 0
        self._since_start: list[KVEvent] | None = []
        """All events; None after the first minute, or if they are too many."""
        self._num_since_start = 0
        """Tokens and hashes in them."""
        self._start_s = clock()
        self._repeat_s = self._start_s
        """When the next repetition may come."""
        self._is_wanted = False
        """A reader has subscribed since the last one."""
        num_kept = 0 if config.replay_endpoint is None else config.buffer_steps
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._replayer: threading.Thread | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)  # a PUB socket whose subscriptions can be read
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # all of them, not only the first one to each topic
        self._socket.setsockopt(zmq.SNDHWM, config.hwm)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            _open(self._socket, config.endpoint, always_bind=False)
            if config.replay_endpoint is not None:
                replay = self._context.socket(zmq.ROUTER)
                replay.setsockopt(zmq.SNDHWM, max(config.hwm, 2 * config.buffer_steps))  # room for a whole replay
                replay.setsockopt(zmq.LINGER, 0)
                _open(replay, config.replay_endpoint, always_bind=True)
                self._replayer = threading.Thread(target=self._answer, args=(replay,), name="kv replay", daemon=True)
                self._replayer.start()
        except ValueError:
            self._context.destroy(linger=0)
            raise

    def watch(
        self, kv: KVCacheManager, adapter_with: Callable[[str], AdapterFacts | None] = lambda fingerprint: None
    ) -> None:
        """Collects the events of all tiers, and publishes AllBlocksCleared. `adapter_with`: see BlockEvents."""
        if kv.page_size == 1:
            logger.warning("KV events of blocks of 1 token are of little use to routers; set --page-size")
        events = BlockEvents(kv.page_size, adapter_with)
        kv.watch(events)
        self._watched = kv, events
        self.flush()

    def flush(self) -> None:
        """Publishes the events since the last call, if any. Never blocks."""
        events: list[KVEvent] = []
        if self._watched is not None:
            kv, blocks = self._watched
            kv.report_files()
            events = blocks.take()
        now_s = self._clock()
        repeated = None
        if self._since_start is not None:
            repeated = self._repetition(events, self._since_start, now_s)
        elif events:
            self._has_new_reader()  # frees the memory of what readers have sent
        if not events and repeated is None:
            return
        payload = self._encoder.encode(EventBatch(now_s, events))
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._buffer.append((seq, payload))
        if repeated is not None:
            payload = self._encoder.encode(EventBatch(now_s, repeated))
        self._socket.send_multipart(self._frames(seq, payload), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()  # ends the thread, too
        if self._replayer is not None:
            self._replayer.join()

    def _repetition(self, events: list[KVEvent], since_start: list[KVEvent], now_s: float) -> list[KVEvent] | None:
        """All events since the start, if a reader has subscribed. `events`: the new ones."""
        since_start += events
        self._num_since_start += sum(map(_size, events))
        if now_s - self._start_s > _REPEAT_S or self._num_since_start > _MAX_REPEATED:
            self._since_start = None
            return None
        self._is_wanted |= self._has_new_reader()
        if not self._is_wanted or now_s < self._repeat_s:
            return None
        self._is_wanted, self._repeat_s = False, now_s + _REPEAT_INTERVAL_S
        return since_start

    def _has_new_reader(self) -> bool:
        """Whether a reader has subscribed since the last call."""
        found = False
        while self._socket.poll(0):
            found |= self._socket.recv(zmq.NOBLOCK).startswith(b"\x01")  # 0: one that leaves
        return found

    def _frames(self, seq: int, payload: bytes) -> Sequence[bytes]:
        return [self._topic, seq.to_bytes(_SEQ_BYTES, "big"), payload]

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """The thread: answers until the context is terminated. Ignores requests that are not valid."""
        while True:
            try:
                frames = replay.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != _SEQ_BYTES:
                    continue
                reader, start = frames[0], int.from_bytes(frames[2], "big")
                for seq, payload in list(self._buffer):  # a copy: the scheduler goes on
                    if seq >= start:
                        replay.send_multipart([reader, b"", *self._frames(seq, payload)])
                replay.send_multipart([reader, b"", b"", _END, b""])
            except zmq.ContextTerminated:
                replay.close()
                return


def _size(event: KVEvent) -> int:
    """Tokens and hashes."""
    if isinstance(event, AllBlocksCleared):
        return 1
    return len(event.block_hashes) + (len(event.token_ids) if isinstance(event, BlockStored) else 0)


def _open(socket: zmq.Socket[bytes], endpoint: str, *, always_bind: bool) -> None:
    """Binds to an address with a wildcard or a path; connects to any other, as vLLM and SGLang do."""
    wildcards = ("*", "::", "0.0.0.0")
    binds = always_bind or endpoint.startswith("ipc://") or any(one in endpoint for one in wildcards)
    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"--kv-events-config: {endpoint} cannot be used: {error.strerror}") from None
