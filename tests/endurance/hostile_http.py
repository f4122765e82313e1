"""Raw HTTP that no client library sends: ambiguous lengths, odd chunks, huge heads, pipelines, early ends."""

from __future__ import annotations

import random
from dataclasses import dataclass

HOST = b"Host: 127.0.0.1\r\n"
_SMUGGLED = b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n"
_BODY = b'{"prompt": "a"}'


@dataclass(frozen=True)
class RawRequest:
    """Bytes to send on a connection of their own."""

    name: str
    data: bytes
    max_answers: int | None = 1
    """Most answers that the server may give. More would mean that it reads a body as a request. None: any number."""
    ends_early: bool = False
    """The client closes its side at once after the bytes."""


def make_raw(rng: random.Random) -> RawRequest:
    name = rng.choice(sorted(_MAKERS))
    return _MAKERS[name](name, rng)


def _post(head: bytes, body: bytes) -> bytes:
    return b"POST /tokenize HTTP/1.1\r\n" + HOST + head + b"\r\n" + body


def _both_lengths(name: str, rng: random.Random) -> RawRequest:
    """Content-Length and Transfer-Encoding: a server that takes one, and a proxy the other, disagree on the end."""
    fields = [b"Content-Length: %d\r\n" % rng.choice([0, 4, 5, 60]), b"Transfer-Encoding: chunked\r\n"]
    rng.shuffle(fields)
    return RawRequest(name, _post(b"".join(fields), b"0\r\n\r\n" + _SMUGGLED))


def _two_lengths(name: str, rng: random.Random) -> RawRequest:
    one, other = rng.sample([b"0", b"15", b"15, 15", b"+15", b"0x0f", b" 15", b"15 ", b"-1", b"015", b"1 5"], 2)
    return RawRequest(name, _post(b"Content-Length: %s\r\nContent-Length: %s\r\n" % (one, other), _BODY + _SMUGGLED))


def _odd_length(name: str, rng: random.Random) -> RawRequest:
    length = rng.choice([b"+0", b"-1", b"0x0", b"99999999999999999999", b"", b"1e1", b"0\x0b", b"\xb2"])
    return RawRequest(name, _post(b"Content-Length: %s\r\n" % length, _SMUGGLED))


def _odd_encoding(name: str, rng: random.Random) -> RawRequest:
    coding = rng.choice(
        [b"chunked, identity", b"identity", b"chunkedx", b"gzip, chunked", b"\x0bchunked", b"chunked\x00", b"CHUNKED,"]
    )
    return RawRequest(name, _post(b"Transfer-Encoding: %s\r\n" % coding, b"0\r\n\r\n" + _SMUGGLED), max_answers=2)


def _upgrade(name: str, rng: random.Random) -> RawRequest:
    protocol = rng.choice([b"h2c", b"websocket", b"TLS/1.0", b""])
    fields = b"Upgrade: %s\r\nConnection: Upgrade\r\n" % protocol
    if rng.random() < 0.5:
        return RawRequest(name, _post(fields + b"Content-Length: %d\r\n" % len(_SMUGGLED), _SMUGGLED))
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_SMUGGLED), _SMUGGLED)
    return RawRequest(name, _post(fields + b"Transfer-Encoding: chunked\r\n", chunk))


def _odd_chunks(name: str, rng: random.Random) -> RawRequest:
    size = b"%x" % len(_BODY)
    chunks = rng.choice(
        [
            size + b";" + b"a" * 100_000 + b"\r\n" + _BODY + b"\r\n0\r\n\r\n",
            b"ffffffffffffffffff\r\n" + _BODY,
            b"-1\r\n" + _BODY,
            b"0x" + size + b"\r\n" + _BODY + b"\r\n0\r\n\r\n",
            size + b"\n" + _BODY + b"\n0\n\n",
            size + b"\r\n" + _BODY + b"0\r\n\r\n",
            b"".join(b"1\r\n%c\r\n" % byte for byte in _BODY) + b"0\r\n\r\n",
            size + b"\r\n" + _BODY + b"\r\n0\r\n" + b"trailer: a\r\n" * 3000 + b"\r\n",
            b"\r\n" * 1000,
            b"0\r\n" + b"a" * 70_000,
        ]
    )
    return RawRequest(name, _post(b"Transfer-Encoding: chunked\r\n", chunks))


def _huge_head(name: str, rng: random.Random) -> RawRequest:
    line = b"GET /health HTTP/1.1\r\n" + HOST
    data = rng.choice(
        [
            b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
            line + b"x: " + b"a" * 200_000 + b"\r\n\r\n",
            line + b"x: a\r\n" * 5000 + b"\r\n",
            line + b"a" * 200_000 + b": x\r\n\r\n",
            b"A" * 200_000,
            line + b"x: a\r\n" * 200 + b"\r\n",
        ]
    )
    return RawRequest(name, data)


def _odd_head(name: str, rng: random.Random) -> RawRequest:
    good = b"GET /health HTTP/1.1\r\n" + HOST
    data = rng.choice(
        [
            b"GET /health\r\n\r\n",
            b"GET /health HTTP/9.9\r\n\r\n",
            b"GET  /health  HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/1.1\n\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            good + b"x : a\r\n\r\n",
            good + b" folded: a\r\n\r\n",
            good + b"x: \x00\r\n\r\n",
            good + b"\xff\xfe: \xff\r\n\r\n",
            good + b"no colon\r\n\r\n",
            good + b"Host: other\r\n\r\n",
            b"GET /health HTTP/1.1\r\n\r\n",
            good + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
            good + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n",
            good + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
            b"GET http://other.example/health HTTP/1.1\r\n" + HOST + b"\r\n",
            b"GET /%00/%ff/../../etc HTTP/1.1\r\n" + HOST + b"\r\n",
            b"GET /health?%zz=%&&&=&api-version=\xff HTTP/1.1\r\n" + HOST + b"\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n",
            b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
            b"HEAD /health HTTP/1.1\r\n" + HOST + b"\r\n",
            b"\r\n\r\n\r\n" + good + b"\r\n",
            bytes(rng.randrange(256) for _ in range(300)),
        ]
    )
    return RawRequest(name, data)


def _pipeline(name: str, rng: random.Random) -> RawRequest:
    one = rng.choice([_SMUGGLED, _post(b"Content-Length: %d\r\n" % len(_BODY), _BODY)])
    return RawRequest(name, one * rng.choice([2, 10, 64, 70, 300]), max_answers=None)


def _cut(name: str, rng: random.Random) -> RawRequest:
    whole = rng.choice(
        [
            _post(b"Content-Length: %d\r\n" % len(_BODY), _BODY),
            _post(b"Content-Length: 100000\r\n", _BODY),
            _post(b"Transfer-Encoding: chunked\r\n", b"f\r\n" + _BODY),
        ]
    )
    return RawRequest(name, whole[: rng.randrange(len(whole))], ends_early=True)


_MAKERS = {
    "both lengths": _both_lengths,
    "two lengths": _two_lengths,
    "odd length": _odd_length,
    "odd encoding": _odd_encoding,
    "upgrade": _upgrade,
    "odd chunks": _odd_chunks,
    "huge head": _huge_head,
    "odd head": _odd_head,
    "pipeline": _pipeline,
    "early end": _cut,
}
