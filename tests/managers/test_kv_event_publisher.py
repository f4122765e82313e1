"""KV events over real sockets: a reader that misses messages fills the gap by a replay."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from kv_event_reader import KVEventReader
from radix_makers import make, put

from tercet.managers import kv_event_publisher
from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.kv_event_publisher import KVEventPublisher
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.req_to_token_pool import ReqToTokenPool
from tercet.srt.kv_events import BlockStored, KVEventsConfig

END = b"\xff" * 8
WAIT_MS = 20_000


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/tmp"))  # the names of sockets must be short
    yield path
    shutil.rmtree(path)


@pytest.fixture
def sockets() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    context: zmq.Context[Any] = zmq.Context()

    def socket(kind: int, endpoint: str = "") -> zmq.Socket[bytes]:
        made = context.socket(kind)
        made.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        made.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            made.setsockopt(zmq.SUBSCRIBE, b"")
        if endpoint:
            made.connect(endpoint)
        return made

    yield socket
    context.destroy(linger=0)


class Server:
    """A cache whose events are published."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        config = {"publisher": "zmq", "endpoint": self.endpoint, "replay_endpoint": self.replay, **settings}
        self.now_s = 7.5
        self.publisher = KVEventPublisher(msgspec.convert(config, KVEventsConfig), clock=lambda: self.now_s)
        self.cache, self.allocator = make(2, 1 << 14)
        self.publisher.watch(KVCacheManager(ReqToTokenPool(1, 8), self.allocator, self.cache))
        self._num_stored = 0

    def store(self, num: int) -> None:
        """Publishes this number of batches."""
        for _ in range(num):
            self._num_stored += 1
            put(self.cache, self.allocator, [self._num_stored, self._num_stored + 1] * 2)
            self.publisher.flush()

    @property
    def num_batches(self) -> int:
        return self._num_stored + 1


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.publisher.close()


def replay(socket: zmq.Socket[bytes], start: int) -> list[list[bytes]]:
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    messages = []
    while True:
        empty, *frames = socket.recv_multipart()
        assert empty == b""
        if frames[1] == END:
            assert frames == [b"", END, b""]
            return messages
        messages.append(frames)


def connected(server: Server, socket: zmq.Socket[bytes]) -> list[bytes]:
    """The first message that a new subscriber gets."""
    while not socket.poll(20):
        server.store(1)
    return socket.recv_multipart()


def num_cached(cache: RadixCache) -> int:
    return cache.evictable_size // cache.page_size


def test_a_replay_fills_the_gap_of_a_late_reader(server: Server, sockets: Callable[..., zmq.Socket[bytes]]) -> None:
    server.store(5)
    live = sockets(zmq.SUB, server.endpoint)
    reader = KVEventReader()
    reader.on_message(connected(server, live))
    assert reader.missed[0] == 0 and len(reader.missed) >= 6
    for frames in replay(sockets(zmq.DEALER, server.replay), reader.missed[0]):
        reader.on_message(frames)
    server.store(3)
    while reader.next_seq < server.num_batches:
        reader.on_message(live.recv_multipart())
    assert len(reader.prefixes) == num_cached(server.cache) == 2 * (server.num_batches - 1)
    server.cache.evict(10)
    server.publisher.flush()
    reader.on_message(live.recv_multipart())
    assert len(reader.prefixes) == num_cached(server.cache)


@pytest.mark.parametrize("num_before", [0, 4])
def test_a_reader_that_outlives_the_engine_forgets_its_blocks(
    folder: Path, sockets: Callable[..., zmq.Socket[bytes]], num_before: int
) -> None:
    """Its socket connects again some time after the new engine has begun to publish (`num_before` batches)."""
    dead = Server(folder)
    live = sockets(zmq.SUB, dead.endpoint)
    reader = KVEventReader()
    connected(dead, live)
    for frames in replay(sockets(zmq.DEALER, dead.replay), 0):
        reader.apply(frames[2])
    assert len(reader.prefixes) == num_cached(dead.cache) > 0
    dead.publisher.close()
    while live.poll(0):
        live.recv_multipart()
    server = Server(folder)
    server.store(num_before)
    while not live.poll(20):
        server.publisher.flush()  # as each turn of the scheduler does, also without events
    while live.poll(20):
        reader.apply(live.recv_multipart()[2])
    assert len(reader.prefixes) == num_cached(server.cache) == 2 * num_before
    server.store(1)
    reader.apply(live.recv_multipart()[2])
    assert len(reader.prefixes) == num_cached(server.cache)
    server.publisher.close()


def test_a_reader_that_comes_late_gets_only_what_is_new(
    folder: Path, sockets: Callable[..., zmq.Socket[bytes]]
) -> None:
    server = Server(folder)
    server.store(2)
    server.now_s += 3600.0
    server.store(1)
    live = sockets(zmq.SUB, server.endpoint)
    (event, *more) = msgspec.msgpack.decode(connected(server, live)[2])[1]
    assert event["type"] == "BlockStored" and not more
    server.publisher.close()


