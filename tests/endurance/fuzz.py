"""`scripts/fuzz`: hostile bodies and raw HTTP against a real server, beside a well-behaved client.

No process may exit, no status may be 5xx, every error must say why, a body must never be read as a further request, and
the neighbour's answers must stay right. Stalls of the server's event loop are counted, with what ran then. `--seed`
gives the same requests. `scripts/clients` runs schemathesis on the same OpenAPI document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from endurance.answers import Failed, Incomplete, events_of
from endurance.cases import make_cases
from endurance.clients import Client, Tally
from endurance.hostile_bodies import BodyMaker
from endurance.hostile_http import RawRequest, make_raw
from endurance.models import model_flags
from endurance.options import parser_of
from endurance.report import finish, tally_report
from endurance.resources import processes_of
from endurance.server_under_test import ServerUnderTest, Workplace, wrong_state

from tercet.benchmarks.http_client import HttpClient, HttpError

_RAW_SHARE = 0.25
_RAW_PATIENCE_S = 0.3
"""How long a raw client waits for more; then it leaves."""
_HANG_S = 600.0
_NEIGHBOUR_INTERVAL_S = 0.1
_LONG_WAIT_S = 3.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_EXPLAINED = {503: "queue_full"}
_STALLS_SHOWN = 10


class _Findings:
    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.in_flight: set[bytes] = set()
        """The hostile bodies that have no answer yet."""

    def add(self, what: str, sent: bytes) -> None:
        self.wrong.append(f"{what}; sent: {sent[:1500]!r}{' ...' if len(sent) > 1500 else ''}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("fuzz", __doc__, model="toy", clients=4)
    parser.add_argument("--requests", type=int, default=10_000, help="number of hostile requests (default 10000)")
    parser.add_argument("--context-length", type=int, default=256, help="bounds the longest answer (default 256)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The report, and what was wrong."""
    with Workplace() as folder:
        flags = [*model_flags(args.model, folder), "--port", "0", "--incremental-streaming-output"]
        flags += ["--max-total-tokens", "16384", "--context-length", str(args.context_length), "--engine-restarts", "0"]
        with ServerUnderTest(folder, flags) as server:
            return asyncio.run(_fuzz(server.ready(300), args))


