"""Sends the requests of a run when their time has come, and gathers what becomes of them."""

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
    max_concurrency: int | None = None,
    on_finished: Callable[[Output], None] = lambda output: None,
) -> tuple[list[Output], float]:
    """Outputs in the order of the bodies, and the seconds from the first start to the last end.

    `times_s`: float64 [n] ascending, when each is sent; later where `max_concurrency` are under way. A request's own
    clock starts when it is sent.
    """
    assert len(bodies) == len(times_s)
    slots = asyncio.Semaphore(max_concurrency or max(1, len(bodies)))

    async def one(body: bytes) -> Output:
        try:
            output = await dialect.send(client, body)
        finally:
            slots.release()
        on_finished(output)
        return output

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, at in zip(bodies, times_s.tolist(), strict=True):
            wait = began + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            await slots.acquire()
            tasks.append(group.create_task(one(body)))
    outputs = [task.result() for task in tasks]
    if not outputs:
        return outputs, 0.0
    return outputs, max(one.end_s for one in outputs) - min(one.start_s for one in outputs)
