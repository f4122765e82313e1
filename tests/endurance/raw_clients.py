"""Hostile clients that send raw HTTP or raw TLS, and what must not be in the answers."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urlsplit

from endurance.findings import Findings
from endurance.hostile_http import RawRequest
from endurance.hostile_tls import TlsRequest
from endurance.pipes import Pipe, TlsPipe

_PATIENCE_S = 0.3
"""How long a client waits for more of an answer; four times as long for its first byte. Then it leaves."""
_HANDSHAKE_S = 60.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_ALERT, _HANDSHAKE = 21, 22


async def send_raw(url: str, raw: RawRequest, findings: Findings) -> None:
    """Sends bytes to an HTTP server, over TLS if the URL says so."""
    try:
        pipe = await (_secured(url) if urlsplit(url).scheme == "https" else Pipe.to(url))
    except (OSError, TimeoutError) as error:
        findings.add(f"{raw.name}: could not connect: {error!r}", raw.data)
        return
    try:
        pipe.send(raw.data)
        if raw.ends_early:
            pipe.end()
        answer = await _answer(pipe)
    except OSError:
        answer = b""  # the server has reset the connection, which is an answer
    finally:
        pipe.leave()
    _check_http("raw", raw.name, raw.data, answer, raw.max_answers, findings)


async def send_tls(url: str, request: TlsRequest, findings: Findings) -> None:
    if request.bare:
        await _send_bare(url, request, findings)
        return
    try:
        pipe = await _secured(url)
    except (OSError, TimeoutError) as error:
        findings.add(f"{request.name}: no handshake: {error!r}", b"")
        return
    try:
        for content in request.inside:
            pipe.send(content)
        pipe.bare.send(request.bare_after)
        if request.ends_early:
            pipe.bare.end()
        answer = await _answer(pipe)
    except OSError:
        answer = b""
    finally:
        pipe.leave()
    _check_http("tls", request.name, b"".join(request.inside) + request.bare_after, answer, 1, findings)


async def _send_bare(url: str, request: TlsRequest, findings: Findings) -> None:
    """Bytes without a handshake of ours: the server must answer by TLS, or not at all."""
    answer = b""
    try:
        pipe = await Pipe.to(url)
    except OSError as error:
        findings.add(f"{request.name}: could not connect: {error!r}", request.bare)
        return
    try:
        pipe.send(request.bare)
        if request.ends_early:
            pipe.end()
        answer = await _answer(pipe)
    except OSError:
        pass
    finally:
        pipe.leave()
    kind = {_ALERT: "alert", _HANDSHAKE: "handshake"}.get(answer[0]) if answer else "no answer"
    findings.statuses[f"tls: {kind}"] += 1
    if kind is None or _STATUS.search(answer):
        findings.add(f"{request.name}: the answer is not TLS: {answer[:200]!r}", request.bare)


async def _secured(url: str) -> TlsPipe:
    """A connection after its handshake. Raises OSError, TimeoutError."""
    pipe = await TlsPipe.to(url)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await pipe.handshake()
    except BaseException:
        pipe.leave()
        raise
    return pipe


async def _answer(pipe: Pipe) -> bytes:
    """All bytes until the server ends the connection, or sends none for a while."""
    answer = b""
    while True:
        try:
            async with asyncio.timeout(_PATIENCE_S if answer else 4 * _PATIENCE_S):
                piece = await pipe.receive()
        except (TimeoutError, OSError):
            return answer  # the server waits for more, or has reset the connection
        if not piece:
            return answer
        answer += piece


def _check_http(kind: str, name: str, sent: bytes, answer: bytes, max_answers: int | None, findings: Findings) -> None:
    statuses = [int(status) for status in _STATUS.findall(answer)]
    final = [status for status in statuses if status >= 200]
    findings.statuses[f"{kind}: {', '.join(map(str, sorted(set(final)))) or 'no answer'}"] += 1
    if answer and not statuses:
        findings.add(f"{name}: the answer is not HTTP: {answer[:200]!r}", sent)
    if any(status >= 500 for status in final):
        findings.add(f"{name}: status {max(final)}: {answer[-300:]!r}", sent)
    if max_answers is not None and len(final) > max_answers:
        findings.add(f"{name}: {len(final)} answers, so a body was read as a request", sent)
