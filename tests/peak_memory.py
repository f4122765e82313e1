"""What torch takes from the C library's heap while something runs: counted, not sampled."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes of tensors on the CPU that were taken and not given back at any moment."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events, "nothing was counted"
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
