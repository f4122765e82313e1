"""`scripts/soak`: many requests of all kinds on the toy model, and then everything is as it was at the start.

Every answer is compared with the first answer to the same request. One request in ten ends badly: its client leaves,
aborts it, reads a byte a second, or breaks the connection. `--seed` gives the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from endurance.cases import make_cases
from endurance.clients import Client, population
from endurance.models import model_flags
from endurance.options import parser_of
from endurance.report import finish, tally_report
from endurance.resources import Use, slopes, use_by_role
from endurance.server_under_test import ServerUnderTest, Workplace, wrong_state
from endurance.tally import Tally

from tercet.benchmarks.argument_types import positive

_WARM_UP = 0.2
"""Share of the requests before the first snapshot that the last one is compared with."""
_MAX_SNAPSHOTS = 40
_MIN_SNAPSHOTS = 5
_REQUESTS_PER_SNAPSHOT = 1000
_MAX_SLOPE = (1 << 20) / 100_000
"""Bytes of RSS per request that a process may grow by."""
_REQUESTS_FOR_A_SLOPE = 100_000
"""With fewer requests, the slope is only reported: caches still fill, and the allocator's steps are larger."""
_EXTRA_FILES = 4
_EXTRA_THREADS = 32
"""The most threads of Python's pool, which grows when it is used."""
_SETTLE_S = 60.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("soak", __doc__, model="toy", clients=16)
    parser.add_argument("--requests", type=positive, default=10_000, help="number of requests (default 10000)")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of the longest answers (default 24)")
    parser.add_argument(
        "--all-features", action="store_true", help="switch on the features that docs/endurance.md lists"
    )
    return parser.parse_args(argv)


def feature_flags(folder: Path) -> list[str]:
    """Flags of what `--all-features` switches on. The limits are so high that no request exceeds them."""
    flags = ["--enable-metrics", "--resume-grace", "2", "--resume-file", str(folder / "streams")]
    flags += ["--response-store-mib", "1", "--enable-hierarchical-cache", "--hicache-size", "0.005"]
    flags += ["--hicache-storage-dir", str(folder / "kv"), "--hicache-storage-size", "0.05"]
    flags += ["--kv-events-config", json.dumps({"publisher": "zmq", "endpoint": f"ipc://{folder / 'events'}"})]
    flags += ["--max-concurrent-requests-per-key", "100000", "--requests-per-minute-per-key", "100000000"]
    flags += ["--max-queue-time", "10000", "--waiting-timeout", "10000", "--running-timeout", "10000"]
    flags += ["--schedule-policy", "dlpm", "--enable-mixed-chunk", "--enable-return-hidden-states"]
    return [*flags, "--explain-schedule", "10000", "--soft-watchdog-timeout", "200", "--log-format", "json"]


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The report, and what was wrong."""
    with Workplace() as folder:
        flags = [*model_flags(args.model, folder), "--port", "0", "--incremental-streaming-output"]
        flags += ["--max-total-tokens", "16384", *(feature_flags(folder) if args.all_features else [])]
        with ServerUnderTest(folder, flags) as server:
            return asyncio.run(_soak(server.ready(300), args))


async def _soak(server: ServerUnderTest, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    rng = random.Random(args.seed)
    cases = make_cases(rng, args.max_tokens)
    answers: dict[tuple[str, bool], Any] = {}
    tally = Tally()
    teacher = Client(server.url, tally, answers)
    await teacher.learn(cases)
    await teacher.close()
    await server.wait_until_quiet()
    series: list[tuple[int, dict[str, Use]]] = []
    began = time.monotonic()
    files = {path.name for path in server.run_dirs.iterdir()}
    warm: dict[str, Use] = {}
    snapshots = min(max(args.requests // _REQUESTS_PER_SNAPSHOT, _MIN_SNAPSHOTS), _MAX_SNAPSHOTS)
    for step in range(snapshots):
        upto = args.requests * (step + 1) // snapshots
        await population(
            lambda _: Client(server.url, tally, answers),
            cases,
            rng,
            size=args.clients,
            go_on=lambda upto=upto: server.is_alive and tally.requests < upto,
        )
        if not server.is_alive:
            return {"seed": args.seed, "requests": tally_report(tally)}, [f"the server has ended: {server.log[-1500:]}"]
        await server.wait_until_quiet()
        series.append((tally.requests, use_by_role(server.pid)))
        if not warm and step + 1 >= _WARM_UP * snapshots:
            warm = series[-1][1]
    lasted_s = time.monotonic() - began
    info = await server.wait_until_quiet()
    after = await _settled(server, warm)
    wrong = tally.wrong + [f"{count} times: {error}" for error, count in (tally.refused + tally.lost).items()]
    wrong += wrong_state(info) + changed(warm, after)
    wrong += [f"the log has: {line}" for line in server.lines if " ERROR " in line or "Traceback" in line]
    wrong += [f"new in TMPDIR: {path.name}" for path in server.run_dirs.iterdir() if path.name not in files]
    slope = slopes(series)
    if tally.requests >= _REQUESTS_FOR_A_SLOPE:
        wrong += [
            f"the {role} process grows by {value * 100_000 / 2**20:.1f} MiB in 100,000 requests"
            for role, value in slope.items()
            if value > _MAX_SLOPE
        ]
    wrong += [f"left behind: {one}" for one in server.end()]
    report = {
        "seed": args.seed,
        "lasted_s": round(lasted_s, 1),
        "requests_per_s": round(tally.requests / lasted_s, 1),
        "requests": tally_report(tally),
        "engine_restarts": info["num_engine_restarts"],
        "rss_mib_after_warm_up_and_at_the_end": {
            role: [round(use.rss_bytes / 2**20, 1), round(after[role].rss_bytes / 2**20, 1)]
            for role, use in warm.items()
            if role in after
        },
        "rss_mib_per_100000_requests": {role: round(value * 100_000 / 2**20, 2) for role, value in slope.items()},
        "open_files": {role: use.num_files for role, use in after.items()},
        "threads": {role: use.num_threads for role, use in after.items()},
    }
    return report, wrong


async def _settled(server: ServerUnderTest, warm: dict[str, Use]) -> dict[str, Use]:
    """What the processes use when the last connections are closed."""
    until = time.monotonic() + _SETTLE_S
    while changed(warm, after := use_by_role(server.pid)) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    return after


def changed(before: dict[str, Use], after: dict[str, Use]) -> list[str]:
    """Processes that are new or gone, and those with more open files or threads."""
    wrong = [f"there is a {role} process, and was none" for role in after.keys() - before.keys()]
    wrong += [f"there is no {role} process any more" for role in before.keys() - after.keys()]
    for role in before.keys() & after.keys():
        old, new = before[role], after[role]
        if new.num_files > old.num_files + _EXTRA_FILES:
            wrong.append(f"the {role} process has {new.num_files} open files, and had {old.num_files}")
        if new.num_threads > old.num_threads + _EXTRA_THREADS:
            wrong.append(f"the {role} process has {new.num_threads} threads, and had {old.num_threads}")
    return wrong


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    sys.exit(finish(*run(arguments), arguments.report))
