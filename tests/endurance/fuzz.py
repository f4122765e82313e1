"""`scripts/fuzz`: hostile bodies, raw HTTP and raw TLS against a real server, beside a well-behaved client.

No process may exit, no status may be 5xx, every error must say why, a body must never be read as a further request, and
the neighbour's answers must stay right. The server's event loop may not compute for longer than --max-stall at a time.
With --rate, the neighbour's p99 must stay within --max-ratio. `--seed` gives the same requests. `scripts/clients` runs
schemathesis on the same OpenAPI document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from endurance.answers import Failed, Incomplete
from endurance.cases import make_cases
from endurance.clients import Client
from endurance.findings import Findings, check
from endurance.hooks import STALL_S, Stall
from endurance.hostile_bodies import BodyMaker
from endurance.hostile_http import make_raw
from endurance.hostile_tls import make_tls
from endurance.models import model_flags
from endurance.options import parser_of
from endurance.pipes import make_certificate, trusted
from endurance.raw_clients import send_raw, send_tls
from endurance.report import finish, tally_report
from endurance.resources import processes_of
from endurance.server_under_test import ServerUnderTest, Workplace, wrong_state
from endurance.tally import Tally

from tercet.benchmarks.argument_types import above_zero, positive
from tercet.benchmarks.http_client import HttpClient, HttpError

_RAW_SHARE = 0.25
"""Of the requests. With TLS, half of them are raw TLS."""
_RAW_CLIENTS = 32
"""They spend their time waiting for answers that do not come, beside the clients that send bodies."""
_HANG_S = 600.0
_NEIGHBOUR_INTERVAL_S = 0.1
_LONG_WAIT_S = 3.0
_STALLS_SHOWN = 10


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("fuzz", __doc__, model="toy", clients=8)
    parser.add_argument("--requests", type=positive, default=10_000, help="number of hostile requests (default 10000)")
    parser.add_argument("--rate", type=above_zero, help="most hostile requests per second (default: no limit)")
    parser.add_argument("--tls", action="store_true", help="the server uses TLS, which is attacked, too")
    parser.add_argument("--context-length", type=int, default=256, help="bounds the longest answer (default 256)")
    parser.add_argument(
        "--max-stall",
        type=above_zero,
        default=STALL_S,
        help="processor seconds of one turn of the event loop (default 0.1); allow more on a slow machine",
    )
    parser.add_argument(
        "--max-ratio",
        type=above_zero,
        default=2.0,
        help="with --rate: the neighbour's p99 beside the attack, divided by its p99 alone (default 2)",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The report, and what was wrong."""
    with Workplace() as folder:
        flags = [*model_flags(args.model, folder), "--port", "0", "--incremental-streaming-output"]
        flags += ["--max-total-tokens", "16384", "--context-length", str(args.context_length), "--engine-restarts", "0"]
        with contextlib.ExitStack() as stack:
            if args.tls:
                certificate = make_certificate(folder)
                stack.enter_context(trusted(certificate[1]))
                flags += certificate
            server = stack.enter_context(ServerUnderTest(folder, flags))
            return asyncio.run(_fuzz(server.ready(300), args))


async def _fuzz(server: ServerUnderTest, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    rng = random.Random(args.seed)
    cases = make_cases(rng, 16)
    findings = Findings()
    neighbour = _Neighbour(server.url, cases, findings.in_flight)
    alone = await neighbour.latencies(min(max(args.requests // 50, 30), 300))
    http = HttpClient(server.url)
    bodies = BodyMaker(json.loads((await http.request("GET", "/openapi.json")).body), cases)
    await http.close()
    before = processes_of(server.pid)
    began, began_at = time.monotonic(), time.time()
    beside = asyncio.create_task(neighbour.latencies(None))
    pace = Pace(args.rate)
    num_raw = int(args.requests * _RAW_SHARE)

    async def attack(seed: int, count: int, *, is_raw: bool) -> None:
        own_rng, client = random.Random(seed), HttpClient(server.url)
        for _ in range(count):
            await pace.wait()
            if not server.is_alive:
                break
            if not is_raw:
                await _send_body(client, *bodies.make(own_rng), findings)
            elif args.tls and own_rng.random() < 0.5:
                await send_tls(server.url, make_tls(own_rng), findings)
            else:
                await send_raw(server.url, make_raw(own_rng), findings)
        await client.close()

    shares = [(count, False) for count in _shares(args.requests - num_raw, args.clients)]
    shares += [(count, True) for count in _shares(num_raw, _RAW_CLIENTS)]
    await asyncio.gather(*(attack(rng.randrange(1 << 62), count, is_raw=is_raw) for count, is_raw in shares))
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
    ratio = round(_quantiles(together)["p99_s"] / _quantiles(alone)["p99_s"], 2)
    wrong += slow(own, ratio, args)
    report = {
        "seed": args.seed,
        "lasted_s": round(lasted_s, 1),
        "limit_of_requests_per_s": args.rate,
        "requests_per_s": round(args.requests / lasted_s, 1),
        "statuses": dict(findings.statuses.most_common()),
        "neighbour": tally_report(neighbour.tally),
        "neighbour_latency_alone": _quantiles(alone),
        "neighbour_latency_beside": _quantiles(together),
        "neighbour_p99_ratio": ratio,
        "neighbour_waited_for": neighbour.waited_for[:_STALLS_SHOWN],
        "loop_stalls": len(own),
        "loop_without_a_core": len(stalls) - len(own),
        "longest_stalls": [f"{stall.busy_s} s: {stall.stack}" for stall in own[:_STALLS_SHOWN]],
    }
    return report, wrong


def slow(own_stalls: Sequence[Stall], ratio: float, args: argparse.Namespace) -> list[str]:
    """What took too long. A stall counts by its processor time, so other work on the machine causes none.

    Without --rate the attack uses the whole machine, and the neighbour waits for a core: then its ratio is no defect.
    """
    wrong = [f"the loop was busy for {one.busy_s} s: {one.stack}" for one in own_stalls if one.busy_s > args.max_stall]
    if args.rate is not None and ratio > args.max_ratio:
        wrong.append(f"the neighbour's p99 is {ratio} times as long beside {args.rate:g} requests a second")
    return wrong


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


class Pace:
    """Lets the requests of all clients begin at a rate."""

    def __init__(self, per_s: float | None) -> None:
        self.interval_s = 0.0 if per_s is None else 1 / per_s
        self._next_s = 0.0

    async def wait(self) -> None:
        if self.interval_s:
            now = time.monotonic()
            self._next_s = max(self._next_s + self.interval_s, now)
            await asyncio.sleep(self._next_s - now)


def _shares(total: int, num_clients: int) -> list[int]:
    return [total // num_clients + (index < total % num_clients) for index in range(num_clients)]


async def _send_body(http: HttpClient, path: str, body: bytes, findings: Findings) -> None:
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
        check(response.status, bytes(data) or response.body)
    except (Failed, Incomplete) as error:
        findings.add(str(error), sent)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"median_s": 0.5, "p99_s": 0.99, "longest_s": 1.0}
    return {name: round(ordered[min(int(len(ordered) * at), len(ordered) - 1)], 4) for name, at in places.items()}


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    sys.exit(finish(*run(arguments), arguments.report))
