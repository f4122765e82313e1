"""Runs every workload on every server, for a number of rounds."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...srt.machine.cores import usable_cpus
from ...srt.text.tokenizer import load_tokenizer
from ..backends import BACKENDS, RequestSettings
from ..http_client import HttpClient, api_key_header
from ..server_process import ServerFailed, free_port, last_lines, running_server
from ..workloads import PromptMaker, Request
from .engines import HOST, Capacity, Engine, Launch
from .model_files import ModelFiles
from .workload import Connection, Workload, capacity_for, run

_DIALECT = BACKENDS["vllm"].dialect
"""/v1/completions, the API that all compared servers have."""
SAMPLE = "The capital of France is"
_SAMPLE_LEN = 12
_MAX_TRIES = 3


@dataclass(frozen=True)
class Peer:
    """One of the compared servers. Tercet is one of them."""

    name: str
    engine: Engine
    program: Path
    version: str
    flags: Sequence[str]
    """Further flags for this server."""

    def launch(self, model: ModelFiles, capacity: Capacity, port: int) -> Launch | None:
        launch = self.engine.launch(self.program, model, capacity, port)
        if launch is None:
            return None
        words = [word for flag in self.flags for word in flag.split("=", 1)]
        asked = [value for flag, value in pairwise(words) if flag == "--dtype"]
        dtype = launch.dtype and [launch.dtype, *asked][-1]
        return replace(launch, argv=[*launch.argv, *self.flags], dtype=dtype)


@dataclass(frozen=True)
class Plan:
    peers: Sequence[Peer]
    workloads: Sequence[Workload]
    models: Mapping[str, ModelFiles]
    num_rounds: int
    seed: int
    ready_timeout_s: float
    timeout_s: float
    """Time limit for all requests of a workload."""
    max_other_load: float
    """Maximum share of the cores for other processes. A measurement above it is repeated."""
    logs: Path


@dataclass(frozen=True)
class Failure:
    """The reason for a missing figure, and the end of the server's log."""

    message: str
    log: str


class Comparison:
    """Runs the plan and collects the results. An interrupted run keeps the results so far."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """`say`: prints one line of progress."""
        self.plan = plan
        self.starts: list[dict[str, Any]] = []
        """One entry for each start of a server that became ready."""
        self.runs: list[dict[str, Any]] = []
        """One entry for each measurement, with the figures of `workload.run`."""
        self.failures: dict[tuple[str, str], Failure] = {}
        """Failures by peer and workload. A failed workload is not tried again."""
        self._say = say
        self._makers = {
            name: PromptMaker(load_tokenizer(str(files.folder)), as_ids=True) for name, files in plan.models.items()
        }

    async def run(self) -> None:
        for number in range(self.plan.num_rounds):
            for model in self.plan.models.values():
                of_model = [workload for workload in self.plan.workloads if workload.model == model.name]
                for peer in reversed(self.plan.peers) if number % 2 else self.plan.peers:
                    if peer.launch(model, capacity_for(model.name), 0) is None:
                        continue  # the peer cannot read this model
                    todo: Sequence[Workload] = [w for w in of_model if (peer.name, w.name) not in self.failures]
                    while todo:
                        todo = await self._visit(number, peer, model, todo)

    async def _visit(self, number: int, peer: Peer, model: ModelFiles, todo: Sequence[Workload]) -> Sequence[Workload]:
        """Starts the peer, runs the workloads, and stops the peer.

        Returns the workloads that remain after a failure. They need a newly started peer.
        """
        log = self.plan.logs / f"{peer.name}-{model.name}-round{number + 1}.log"
        lost = todo  # a peer that does not become ready fails at all workloads
        try:
            async with self._started(number, peer, model, log) as connection:
                for index, workload in enumerate(todo):
                    lost = todo[index : index + 1]
                    await self._measure(number, peer, workload, connection)
        except ServerFailed as error:
            for workload in lost:
                self.failures[peer.name, workload.name] = Failure(str(error), error.log)
            self._say(f"{peer.name} failed at {', '.join(workload.name for workload in lost)}: {error}")
            return todo[todo.index(lost[-1]) + 1 :]
        return []

    @asynccontextmanager
    async def _started(self, number: int, peer: Peer, model: ModelFiles, log: Path) -> AsyncIterator[Connection]:
        """Starts the peer and waits until it has answered a request. Raises ServerFailed."""
        port = free_port()
        launch = peer.launch(model, capacity_for(model.name), port)
        assert launch is not None, "it can read the model"
        client = HttpClient(f"http://{HOST}:{port}", api_key_header())
        with running_server(launch.argv, launch.env, log) as server:
            try:
                await server.wait_until_healthy(client, self.plan.ready_timeout_s)
                connection = Connection(server, client, _DIALECT(RequestSettings(launch.model)), self.plan.timeout_s)
                await self._sample(connection, 1)
                ready_s = time.monotonic() - server.began_s
                self._say(f"round {number + 1}: {peer.name}, {model.name} model, ready after {ready_s:.1f} s")
                said = server.log_text()
                warnings = peer.engine.warnings(said)
                for warning in warnings:
                    self._say(f"{peer.name} warns: {warning}")
                self.starts.append(
                    {
                        "peer": peer.name,
                        "model": model.name,
                        "round": number,
                        "ready_s": ready_s,
                        "pss_bytes": server.pss_bytes(),
                        "kv_bytes": launch.kv_bytes or peer.engine.kv_bytes(said),
                        "dtype": launch.dtype or peer.engine.dtype(said),
                        "warnings": warnings,
                        "sample": await self._sample(connection, _SAMPLE_LEN),
                        "argv": launch.argv,
                        "env": dict(launch.env),
                    }
                )
                yield connection
            except ServerFailed as error:
                error.log = last_lines(log)  # read before the server is stopped, because it logs its shutdown
                raise
            finally:
                await client.close()

    async def _sample(self, connection: Connection, length: int) -> str:
        """The peer's continuation of a well-known sentence. It shows a reader whether all peers run the same model."""
        ids = next(iter(self._makers.values())).tokenizer.encode(SAMPLE)
        request = Request(ids, len(ids), length)
        outputs = await connection.send([request], [connection.dialect.encode(request)], 1)
        return outputs[0][0].text

    async def _measure(self, number: int, peer: Peer, workload: Workload, connection: Connection) -> None:
        """Measures one workload.

        The measurement is repeated with other prompts while other processes use too much of the machine. The try with
        the least use counts.
        """
        tries: list[dict[str, Any]] = []
        while len(tries) < _MAX_TRIES:
            seed = f"{self.plan.seed}/{number}/{len(tries)}/{workload.name}"
            figures = await run(connection, workload, self._makers[workload.model], seed)
            figures["others_share"] = figures["others_cpu_s"] / (figures["duration"] * usable_cpus())
            tries.append(figures)
            if figures["others_share"] <= self.plan.max_other_load:
                break
        best = min(tries, key=lambda figures: figures["others_share"])
        self.runs.append({"peer": peer.name, "workload": workload.name, "round": number, "tries": len(tries), **best})
        speed, others = best["output_throughput"], best["others_share"]
        self._say(f"round {number + 1}: {peer.name}, {workload.name}: {speed:.0f} tokens/s; others took {others:.1%}")
