"""TLS that no library sends: plain HTTP, garbage, handshakes that stop, records that are too long, ends without notice.

All bytes come from the seed, but for those of whole handshakes.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from endurance.hostile_http import HOST, make_raw

MAX_RECORD = 1 << 14
"""Bytes in a record of TLS."""
_ALERT, _HANDSHAKE, _DATA = 21, 22, 23
_GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"


@dataclass(frozen=True)
class TlsRequest:
    """What a client does on a connection of its own."""

    name: str
    bare: bytes = b""
    """Bytes without a handshake. Then nothing else is sent."""
    inside: tuple[bytes, ...] = ()
    """After a handshake: the contents of the records."""
    bare_after: bytes = b""
    """Bytes between or after the records that are not encrypted."""
    ends_early: bool = False
    """The client closes its side at once, without close_notify."""


def make_tls(rng: random.Random) -> TlsRequest:
    name = rng.choice(sorted(_MAKERS))
    return _MAKERS[name](name, rng)


def client_hello(rng: random.Random) -> bytes:
    """The record of a ClientHello of TLS 1.2, which OpenSSL answers."""
    extensions = [
        (10, b"\x00\x04\x00\x1d\x00\x17"),  # groups: x25519, secp256r1
        (11, b"\x01\x00"),  # points: uncompressed
        (13, b"\x00\x06\x04\x03\x08\x04\x04\x01"),  # signatures: ECDSA, RSA-PSS and RSA with SHA-256
        (0xFF01, b"\x00"),  # secure renegotiation
    ]
    fields = b"".join(struct.pack(">HH", kind, len(value)) + value for kind, value in extensions)
    suites = b"\xc0\x2b\xc0\x2f\xc0\x2c\xc0\x30"
    body = b"\x03\x03" + rng.randbytes(32) + b"\x00" + struct.pack(">H", len(suites)) + suites + b"\x01\x00"
    body += struct.pack(">H", len(fields)) + fields
    return record(_HANDSHAKE, b"\x01" + len(body).to_bytes(3, "big") + body)


def record(kind: int, content: bytes, length: int | None = None) -> bytes:
    """A record that is not encrypted. `length`: what it claims to have; None: the truth."""
    return struct.pack(">BHH", kind, 0x0303, len(content) if length is None else length) + content


def _plain_http(name: str, rng: random.Random) -> TlsRequest:
    raw = make_raw(rng)
    return TlsRequest(name, rng.choice([_GET, _GET * 100, raw.data]), ends_early=raw.ends_early)


def _garbage(name: str, rng: random.Random) -> TlsRequest:
    hello = bytearray(client_hello(rng))
    for _ in range(rng.randint(1, 8)):
        hello[rng.randrange(len(hello))] = rng.randrange(256)
    noise = rng.randbytes(rng.choice([1, 5, 300, 70_000]))
    return TlsRequest(name, rng.choice([bytes(hello), noise, record(_HANDSHAKE, noise[:MAX_RECORD])]))


def _cut_hello(name: str, rng: random.Random) -> TlsRequest:
    hello = client_hello(rng)
    return TlsRequest(name, hello[: rng.randrange(len(hello))], ends_early=rng.random() < 0.5)


def _half_a_handshake(name: str, rng: random.Random) -> TlsRequest:
    """The server answers, and waits for a key that does not come, or is none."""
    key = record(_HANDSHAKE, b"\x10\x00\x00\x21\x20" + rng.randbytes(32))
    more = rng.choice([b"", b"", key, record(20, b"\x01"), record(_DATA, _GET), record(_ALERT, b"\x01\x00"), _GET])
    return TlsRequest(name, client_hello(rng) + more, ends_early=rng.random() < 0.3)


def _odd_records(name: str, rng: random.Random) -> TlsRequest:
    hello = client_hello(rng)
    content = hello[5:]
    bare = rng.choice(
        [
            record(_HANDSHAKE, bytes(0xFFFF)),
            record(_HANDSHAKE, content + bytes(MAX_RECORD)),
            record(_HANDSHAKE, content, 0xFFFF),
            record(_HANDSHAKE, content, 0),
            record(_HANDSHAKE, b"") * 5000 + hello,
            record(_ALERT, b"\x01\x5a") * 5000,
            record(99, content),
            record(_HANDSHAKE, b"\x01\xff\xff\xff") + record(_HANDSHAKE, bytes(MAX_RECORD)) * 8,
            b"".join(record(_HANDSHAKE, content[at : at + 1]) for at in range(len(content))),
            hello * 50,
            b"\x80\x2e\x01\x03\x01" + rng.randbytes(43),  # a ClientHello of SSL 2
        ]
    )
    return TlsRequest(name, bare)


def _silence(name: str, rng: random.Random) -> TlsRequest:
    """A whole handshake, and then nothing."""
    return TlsRequest(name, ends_early=rng.random() < 0.3)


def _many_records(name: str, rng: random.Random) -> TlsRequest:
    post = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n%s"
    body = b'{"prompt": "%s"}' % (b"a" * rng.choice([10, 300_000]))
    data = rng.choice([_GET, post % (len(body), body)])
    size = rng.choice([1, 7, MAX_RECORD]) if len(data) < 1000 else rng.choice([100, MAX_RECORD])
    return TlsRequest(name, inside=tuple(data[at : at + size] for at in range(0, len(data), size)))


def _broken_off(name: str, rng: random.Random) -> TlsRequest:
    """An end without close_notify, or bytes that are not encrypted, in the middle of a request or after it."""
    data = _GET[: rng.choice([len(_GET), rng.randrange(len(_GET))])]
    after = rng.choice([b"", b"", _GET, record(_DATA, rng.randbytes(40)), record(_DATA, b"", 0xFFFF), b"\x17"])
    return TlsRequest(name, inside=(data,) if data else (), bare_after=after, ends_early=not after)


_MAKERS = {
    "plain HTTP": _plain_http,
    "garbage": _garbage,
    "cut ClientHello": _cut_hello,
    "half a handshake": _half_a_handshake,
    "odd records": _odd_records,
    "handshake and silence": _silence,
    "many records": _many_records,
    "broken off": _broken_off,
}
