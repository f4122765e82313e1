"""The workloads of a comparison, and one of them driven through one server."""

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
from ..metrics import measure
from ..traffic import drive
from ..workloads import PromptMaker, Request
from .engines import Room
from .linux_processes import busy_s
from .model_files import DEFAULT, TOY
from .server import Server, ServerFailed, cpu_s_by_name

_WARMUP_OUTPUT = 32
_QUICK_REQUESTS = 4
_QUICK_OUTPUT = 8


@dataclass(frozen=True)
class Workload:
    """All requests are sent at once, so many under way; all are alike in length."""

    name: str
    model: str
    num_requests: int
    concurrency: int
    own_len: int
    output_len: int
    shared_len: int = 0
    """Tokens that all prompts begin with, before their own."""

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
        """Prompts that no other seed gives."""
        if self.shared_len:
            sizes = self.shared_len, self.own_len, self.output_len
            return workloads.shared_prefix(maker, 1, self.num_requests, *sizes, True, seed)
        return workloads.random_ids(maker, self.num_requests, self.own_len, self.output_len, 1.0, seed)

    def warmup(self) -> Workload:
        """As many at once and as long, but with short answers."""
        return replace(self, num_requests=self.concurrency, output_len=min(self.output_len, _WARMUP_OUTPUT))

    def quick(self) -> Workload:
        """Small enough to see only whether everything works."""
        return replace(self, num_requests=min(self.num_requests, _QUICK_REQUESTS), output_len=_QUICK_OUTPUT)


WORKLOADS = {
    one.name: one
    for one in (
        Workload("W1", DEFAULT, 32, 16, 256, 128),
        Workload("W2", DEFAULT, 32, 16, 128, 64, shared_len=896),
        Workload("W3", DEFAULT, 4, 1, 32, 128),
        Workload("W4", TOY, 512, 64, 32, 64),
    )
}


def room_for(model: str) -> Room:
    """For any workload of this model, whichever are run: a server has one set-up for all of them."""
    some = [one for one in WORKLOADS.values() if one.model == model]
    return Room(max(one.concurrency for one in some), max(one.input_len + one.output_len for one in some))


@dataclass(frozen=True)
class Connection:
    """A server and the way to talk to it."""

    server: Server
    client: HttpClient
    dialect: Dialect[Any]
    timeout_s: float
    """for all requests that are sent together"""

    async def send(
        self, requests: Sequence[Request], bodies: Sequence[bytes], concurrency: int
    ) -> tuple[list[Output], float]:
        """What comes back, and the seconds that it takes. Raises ServerFailed when an answer is not as asked."""
        times_s = np.zeros(len(bodies))
        try:
            async with asyncio.timeout(self.timeout_s):
                outputs, duration_s = await drive(self.client, self.dialect, bodies, times_s, concurrency)
        except TimeoutError:
            raise ServerFailed(f"the answers were not complete within {self.timeout_s:g} s") from None
        # The connections of a process that dies are closed before it counts as ended.
        self.server.check_alive(within_s=1.0 if any(output.error for output in outputs) else 0.0)
        check_answers(requests, outputs)
        return outputs, duration_s


async def run(to: Connection, workload: Workload, maker: PromptMaker, seed: str) -> dict[str, Any]:
    """Warms up, then measures: figures of the client, and what server and others took of the processor meanwhile.

    Raises ServerFailed when an answer is not as asked.
    """
    warmup = workload.warmup()
    requests = warmup.requests(maker, zlib.crc32(f"{seed}/warm-up".encode()))
    await to.send(requests, [to.dialect.encode(one) for one in requests], warmup.concurrency)
    requests = workload.requests(maker, zlib.crc32(f"{seed}/measured".encode()))
    bodies = [to.dialect.encode(one) for one in requests]
    gc.collect()  # not while the clock runs
    before, busy, own = to.server.processes(), busy_s(), time.process_time()
    outputs, duration_s = await to.send(requests, bodies, workload.concurrency)
    after, busy, own = to.server.processes(), busy_s() - busy, time.process_time() - own
    by_name = cpu_s_by_name(before, after)
    server_cpu_s = sum(by_name.values())
    return {
        **measure(requests, outputs, duration_s, maker.tokenizer).figures,
        "server_cpu_s": server_cpu_s,
        "server_cpu_s_by_name": by_name,
        "client_cpu_s": own,
        "others_cpu_s": max(0.0, busy - server_cpu_s - own),
        "pss_bytes": to.server.pss_bytes(),
    }


def check_answers(requests: Sequence[Request], outputs: Sequence[Output]) -> None:
    """Speed counts only for real, whole answers to what was asked. Raises ServerFailed."""
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
