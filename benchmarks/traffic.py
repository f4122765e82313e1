"""Sends the requests of a run at their arrival times, and collects the outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from .backends import Dialect, Output
from .http_client import HttpClient


async def drive(
    client: HttpClient,
    dialect: Dialect,
    bodies: Sequence[bytes],
    times_s: np.ndarray,
    max_concurrency: int | None,
    on_finished: Callable[[int, Output], None] = lambda index, output: None,
) -> tuple[list[Output], float]:
    """Sends all bodies. Returns the outputs in their order, and their `duration_s`.

    `times_s`: arrival time of each request, float64 [n], ascending. A request is sent later if `max_concurrency`
    requests are running. Its latency counts from the moment of sending. `on_finished` gets the index of a body and its
    output.
    """
    assert len(bodies) == len(times_s)
    slots = asyncio.Semaphore(max_concurrency or max(1, len(bodies)))

    async def send(index: int, body: bytes) -> Output:
        try:
            output = await dialect.send(client, body)
        finally:
            slots.release()
        on_finished(index, output)
        return output

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, (body, at) in enumerate(zip(bodies, times_s.tolist(), strict=True)):
            wait = began + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            await slots.acquire()
            tasks.append(group.create_task(send(index, body)))
    outputs = [task.result() for task in tasks]
    return outputs, duration_s(outputs)


def duration_s(outputs: Sequence[Output]) -> float:
    """The seconds from the first start to the last end; 0 without outputs."""
    if not outputs:
        return 0.0
    return max(output.end_s for output in outputs) - min(output.start_s for output in outputs)