def test_every_new_reader_gets_a_repetition_and_not_only_the_first(
    folder: Path, sockets: Callable[..., zmq.Socket[bytes]]
) -> None:
    server = Server(folder)
    server.store(2)
    for _ in range(2):
        server.now_s += 1.0
        live = sockets(zmq.SUB, server.endpoint)
        reader = KVEventReader()
        frames = connected(server, live)
        reader.apply(frames[2])
        server.store(1)
        while int.from_bytes(frames[1], "big") + 1 < server.publisher._next_seq:
            frames = live.recv_multipart()
            reader.apply(frames[2])
        assert len(reader.prefixes) == num_cached(server.cache)
    server.publisher.close()


JOINS, LEAVES = b"\x01", b"\x00"


class Wire:
    """In place of the publishing socket: keeps the batches. `told`: what readers have sent."""

    def __init__(self, publisher: KVEventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.told: list[bytes] = []
        monkeypatch.setattr(publisher, "_socket", self)

    def poll(self, timeout: int) -> int:
        assert timeout == 0
        return len(self.told)

    def recv(self, flags: int) -> bytes:
        assert flags == zmq.NOBLOCK
        return self.told.pop(0)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        self.batches.append(msgspec.msgpack.decode(frames[2])[1])

    @property
    def num_repetitions(self) -> int:
        return sum(batch[0]["type"] == "AllBlocksCleared" for batch in self.batches)


def test_readers_that_subscribe_all_the_time_get_one_repetition_a_second(
    folder: Path, sockets: Callable[..., zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(folder)
    with monkeypatch.context() as patch:
        wire = Wire(server.publisher, patch)
        for turn in range(100):
            server.now_s += 0.05
            wire.told.append(JOINS)
            server.store(1) if turn % 2 else server.publisher.flush()
        assert wire.num_repetitions == 5 and len(wire.batches[-1]) < 4
    messages = replay(sockets(zmq.DEALER, server.replay), 0)
    assert [int.from_bytes(seq, "big") for _, seq, _ in messages] == list(range(len(wire.batches) + 1))
    assert sum(len(msgspec.msgpack.decode(payload)[1]) for *_, payload in messages) == 51, "each event once"
    reader = KVEventReader()
    for frames in messages:
        reader.on_message(frames)
    assert len(reader.prefixes) == num_cached(server.cache)
    server.publisher.close()


def test_each_reader_that_joins_waits_at_most_a_second_for_its_repetition(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(folder)
    with monkeypatch.context() as patch:
        wire = Wire(server.publisher, patch)
        for after_s, told, num_repetitions in (
            (0.0, [JOINS], 1),
            (0.5, [JOINS], 1),  # too early
            (0.25, [], 1),
            (0.5, [], 2),
            (2.0, [], 2),
            (2.0, [LEAVES], 2),
            (2.0, [JOINS, LEAVES], 3),
            (2.0, [LEAVES, JOINS], 4),
        ):
            server.now_s += after_s
            wire.told += told
            server.publisher.flush()
            assert (wire.num_repetitions, wire.told) == (num_repetitions, [])
        server.now_s += 3600.0
        server.store(1)
        wire.told += [JOINS, LEAVES]
        server.store(1)
        assert wire.told == [], "it would take memory"
        assert wire.num_repetitions == 4
    server.publisher.close()


def test_what_is_kept_for_repetitions_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_publisher, "_MAX_REPEATED", 100)
    server = Server(folder)
    with monkeypatch.context() as patch:
        wire = Wire(server.publisher, patch)
        for _ in range(50):
            server.now_s += 1.0  # less than a minute altogether
            wire.told.append(JOINS)
            server.store(1)
            assert sum(len(event.get("token_ids", ())) for event in wire.batches[-1]) <= 100
    assert 5 < wire.num_repetitions < 20 and server.publisher._since_start is None
    server.publisher.close()


def test_what_a_slow_reader_misses_is_bounded_and_told(folder: Path, sockets: Callable[..., zmq.Socket[bytes]]) -> None:
    server = Server(folder, hwm=1, buffer_steps=50)
    live = sockets(zmq.SUB)
    live.setsockopt(zmq.RCVHWM, 1)
    live.connect(server.endpoint)
    connected(server, live)
    num_before = server.num_batches
    assert server.publisher._watched is not None
    for number in range(300):
        block = BlockStored([number], None, [1 << 20] * 20_000, 20_000)  # 100 kB
        server.publisher._watched[1].add(block)
        server.publisher.flush()  # nobody reads: a call that waits for the reader would never return
    received = []
    while live.poll(100):
        received.append(int.from_bytes(live.recv_multipart()[1], "big"))
    assert len(received) < 60, "no more waits in memory"
    end = num_before + 300
    lost = set(range(num_before, end)).difference(received)
    asked = min(lost)
    replayed = [int.from_bytes(seq, "big") for _, seq, _ in replay(sockets(zmq.DEALER, server.replay), asked)]
    assert asked < replayed[0] and replayed == list(range(end - 50, end)), "from there on it is complete"
    server.publisher.close()


def test_a_reader_that_takes_no_replay_delays_nobody(folder: Path, sockets: Callable[..., zmq.Socket[bytes]]) -> None:
    server = Server(folder, hwm=1, buffer_steps=50)
    stuck = sockets(zmq.DEALER)
    stuck.setsockopt(zmq.RCVHWM, 1)
    stuck.connect(server.replay)
    for _ in range(200):
        stuck.send_multipart([b"", (0).to_bytes(8, "big")])
    server.store(100)
    assert len(replay(sockets(zmq.DEALER, server.replay), 0)) == 50
    server.publisher.close()


def test_a_slow_reader_loses_messages_and_the_scheduler_loses_no_time(
    folder: Path, sockets: Callable[..., zmq.Socket[bytes]]
) -> None:
    server = Server(folder, hwm=1)
    live = sockets(zmq.SUB)
    live.setsockopt(zmq.RCVHWM, 1)
    live.connect(server.endpoint)
    reader = KVEventReader()
    first = connected(server, live)
    server.store(2000)  # nobody reads: a call that waits for the reader would never return
    reader.on_message(first)
    for frames in replay(sockets(zmq.DEALER, server.replay), 0):
        reader.on_message(frames)
    server.publisher.close()
    assert reader.next_seq == server.num_batches and len(reader.prefixes) == num_cached(server.cache)


def test_a_replay_with_room_is_complete(folder: Path, sockets: Callable[..., zmq.Socket[bytes]]) -> None:
    server = Server(folder, topic="kv@me")
    server.store(3000)
    messages = replay(sockets(zmq.DEALER, server.replay), 1000)
    assert [int.from_bytes(seq, "big") for _, seq, _ in messages] == list(range(1000, 3001))
    assert {topic for topic, _, _ in messages} == {b"kv@me"}
    server.publisher.close()


def test_the_buffer_is_bounded(folder: Path, sockets: Callable[..., zmq.Socket[bytes]]) -> None:
    server = Server(folder, buffer_steps=3)
    server.store(10)
    messages = replay(sockets(zmq.DEALER, server.replay), 0)
    assert [int.from_bytes(seq, "big") for _, seq, _ in messages] == [8, 9, 10]
    server.publisher.close()


def test_nonsense_on_the_replay_socket_is_ignored(server: Server, sockets: Callable[..., zmq.Socket[bytes]]) -> None:
    socket = sockets(zmq.DEALER, server.replay)
    for frames in ([b""], [b"", b"x"], [b"", b"1", b"2", b"3"], [b"\x00" * 8]):
        socket.send_multipart(frames)
    assert len(replay(socket, 0)) == 1
    assert replay(socket, 5) == [] == replay(socket, 2**64 - 1)


def test_a_publisher_connects_to_a_reader_that_listens(sockets: Callable[..., zmq.Socket[bytes]]) -> None:
    listening = sockets(zmq.SUB)
    port = listening.bind_to_random_port("tcp://127.0.0.1")
    publisher = KVEventPublisher(KVEventsConfig(publisher="zmq", endpoint=f"tcp://127.0.0.1:{port}"))
    cache, allocator = make(2)
    publisher.watch(KVCacheManager(ReqToTokenPool(1, 8), allocator, cache))
    number = 0
    while not listening.poll(20):
        number += 1
        put(cache, allocator, [number] * 2)
        publisher.flush()
    assert msgspec.msgpack.decode(listening.recv_multipart()[2])[1] and not publisher._buffer  # nobody asks for replays
    publisher.close()


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "ipc:///tmp/events"])
def test_a_publisher_listens_on_a_wildcard_or_a_path(endpoint: str) -> None:
    bound: list[str] = []
    socket: Any = SimpleNamespace(bind=bound.append)
    kv_event_publisher._open(socket, endpoint, always_bind=False)
    assert bound == [endpoint]


def test_the_replay_address_is_always_its_own(folder: Path, sockets: Callable[..., zmq.Socket[bytes]]) -> None:
    """A connection to an address in use would be no error."""
    other = sockets(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
    config = KVEventsConfig(publisher="zmq", endpoint=f"ipc://{folder}/events", replay_endpoint=address)
    with pytest.raises(ValueError, match=f"{address} cannot be used"):
        KVEventPublisher(config)


def test_nothing_is_published_without_events(server: Server) -> None:
    server.store(1)
    before = server.publisher._next_seq
    server.publisher.flush()
    assert server.publisher._next_seq == before == 2


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_address_that_cannot_be_used_is_told(folder: Path, name: str) -> None:
    good = {"publisher": "zmq", "endpoint": f"ipc://{folder}/a", "replay_endpoint": f"ipc://{folder}/b"}
    config = msgspec.convert({**good, name: f"ipc://{folder}/none/x"}, KVEventsConfig)
    with pytest.raises(ValueError, match="none/x cannot be used: No such file"):
        KVEventPublisher(config)
