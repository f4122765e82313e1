"""Each fault of scripts/chaos does what its name says, ends, and is the same for the same seed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from endurance import faults as faults_module
from endurance.faults import Faults
from endurance.hooks import VARIABLE, Hooks
from endurance.resources import processes_of
from patience import PATIENCE_S

FILE_BYTES = 4096
SEEDS = range(6)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server whose only process does nothing: its role is `http`."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "hooks"))
    hooks = Hooks(tmp_path / "hooks").create()
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has started, so it needs no more memory
        yield types.SimpleNamespace(
            pid=process.pid, hooks=hooks, folder=tmp_path, cache=tmp_path / "cache", on_tmpfs=False, is_restarting=False
        )
        process.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of any length end at once."""

    async def no_sleep(_: float) -> None:
        return None

    monkeypatch.setattr(faults_module.asyncio, "sleep", no_sleep)


def happen(server: Any, kind: str, seed: int = 0) -> Faults:
    faults = Faults(server, 0.0)
    asyncio.run(faults.happen(kind, random.Random(seed)))
    assert [event.kind for event in faults.events] == [kind]
    return faults


def address_space_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_AS)[0]


def test_memory_is_short_for_a_while(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def look(_: float) -> None:
        seen.append(address_space_limit(server.pid) - psutil.Process(server.pid).memory_info().vms)

    monkeypatch.setattr(faults_module.asyncio, "sleep", look)
    monkeypatch.setattr(random.Random, "choice", lambda *_: "http")
    assert not happen(server, "short memory").events[0].skipped
    assert seen == [1 << 20]
    assert address_space_limit(server.pid) == resource.RLIM_INFINITY


def test_a_stopped_process_goes_on(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def look(_: float) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while psutil.Process(server.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        seen.append("stopped")

    monkeypatch.setattr(faults_module.asyncio, "sleep", look)
    happen(server, "stop the HTTP process")
    assert seen == ["stopped"]
    deadline = time.monotonic() + PATIENCE_S
    while psutil.Process(server.pid).status() == psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("compiles", [True, False])
def test_the_grammar_worker_is_killed_while_it_compiles(
    server: Any, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """An idle one is killed, too, if no compilation begins in time."""
    code = "import sys; print(flush=True); sys.stdin.readline()\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdout.readline()
        stdin = worker.stdin

        async def let_it_compile(_: float) -> None:
            if compiles:
                stdin.write(b"\n")
                stdin.flush()
            time.sleep(0.01)

        monkeypatch.setattr(faults_module.asyncio, "sleep", let_it_compile)
        monkeypatch.setattr(faults_module, "processes_of", lambda _: {worker.pid: "grammar"})
        monkeypatch.setattr(faults_module, "_COMPILES_WITHIN_S", PATIENCE_S if compiles else 0.05)
        assert happen(server, "kill the grammar worker").num_compilations_hit == int(compiles)
        assert worker.wait(PATIENCE_S) == -signal.SIGKILL


def test_another_process_takes_the_place_of_the_server(server: Any) -> None:
    """One fault of this kind at a time, and no other one begins meanwhile."""
    seen: list[list[signal.Signals]] = []
    one_at_a_time = threading.Lock()

    def change(signals: list[signal.Signals]) -> int:
        assert one_at_a_time.acquire(blocking=False)
        seen.append(signals)
        time.sleep(0.1)
        one_at_a_time.release()
        return 1

    async def all_at_once() -> Faults:
        faults = Faults(server, 0.0)
        kinds = ["kill the server", "clock jumps", "restart the server", "clock jumps"]
        await asyncio.gather(*(faults.happen(kind, random.Random(0)) for kind in kinds))
        return faults

    server.change = change
    faults = asyncio.run(all_at_once())
    assert [signals[0] for signals in seen] == [signal.SIGKILL, signal.SIGTERM]
    assert faults.wrong == ["exit code 1 after SIGTERM"], "SIGKILL has its own code"
    changes = [event for event in faults.events if "server" in event.kind]
    assert len(faults.events) == 4
    assert all(
        other.began <= change.began or other.began >= change.ended
        for change in changes
        for other in faults.events
        if other is not change
    )


def test_what_cannot_be_done_is_skipped_by_name(server: Any, quick: None) -> None:
    assert "no scheduler" in happen(server, "kill the scheduler").events[0].skipped
    assert "no detokenizer spare" in happen(server, "stop the detokenizer spare").events[0].skipped
    assert "tmpfs" in happen(server, "full disk").events[0].skipped
    assert "no weight cache" in happen(server, "corrupt weight cache").events[0].skipped
    assert "no step" in happen(server, "failed allocation").events[0].skipped
    os.kill(server.pid, signal.SIGKILL)


def test_the_weight_cache_is_damaged_as_the_seed_says(server: Any, quick: None) -> None:
    server.cache.mkdir()
    entry = server.cache / "a.safetensors"

    def damaged(seed: int) -> bytes:
        entry.write_bytes(bytes(FILE_BYTES))
        happen(server, "corrupt weight cache", seed)
        return entry.read_bytes()

    results = [damaged(seed) for seed in SEEDS]
    assert results == [damaged(seed) for seed in SEEDS]
    assert all(result != bytes(FILE_BYTES) for result in results)
    assert {len(result) == FILE_BYTES for result in results} == {True, False}, (
        "some are cut, and some have another byte"
    )
    assert all(len(result) < FILE_BYTES or FILE_BYTES - result.count(0) == 1 for result in results)


def test_the_clock_of_the_processes_jumps(server: Any) -> None:
    code = (
        "import time; honest = time.time\n"
        "from endurance.hooks import Hooks; Hooks.of_this_process().bend_clock()\n"
        "print(time.time() - honest())"
    )
    for seed in SEEDS:
        happen(server, "clock jumps", seed)
        wanted = random.Random(seed).choice([-1e9, -3600.0, -1.0, 1.0, 3600.0, 1e9, 0.0])
        if abs(wanted) > 1:
            said = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                check=True,
            ).stdout
            assert abs(float(said) - wanted) < abs(wanted) / 2
            break


def test_a_process_whose_fork_server_has_died_is_found(tmp_path: Path) -> None:
    wait = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    start = 'exec 3<&0; "$0" -c "$1" detokenizer <&3 &'

    def popen(*command: str, folder: str) -> subprocess.Popen[str]:
        env = {**os.environ, "TMPDIR": str(tmp_path / folder)}
        return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(popen(sys.executable, "-c", wait, folder="a"))
        orphans = []
        for folder in ("a", "b"):
            fork_server = stack.enter_context(popen("sh", "-c", start, sys.executable, wait, folder=folder))
            assert fork_server.stdout is not None
            orphans.append(int(fork_server.stdout.readline()))
            fork_server.wait()
        assert processes_of(server.pid) == {server.pid: "http", orphans[0]: "detokenizer"}


def test_the_same_seed_draws_the_same_faults(server: Any) -> None:
    faults = Faults(server, 0.0)

    def drawn() -> list[str]:
        rng = random.Random(3)
        return [faults.draw(rng, []) for _ in range(500)]

    assert drawn() == drawn()
    assert set(drawn()) == set(faults.kinds)
