"""`scripts/chaos`: a real server, clients that check every byte, and a random fault about once a second.

Every stream that ends normally must equal the undisturbed answer. Every other one must end with an error that says why,
and that one of the faults allows (see excuses.py). A stream that has begun must not be silent for longer than
--max-silence, unless the HTTP process is stopped or a step hangs.
At the end nothing may be left behind. `--seed` repeats the faults, their order and the requests of each client. Their
times depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from endurance.cases import make_cases, new_schema_cases
from endurance.clients import Client, population
from endurance.continuing import ContinuingClient
from endurance.excuses import by_fault, silent_times, unexcused
from endurance.faults import OF_THE_SERVER, Faults, tmpfs, unmount
from endurance.models import model_flags
from endurance.options import parser_of
from endurance.pipes import make_certificate, trusted
from endurance.report import finish, seconds, silence_beyond, tally_report
from endurance.resources import use_by_role
from endurance.server_under_test import ServerUnderTest, Workplace, wrong_state
from endurance.tally import Tally

from tercet.benchmarks.argument_types import above_zero, not_negative, positive

_TMPFS_MIB = {"toy": 64}
_OTHER_TMPFS_MIB = 2048
"""The weight cache takes at most half of the free space."""
_EXTRA_FILES = 16
_DURING_RESTARTS = 0.25
"""Share of the faults that do not wait for the end of a restart."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("chaos", __doc__, model="default", clients=8)
    parser.add_argument("--faults", type=positive, default=100, help="number of faults (default 100)")
    parser.add_argument("--interval", type=above_zero, default=1.0, help="mean seconds between two faults (default 1)")
    parser.add_argument("--max-tokens", type=int, default=100, help="length of the longest answers (default 100)")
    parser.add_argument("--only", action="append", default=[], help="only faults of this kind; may be repeated")
    parser.add_argument("--watchdog", type=above_zero, default=12, help="--watchdog-timeout of the server (default 12)")
    parser.add_argument("--max-stop", type=not_negative, default=10, help="seconds of the longest SIGSTOP (default 10)")
    parser.add_argument(
        "--max-silence", type=above_zero, default=2.0, help="seconds of a stream without a byte (default 2)"
    )
    parser.add_argument("--tls", action="store_true", help="the server and its clients use TLS")
    parser.add_argument("--http-workers", type=int, default=1, help="--tokenizer-worker-num of the server (default 1)")
    parser.add_argument(
        "--server-faults", action="store_true", help="also kill and restart the whole server; clients go on at the next"
    )
    parser.add_argument("--time-limit", type=above_zero, default=1e9, help="seconds after which no fault begins")
    args = parser.parse_args(argv)
    if args.server_faults and args.http_workers > 1:
        parser.error("--server-faults needs one HTTP process, as --resume-file does")
    known = [*Faults.all_kinds(), *(OF_THE_SERVER if args.server_faults else ())]
    for kind in args.only:
        if kind in OF_THE_SERVER and not args.server_faults:
            parser.error(f"--only: {kind!r} needs --server-faults")
        if kind not in known:
            parser.error(f"--only: {kind!r} is none of {', '.join(known)}")
    return args


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The report, and what was wrong."""
    with Workplace() as folder:
        place = folder / "disk"
        place.mkdir()
        on_tmpfs = tmpfs(place, _TMPFS_MIB.get(args.model, _OTHER_TMPFS_MIB))
        try:
            flags = [*model_flags(args.model, folder), "--port", "0", "--incremental-streaming-output"]
            flags += ["--max-total-tokens", "16384", "--watchdog-timeout", str(args.watchdog)]
            flags += ["--engine-restarts", "1000", "--engine-restart-window", "60"]
            flags += ["--tokenizer-worker-num", str(args.http_workers)]
            if args.server_faults:  # the file is not on the small disk: what it cannot record is lost with its server
                flags += ["--resume-grace", "600", "--resume-file", str(folder / "streams")]
            with contextlib.ExitStack() as stack:
                if args.tls:
                    certificate = make_certificate(folder)
                    stack.enter_context(trusted(certificate[1]))
                    flags += certificate
                server = stack.enter_context(ServerUnderTest(place, flags, on_tmpfs=on_tmpfs))
                return asyncio.run(_chaos(server.ready(300), args))
        finally:
            if on_tmpfs:
                unmount(place)


async def _chaos(server: ServerUnderTest, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    rng = random.Random(args.seed)
    cases = make_cases(rng, args.max_tokens) + new_schema_cases(rng)
    answers: dict[tuple[str, bool], Any] = {}
    tally = Tally()
    teacher = Client(server.url, tally, answers)
    await teacher.learn(cases)
    await teacher.close()
    await server.wait_until_quiet()
    before = use_by_role(server.pid)
    faults = Faults(server, args.watchdog * 1.5, args.max_stop)
    only = args.only or [*faults.kinds, *(OF_THE_SERVER if args.server_faults else ())]
    is_over = False
    fault_rng = random.Random(args.seed)  # whatever the cases have drawn

    def make_client(rng: random.Random) -> Client:
        if args.server_faults:
            return ContinuingClient(server, tally, answers, rng)
        return Client(server.url, tally, answers)

    clients = asyncio.create_task(
        population(
            make_client,
            cases,
            rng,
            size=args.clients,
            go_on=lambda: server.is_alive and not is_over,
        )
    )
    began = time.monotonic()
    happening: set[asyncio.Task[None]] = set()
    for _ in range(args.faults):
        kind = faults.draw(fault_rng, only)
        happening.add(asyncio.create_task(faults.happen(kind, random.Random(fault_rng.randrange(1 << 62)))))
        strikes_a_restart = fault_rng.random() < _DURING_RESTARTS
        pause_s = fault_rng.uniform(0.0, 2 * args.interval)
        await asyncio.sleep(pause_s)
        was_changing = server.is_changing
        while server.is_alive and (server.is_changing or (server.is_restarting and not strikes_a_restart)):
            await asyncio.sleep(0.05)
        if was_changing:
            await asyncio.sleep(pause_s)  # the next process serves for as long
        if not server.is_alive or time.monotonic() - began > args.time_limit:
            break
    await asyncio.gather(*happening)
    is_over = True
    await clients
    lasted_s = time.monotonic() - began
    wrong = tally.wrong + faults.wrong
    if not server.is_alive:
        wrong.append(f"the server has ended: {server.log[-1500:]}")
        return {"seed": args.seed, "requests": tally_report(tally)}, wrong
    await asyncio.sleep(1.0)  # the server sees the last clients leave
    info = await server.wait_until_quiet()
    wrong += wrong_state(info)
    after = use_by_role(server.pid)
    wrong += [
        f"the {role} process has {after[role].num_files} open files, and had {use.num_files}"
        for role, use in before.items()
        if role in after and after[role].num_files > use.num_files + _EXTRA_FILES
    ]
    wrong += [f"left behind: {one}" for one in server.end()]
    wrong += unexcused(tally.failures, faults.events)
    silences = [(silence_beyond(wait, silent_times(faults.events)), wait) for wait in tally.waits.silences]
    wrong += [
        f"{wait.case}: silent for {wait.lasted_s:.1f} s, {silence:.1f} s of them without an excuse"
        for silence, wait in silences
        if silence > args.max_silence
    ]
    done = Counter(event.kind for event in faults.events if not event.skipped)
    skipped = Counter(f"{event.kind}: {event.skipped}" for event in faults.events if event.skipped)
    report = {
        "seed": args.seed,
        "lasted_s": round(lasted_s, 1),
        "faults": dict(done.most_common()),
        "skipped_faults": dict(skipped.most_common()),
        "requests": tally_report(tally),
        "new_schemas": dict(+tally.new_schemas),
        "compilations": {
            "hit by a fault": faults.num_compilations_hit,
            "tried again": server.num_compilations_tried_again,
        },
        "failures_by_fault": by_fault(tally.failures, faults.events),
        "engine": {name: info[name] for name in info if name.startswith("num_")},
        "restarts": seconds([ended - died for died, ended in server.restarts]),
        "pauses_of_streams_at_restarts": seconds(
            [
                wait.lasted_s
                for wait in tally.waits.pauses
                if any(wait.began <= died <= wait.ended for died, _ in server.restarts)
            ]
        ),
        "pauses_of_a_second_or_more": seconds([wait.lasted_s for wait in tally.waits.pauses if wait.lasted_s >= 1.0]),
        "silences_of_a_second_or_more": seconds([wait.lasted_s for wait in tally.waits.silences]),
        "silence_without_an_excuse": seconds([silence for silence, _ in silences]),
        "rss_mib": {
            role: [use.rss_bytes >> 20, after[role].rss_bytes >> 20] for role, use in before.items() if role in after
        },
    }
    return report, wrong


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    sys.exit(finish(*run(arguments), arguments.report))
