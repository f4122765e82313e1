"""Counts torch's CPU allocations exactly, without sampling."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch._C._profiler import _EventType, _ProfilerEvent


def peak_bytes(run: Callable[[], object]) -> int:
    """The peak of allocated bytes of CPU tensors during `run`."""
    gc.collect()
    gc.disable()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run()
    finally:
        gc.enable()
    allocations = sorted(_allocations(profile), key=lambda node: node.start_time_ns)
    assert allocations, "nothing was counted"
    sizes: dict[int, int] = {}
    held = peak = 0
    for change in (node.extra_fields for node in allocations):
        if change.alloc_size > 0:
            sizes[change.ptr] = change.alloc_size
            held += change.alloc_size
            peak = max(peak, held)
        else:
            # torch remembers sizes across profiles by address, so it may report a block that `run` did not allocate.
            held -= sizes.pop(change.ptr, 0)
    return peak


def _allocations(profile: torch.profiler.profile) -> list[_ProfilerEvent]:
    found, unread = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while unread:
        node = unread.pop()
        unread += node.children
        if node.tag == _EventType.Allocation:
            found.append(node)
    return found
