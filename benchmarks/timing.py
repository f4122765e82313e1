"""Measures the time of device work.

On a GPU, events around graph replays measure the time, so that launch overhead does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ..srt.machine.cores import usable_cores

Call = Callable[[], object]
_WARMUP_MS = 25
_REPEAT_MS = 100


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_server_threads() -> None:
    """Give torch as many threads as the scheduler process of a server has: one per core, or fewer if so set.

    Where cores have two hardware threads, torch's own default is twice that.
    """
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))


def median_s(calls: Sequence[Call], device: torch.device) -> float:
    """Median seconds of one call, over many rounds of all `calls`.

    The calls do the same work on different inputs. With enough calls, the inputs of a round do not fit into the caches.
    On a GPU, a round is one graph replay, and the L2 cache is overwritten before it. Calls must not wait for the
    device.
    """
    if device.type == "cuda":
        return _graph_s(calls, device)
    for call in calls:
        call()
    rounds: list[float] = []
    end = time.perf_counter() + _REPEAT_MS / 1000
    while len(rounds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for call in calls:
            call()
        rounds.append(time.perf_counter() - start)
    return statistics.median(rounds) / len(calls)


def _graph_s(calls: Sequence[Call], device: torch.device) -> float:
    # Imported here: importing Triton takes half a second, and only a GPU needs it.
    from triton.testing import do_bench

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles kernels and creates handles, which is not possible during graph capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    milliseconds = do_bench(graph.replay, warmup=_WARMUP_MS, rep=_REPEAT_MS, return_mode="median")
    return float(milliseconds) / 1000 / len(calls)
