"""The workloads of a comparison, and the code that runs one of them on one server."""

from __future__ import annotations

import asyncio
import gc
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import workloads
from ..backends import Dialect, Output
from ..http_client import HttpClient
from ..linux_processes import busy_s
from ..metrics import measure
from ..server_process import Server, ServerFailed, cpu_s_by_name
from ..traffic import drive
from ..workloads import PromptMaker, Request
from .engines import Capacity
from .model_files import DEFAULT, TOY

_WARMUP_OUTPUT = 32
_QUICK_REQUESTS = 4
_QUICK_OUTPUT = 8


@dataclass(frozen=True)
class Workload:
    """A workload. All its requests have the same lengths and arrive at once; `concurrency` limits the running ones."""

    name: str
    model: str
    num_requests: int
    concurrency: int
    own_len: int
    output_len: int
    shared_len: int = 0
    """Number of tokens that all prompts share at their start, before their own tokens."""

    @property
    def input_len(self) -> int:
        return self.shared_len + self.own_len

    @property
    def title(self) -> str:
        shared = f"{self.shared_len} shared + " if self.shared_len else ""
        return (
            f"{self.name}: {self.num_requests} requests, {shared}{self.own_len} tokens in, {self.output_len} out, "
            f"concurrency {self.concurrency}, {self.model} model"
        )

    def requests(self, maker: PromptMaker, seed: int) -> list[Request]:
        """The requests of this seed. Different seeds give different prompts."""
        if self.shared_len:
            return workloads.shared_prefix(
                maker,
                num_groups=1,
                prompts_per_group=self.num_requests,
                system_prompt_len=self.shared_len,
                question_len=self.own_len,
                output_len=self.output_len,
                ordered=True,
                seed=seed,
            )
        return workloads.random_ids(maker, self.num_requests, self.own_len, self.output_len, 1.0, seed)

    def warmup(self) -> Workload:
        """The warm-up workload: the same concurrency and prompt lengths, with short outputs."""
        return replace(self, num_requests=self.concurrency, output_len=min(self.output_len, _WARMUP_OUTPUT))

    def quick(self) -> Workload:
        """A small version of the workload, which only checks that everything works."""
        return replace(self, num_requests=min(self.num_requests, _QUICK_REQUESTS), output_len=_QUICK_OUTPUT)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", DEFAULT, 32, 16, 256, 128),
        Workload("W2", DEFAULT, 32, 16, 128, 64, shared_len=896),
        Workload("W3", DEFAULT, 4, 1, 32, 128),
        Workload("W4", TOY, 512, 64, 32, 64),
    )
}


def capacity_for(model: str) -> Capacity:
    """The capacity for every workload of a model, so that a server's set-up does not depend on the chosen workloads."""
    of_model = [workload for workload in WORKLOADS.values() if workload.model == model]
    return Capacity(
        max(workload.concurrency for workload in of_model),
        max(workload.input_len + workload.output_len for workload in of_model),
    )


@dataclass(frozen=True)
class Connection:
    """A running server with its client and API."""

    server: Server
    client: HttpClient
    dialect: Dialect[Any]
    timeout_s: float
    """Time limit for all requests of one `send`."""

    async def send(
        self, requests: Sequence[Request], bodies: Sequence[bytes], concurrency: int
    ) -> tuple[list[Output], float]:
        """Sends the requests. Returns the outputs and the seconds. Raises ServerFailed for a wrong answer."""
        times_s = np.zeros(len(bodies))
        try:
            async with asyncio.timeout(self.timeout_s):
                outputs, duration_s = await drive(self.client, self.dialect, bodies, times_s, concurrency)
        except TimeoutError:
            raise ServerFailed(f"the answers were not complete after {self.timeout_s:g} s") from None
        # A dying process closes its connections a moment before its end is visible.
        self.server.check_alive(within_s=1.0 if any(output.error for output in outputs) else 0.0)
        check_answers(requests, outputs)
        return outputs, duration_s


async def run(connection: Connection, workload: Workload, maker: PromptMaker, seed: str) -> dict[str, Any]:
    """Warms up a server and measures a workload on it.

    Returns the client's figures, and the processor time of the server, of the client and of other processes. Raises
    ServerFailed for a wrong answer.
    """
    warmup = workload.warmup()
    requests = warmup.requests(maker, zlib.crc32(f"{seed}/warm-up".encode()))
    await connection.send(requests, [connection.dialect.encode(request) for request in requests], warmup.concurrency)
    requests = workload.requests(maker, zlib.crc32(f"{seed}/measured".encode()))
    bodies = [connection.dialect.encode(request) for request in requests]
    gc.collect()  # now, so that no collection runs during the measurement
    before, busy, own = connection.server.processes(), busy_s(), time.process_time()
    outputs, duration_s = await connection.send(requests, bodies, workload.concurrency)
    after, busy, own = connection.server.processes(), busy_s() - busy, time.process_time() - own
    by_name = cpu_s_by_name(before, after)
    server_cpu_s = sum(by_name.values())
    return {
        **measure(requests, outputs, duration_s, maker.tokenizer).figures,
        "server_cpu_s": server_cpu_s,
        "server_cpu_s_by_name": by_name,
        "client_cpu_s": own,
        "others_cpu_s": max(0.0, busy - server_cpu_s - own),
        "pss_bytes": connection.server.pss_bytes(),
    }


def check_answers(requests: Sequence[Request], outputs: Sequence[Output]) -> None:
    """Raises ServerFailed for an answer that is empty, has another length, or belongs to another prompt length."""
    for request, output in zip(requests, outputs, strict=True):
        if output.error is not None:
            raise ServerFailed(f"a request failed: {output.error}")
        if output.completion_tokens is None:
            raise ServerFailed("the server reports no token counts")
        if output.completion_tokens != request.output_len:
            raise ServerFailed(
                f"an answer has {output.completion_tokens} tokens instead of {request.output_len}; the server may "
                "ignore ignore_eos"
            )
        if output.prompt_tokens != request.prompt_len:
            raise ServerFailed(
                f"the server counted {output.prompt_tokens} tokens in a prompt of {request.prompt_len} token ids"
            )
        if not output.text:
            raise ServerFailed("an answer has no text")