async def _fuzz(server: ServerUnderTest, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    rng = random.Random(args.seed)
    cases = make_cases(rng, 16)
    findings = _Findings()
    neighbour = _Neighbour(server.url, cases, findings.in_flight)
    alone = await neighbour.latencies(30)
    http = HttpClient(server.url)
    bodies = BodyMaker(json.loads((await http.request("GET", "/openapi.json")).body), cases)
    await http.close()
    before = processes_of(server.pid)
    began, began_at = time.monotonic(), time.time()
    beside = asyncio.create_task(neighbour.latencies(None))
    shares = [args.requests // args.clients + (index < args.requests % args.clients) for index in range(args.clients)]
    seeds = [rng.randrange(1 << 62) for _ in shares]
    await asyncio.gather(
        *(
            _attack(server, bodies, random.Random(seed), share, findings)
            for seed, share in zip(seeds, shares, strict=True)
        )
    )
    lasted_s = time.monotonic() - began
    neighbour.is_over = True
    together = await beside
    wrong = findings.wrong + neighbour.tally.wrong
    wrong += [f"the neighbour: {error}" for error in neighbour.tally.refused + neighbour.tally.lost]
    if not server.is_alive:
        wrong.append(f"the server has ended: {server.log[-1500:]}")
        return {"seed": args.seed, "statuses": dict(findings.statuses.most_common())}, wrong
    wrong += wrong_state(await server.wait_until_quiet())
    gone = before.items() - processes_of(server.pid).items()
    wrong += [f"the {role} process has ended" for _, role in gone if role in ("http", "scheduler", "detokenizer")]
    wrong += [f"the log has: {line}" for line in server.lines if " ERROR " in line or "Traceback" in line]
    wrong += [f"left behind: {one}" for one in server.end()]
    stalls = [stall for stall in server.hooks.stalls() if stall.at >= began_at]
    own = sorted((stall for stall in stalls if stall.is_own_fault), key=lambda stall: -stall.busy_s)
    report = {
        "seed": args.seed,
        "lasted_s": round(lasted_s, 1),
        "requests_per_s": round(args.requests / lasted_s, 1),
        "statuses": dict(findings.statuses.most_common()),
        "neighbour": tally_report(neighbour.tally),
        "neighbour_latency_alone": _quantiles(alone),
        "neighbour_latency_beside": _quantiles(together),
        "neighbour_waited_for": neighbour.waited_for[:_STALLS_SHOWN],
        "loop_stalls": len(own),
        "loop_without_a_core": len(stalls) - len(own),
        "longest_stalls": [f"{stall.busy_s} s: {stall.stack}" for stall in own[:_STALLS_SHOWN]],
    }
    return report, wrong


class _Neighbour:
    """A well-behaved client, which asks the same short requests again and again."""

    def __init__(self, url: str, cases: Sequence[Any], others: set[bytes]) -> None:
        """`others`: what runs beside it."""
        self.waited_for: list[str] = []
        """Long waits, and what ran at their ends."""
        self._others = others
        self.tally = Tally()
        self.is_over = False
        self._cases = [case for case in cases if case.name in ("greedy 0", "seeded 0", "chat", "tokenize")]
        self._answers: dict[tuple[str, bool], Any] = {}
        self._url = url

    async def latencies(self, count: int | None) -> list[float]:
        """Seconds of each request: `count` of them, or until `is_over`."""
        client = Client(self._url, self.tally, self._answers)
        if not self._answers:
            await client.learn(self._cases)
        found: list[float] = []
        while len(found) < count if count is not None else not self.is_over:
            case = self._cases[len(found) % len(self._cases)]
            began = time.monotonic()
            await client.ask(case, case.can_stream and len(found) % 2 == 0)
            found.append(time.monotonic() - began)
            if found[-1] > _LONG_WAIT_S:
                self.waited_for.append(f"{found[-1]:.1f} s beside {[other[:1000] for other in self._others]}")
            await asyncio.sleep(_NEIGHBOUR_INTERVAL_S)
        await client.close()
        return found


async def _attack(
    server: ServerUnderTest, bodies: BodyMaker, rng: random.Random, count: int, findings: _Findings
) -> None:
    http = HttpClient(server.url)
    for _ in range(count):
        if not server.is_alive:
            break
        if rng.random() < _RAW_SHARE:
            await _send_raw(server.url, make_raw(rng), findings)
        else:
            await _send_body(http, *bodies.make(rng), findings)
    await http.close()


async def _send_body(http: HttpClient, path: str, body: bytes, findings: _Findings) -> None:
    data = bytearray()
    sent = path.encode() + b" " + body
    findings.in_flight.add(sent)
    try:
        async with asyncio.timeout(_HANG_S):
            response = await http.stream(path, body, lambda piece, _: data.extend(piece))
    except TimeoutError:
        findings.add(f"no end after {_HANG_S:.0f} s", sent)
        return
    except HttpError as error:
        findings.add(str(error), sent)
        return
    finally:
        findings.in_flight.discard(sent)
    findings.statuses[f"{response.status}"] += 1
    try:
        _check(response.status, bytes(data) or response.body)
    except (Failed, Incomplete) as error:
        findings.add(str(error), sent)


def _check(status: int, body: bytes) -> None:
    """Raises Incomplete for an answer that is wrong in form, and Failed for one that must not be."""
    if status == 200 and body.startswith((b"data: ", b"event: ", b":")):
        events = events_of(body)
        if not events or events[-1] != "[DONE]":
            raise Incomplete(f"the stream ended after {len(events)} events, without [DONE]")
        errors = [json.loads(event).get("error") for event in events[:-1]]
        answer: Any = {"error": next((error for error in errors if error), None)}
        if answer["error"] is None:
            return
        status = 500 if answer["error"].get("type") in ("server_error", "internal_error") else 400
    else:
        try:
            answer = json.loads(body)
        except ValueError:
            raise Incomplete(f"status {status} with a body that is not JSON: {body[:200]!r}") from None
        if status == 200:
            return
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or not error.get("message"):
        raise Incomplete(f"status {status} without a reason")
    if status >= 500 and _EXPLAINED.get(status) != error.get("code"):
        raise Failed(f"status {status}: {error['message']}")


async def _send_raw(url: str, raw: RawRequest, findings: _Findings) -> None:
    place = urlsplit(url)
    answer = b""
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
    except OSError as error:
        findings.add(f"{raw.name}: could not connect: {error}", raw.data)
        return
    try:
        writer.write(raw.data)
        if raw.ends_early:
            writer.write_eof()
        while True:
            async with asyncio.timeout(_RAW_PATIENCE_S if answer else 4 * _RAW_PATIENCE_S):
                piece = await reader.read(1 << 16)
            if not piece:
                break
            answer += piece
    except (TimeoutError, OSError):
        pass  # the server waits for more, or has reset the connection: both are answers
    finally:
        writer.transport.abort()
    statuses = [int(status) for status in _STATUS.findall(answer)]
    final = [status for status in statuses if status >= 200]
    findings.statuses[f"raw: {', '.join(map(str, sorted(set(final)))) or 'no answer'}"] += 1
    if answer and not statuses:
        findings.add(f"{raw.name}: the answer is not HTTP: {answer[:200]!r}", raw.data)
    if any(status >= 500 for status in final):
        findings.add(f"{raw.name}: status {max(final)}: {answer[-300:]!r}", raw.data)
    if raw.max_answers is not None and len(final) > raw.max_answers:
        findings.add(f"{raw.name}: {len(final)} answers, so a body was read as a request", raw.data)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"median_s": 0.5, "p99_s": 0.99, "longest_s": 1.0}
    return {name: round(ordered[min(int(len(ordered) * at), len(ordered) - 1)], 4) for name, at in places.items()}


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    sys.exit(finish(*run(arguments), arguments.report))
