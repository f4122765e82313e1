"""Counts torch's CPU allocations exactly, without sampling."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    """The peak of allocated bytes of CPU tensors during `run`."""
    gc.collect()  # a tensor that was left before `run` must not be freed, and so be subtracted, within it
    gc.disable()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run()
    finally:
        gc.enable()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events, "nothing was counted"
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
