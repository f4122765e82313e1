"""Measure a server's start: the time from exec to the first 200 of /health, and the memory of each process.

    tercet bench startup --rounds 5 MODEL --dtype bfloat16

Flags that are not the benchmark's own go to `tercet serve`. The first start is not timed: it brings files into the page
cache and fills the weight cache. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from ..srt.entrypoints.processes import Role
from .argument_types import above_zero, benchmark_parser, positive
from .http_client import HttpClient, HttpError, api_key_header
from .linux_processes import Process, pss_bytes
from .results import Result, Table, add_results_arguments, finish, number
from .server_process import ServerFailed, ended_by_signals, free_port, last_lines, running_server

_HOST = "127.0.0.1"
_PROMPT_ID_LIMIT = 100
_SETTLE_S = 0.5
"""Pause after the server is ready, in which threads end and memory is returned to the system."""
_MIB = 1 << 20
_CHILDREN = get_args(Role)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: 1 if a server failed, 130 if a signal interrupted it."""
    parser = _parser()
    args, serve_flags = parser.parse_known_args(argv)
    for flag in serve_flags:
        if flag.partition("=")[0] in ("--host", "--port"):
            parser.error(f"{flag} has no effect: the server listens on {_HOST} and a free port")
    try:
        with ended_by_signals():
            starts = [asyncio.run(_start(args, serve_flags)) for _ in range(1 + args.rounds)][1:]
    except ServerFailed as error:
        sys.stderr.write(f"{parser.prog}: {error}\n{error.log}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    result = Result("startup", "Start-up and memory", parser.prog, argv, None)
    _fill(result, args, starts)
    finish(result, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("startup", __doc__, "[options] [MODEL] [flags of tercet serve]", allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=5, help="number of measured starts (default: 5)")
    parser.add_argument(
        "--num-requests", type=positive, default=4, help="requests before the second memory measurement (default: 4)"
    )
    parser.add_argument("--input-len", type=positive, default=256, help="tokens of each prompt (default: 256)")
    parser.add_argument("--output-len", type=positive, default=32, help="tokens of each answer (default: 32)")
    parser.add_argument(
        "--ready-timeout-s", type=above_zero, default=300.0, help="maximum seconds for a start (default: 300)"
    )
    add_results_arguments(parser)
    return parser


async def _start(args: argparse.Namespace, serve_flags: Sequence[str]) -> dict[str, Any]:
    """Starts a server, measures it and stops it. Raises ServerFailed."""
    port = free_port()
    argv = [sys.executable, "-m", "tercet", "serve", *serve_flags, "--host", _HOST, "--port", str(port)]
    client = HttpClient(f"http://{_HOST}:{port}", api_key_header())
    with tempfile.TemporaryDirectory(prefix="tercet-startup-") as folder:
        log = Path(folder) / "log"
        with running_server(argv, {}, log) as server:
            try:
                await server.wait_until_healthy(client, args.ready_timeout_s)
                ready_s = time.monotonic() - server.began_s
                await asyncio.sleep(_SETTLE_S)
                processes = server.processes()
                pss_ready = _pss(processes)
                state = (await _ask(client, "GET", "/server_info"))["internal_states"][0]
                for _ in range(args.num_requests):
                    await _ask(client, "POST", "/generate", _request(args))
                return {
                    "ready_s": ready_s,
                    "cpu_s": sum(process.cpu_s for process in processes.values()),
                    "pss_bytes_ready": pss_ready,
                    "pss_bytes_used": _pss(server.processes()),
                    "kv_bytes_per_token": state["kv_bytes"] / state["max_total_num_tokens"],
                }
            except ServerFailed as error:
                error.log = last_lines(log)
                raise
            finally:
                await client.close()


def _request(args: argparse.Namespace) -> bytes:
    ids = [random.randrange(_PROMPT_ID_LIMIT) for _ in range(args.input_len)]
    sampling = {"max_new_tokens": args.output_len, "temperature": 0.0, "ignore_eos": True}
    return json.dumps({"input_ids": ids, "sampling_params": sampling}).encode()


async def _ask(client: HttpClient, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    """Raises ServerFailed."""
    try:
        answer = await client.request(method, path, body)
    except HttpError as error:
        raise ServerFailed(f"{path}: {error}") from error
    if answer.status != 200:
        raise ServerFailed(f"{path} returned status {answer.status}: {answer.body[:300].decode(errors='replace')}")
    found: dict[str, Any] = json.loads(answer.body)
    return found


def _pss(processes: dict[int, Process]) -> dict[str, int]:
    """Memory (PSS) in bytes by role: each child's role, and "http" for the main process."""
    found: Counter[str] = Counter()
    for pid, process in processes.items():
        found[process.name if process.name in _CHILDREN else "http"] += pss_bytes(pid)
    return dict(found)


def _fill(result: Result, args: argparse.Namespace, starts: list[dict[str, Any]]) -> None:
    times = [start["ready_s"] for start in starts]
    table = result.table("Start: exec to /health 200", ["median s", "least s", "most s", "processor s"])
    cpu_s = statistics.median(start["cpu_s"] for start in starts)
    table.row(*map(number, (statistics.median(times), min(times), max(times), cpu_s)))
    table = result.table("Memory (PSS): medians", ["MiB", "when ready", "after the requests"])
    for name in sorted(starts[0]["pss_bytes_ready"]):
        _memory_row(table, name, starts, lambda sizes, name=name: sizes.get(name, 0))
    _memory_row(table, "all", starts, lambda sizes: sum(sizes.values()))
    tokens = args.num_requests * (args.input_len + args.output_len)
    table.notes.append(
        f"{args.num_requests} requests, one after the other, of {args.input_len} tokens in and {args.output_len} out, "
        f"write {number(tokens * starts[0]['kv_bytes_per_token'] / _MIB)} MiB of keys and values. On a CPU, an idle "
        "engine also touches memory of the KV pool in advance. It counts, too."
    )
    result.values = {"starts": starts}


def _memory_row(table: Table, name: str, starts: list[dict[str, Any]], size_of: Any) -> None:
    medians = (
        statistics.median(size_of(start[when]) for start in starts) for when in ("pss_bytes_ready", "pss_bytes_used")
    )
    table.row(name, *(number(size / _MIB) for size in medians))


if __name__ == "__main__":
    sys.exit(main())
