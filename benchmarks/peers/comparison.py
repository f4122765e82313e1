"""Every workload on every server, round after round."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...srt.machine.cores import usable_cpus
from ...srt.text.tokenizer import load_tokenizer
from ..backends import BACKENDS, Wish
from ..http_client import HttpClient
from ..workloads import PromptMaker, Request
from .engines import HOST, Engine, Launch, Room
from .model_files import ModelFiles
from .server import Server, ServerFailed, free_port, last_lines
from .workload import Connection, Workload, room_for, run

_DIALECT = BACKENDS["vllm"].dialect
"""/v1/completions, which all of them have."""
SAMPLE = "The capital of France is"
_SAMPLE_LEN = 12
_MOST_TRIES = 3


@dataclass(frozen=True)
class Peer:
    """A server that takes part; Tercet is one."""

    name: str
    engine: Engine
    program: Path
    version: str
    flags: Sequence[str]
    """further ones of its own"""

    def launch(self, model: ModelFiles, room: Room, port: int) -> Launch | None:
        launch = self.engine.launch(self.program, model, room, port)
        return None if launch is None else replace(launch, argv=[*launch.argv, *self.flags])


@dataclass(frozen=True)
class Plan:
    peers: Sequence[Peer]
    workloads: Sequence[Workload]
    models: Mapping[str, ModelFiles]
    num_rounds: int
    seed: int
    ready_timeout_s: float
    timeout_s: float
    """for all requests of a workload"""
    max_other_load: float
    """Share of the cores that others may take during a measurement before it is repeated."""
    logs: Path


@dataclass(frozen=True)
class Failure:
    """Why there is no figure, and the end of the server's log."""

    message: str
    log: str


class Comparison:
    """What is measured, as it grows; a run that is cut short leaves what it has."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """`say`: told what is going on, a line at a time."""
        self.plan = plan
        self.starts: list[dict[str, Any]] = []
        """One entry for every server that became ready."""
        self.runs: list[dict[str, Any]] = []
        """One for every measurement: figures of the client and of `workload.run`."""
        self.failures: dict[tuple[str, str], Failure] = {}
        """By peer and workload; what failed once is not tried again."""
        self._say = say
        self._makers = {
            name: PromptMaker(load_tokenizer(str(files.folder)), as_ids=True) for name, files in plan.models.items()
        }

    async def run(self) -> None:
        for number in range(self.plan.num_rounds):
            for model in self.plan.models.values():
                of_model = [one for one in self.plan.workloads if one.model == model.name]
                for peer in reversed(self.plan.peers) if number % 2 else self.plan.peers:
                    if peer.launch(model, room_for(model.name), 0) is None:
                        continue  # there is no row to fill
                    todo: Sequence[Workload] = [one for one in of_model if (peer.name, one.name) not in self.failures]
                    while todo:
                        todo = await self._visit(number, peer, model, todo)

    async def _visit(self, number: int, peer: Peer, model: ModelFiles, todo: Sequence[Workload]) -> Sequence[Workload]:
        """Starts the peer, runs the workloads, ends it. What is left after a failure is returned: it needs a peer
        started afresh."""
        log = self.plan.logs / f"{peer.name}-{model.name}-round{number + 1}.log"
        lost = todo  # when it does not even become ready
        try:
            async with self._started(number, peer, model, log) as to:
                for index, workload in enumerate(todo):
                    lost = todo[index : index + 1]
                    await self._measure(number, peer, workload, to)
        except ServerFailed as error:
            for workload in lost:
                self.failures[peer.name, workload.name] = Failure(str(error), error.log)
            self._say(f"{peer.name} failed at {', '.join(one.name for one in lost)}: {error}")
            return todo[todo.index(lost[-1]) + 1 :]
        return []

    @asynccontextmanager
    async def _started(self, number: int, peer: Peer, model: ModelFiles, log: Path) -> AsyncIterator[Connection]:
        """The peer, ready: it has answered. Raises ServerFailed."""
        port = free_port()
        launch = peer.launch(model, room_for(model.name), port)
        assert launch is not None, "it can read the model"
        client = HttpClient(f"http://{HOST}:{port}")
        with Server(launch.argv, launch.env, log) as server:
            try:
                await server.wait_until_healthy(client, self.plan.ready_timeout_s)
                to = Connection(server, client, _DIALECT(Wish(launch.model)), self.plan.timeout_s)
                await self._sample(to, 1)
                ready_s = time.monotonic() - server.began_s
                self._say(f"round {number + 1}: {peer.name}, {model.name} model, ready after {ready_s:.1f} s")
                self.starts.append(
                    {
                        "peer": peer.name,
                        "model": model.name,
                        "round": number,
                        "ready_s": ready_s,
                        "pss_bytes": server.pss_bytes(),
                        "kv_bytes": launch.kv_bytes or peer.engine.kv_bytes(server.log_text()),
                        "sample": await self._sample(to, _SAMPLE_LEN),
                        "argv": launch.argv,
                        "env": dict(launch.env),
                    }
                )
                yield to
            except ServerFailed as error:
                error.log = last_lines(log)  # before it is ended, which it has things to say about
                raise
            finally:
                await client.close()

    async def _sample(self, to: Connection, length: int) -> str:
        """How it goes on with a well-known sentence: for people, who see whether it is the same model."""
        ids = next(iter(self._makers.values())).tokenizer.encode(SAMPLE)
        request = Request(ids, len(ids), length)
        outputs = await to.send([request], [to.dialect.encode(request)], 1)
        return outputs[0][0].text

    async def _measure(self, number: int, peer: Peer, workload: Workload, to: Connection) -> None:
        """Once; again, with other prompts, while others take too much of the machine. The quietest counts."""
        tries: list[dict[str, Any]] = []
        while len(tries) < _MOST_TRIES:
            seed = f"{self.plan.seed}/{number}/{len(tries)}/{workload.name}"
            figures = await run(to, workload, self._makers[workload.model], seed)
            figures["others_share"] = figures["others_cpu_s"] / (figures["duration"] * usable_cpus())
            tries.append(figures)
            if figures["others_share"] <= self.plan.max_other_load:
                break
        best = min(tries, key=lambda one: one["others_share"])
        self.runs.append({"peer": peer.name, "workload": workload.name, "round": number, "tries": len(tries), **best})
        speed, others = best["output_throughput"], best["others_share"]
        self._say(f"round {number + 1}: {peer.name}, {workload.name}: {speed:.0f} tokens/s; others took {others:.1%}")
