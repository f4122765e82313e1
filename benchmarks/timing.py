"""How long device work takes: medians, on a GPU from events around graph replays, so that launches cost nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
_WARMUP_MS = 25
_REPEAT_MS = 100


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(calls: Sequence[Call], device: torch.device, *, repeat_ms: int = _REPEAT_MS) -> float:
    """Seconds of one call, the median of many rounds over all of `calls`.

    The calls do the same work on inputs of their own: enough of them, and a round's inputs do not fit into the caches.
    On a GPU a round is one graph replay, before which the L2 cache is overwritten. A call must not wait for the device.
    """
    if device.type == "cuda":
        return _graph_s(calls, device, repeat_ms)
    for call in calls:
        call()
    rounds: list[float] = []
    end = time.perf_counter() + repeat_ms / 1000
    while len(rounds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for call in calls:
            call()
        rounds.append(time.perf_counter() - start)
    return statistics.median(rounds) / len(calls)


def _graph_s(calls: Sequence[Call], device: torch.device, repeat_ms: int) -> float:
    # Imported here: Triton takes half a second, and a CPU needs none of it.
    from triton.testing import do_bench

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles kernels and makes handles, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    milliseconds = do_bench(graph.replay, warmup=_WARMUP_MS, rep=repeat_ms, return_mode="median")
    return float(milliseconds) / 1000 / len(calls)
