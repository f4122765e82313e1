"""The processor time that `--enable-metrics` adds in the HTTP process, where each output of a request is counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..managers.generation import Generation
from ..managers.request_metrics import RequestMetrics
from ..srt.io_struct import Counts, TextOut, TokenOut
from ..srt.request_options import RequestOptions
from ..srt.sampling_params import SamplingParams

_NUM_STEPS = 200


@dataclass
class _Owner:
    """The request that the samples belong to."""

    rid: str = "request"
    prompt_ids: Sequence[int] = ()
    options: RequestOptions = field(default_factory=lambda: RequestOptions(sampling=SamplingParams()))

    def on_end(self, generation: Generation) -> None:
        """No sample ends."""

    def stop(self, generation: Generation) -> None:
        """No sample is stopped."""

    def held_text(self, generation: Generation) -> str:
        """All text was sent."""
        return ""


def metrics_ms(num_requests: int) -> float:
    """Milliseconds that counting adds when a step has a token for each request. The median of many steps."""
    metrics, owner = RequestMetrics(), _Owner()
    plain = _medians_ms(lambda index: Generation(owner, index, str(index)), num_requests)
    counted = _medians_ms(lambda index: metrics.generation(owner, index, str(index)), num_requests)
    return counted - plain


def _medians_ms(make: Callable[[int], Generation], num_requests: int) -> float:
    generations = [make(index) for index in range(num_requests)]
    spent_ns = []
    for step in range(1, _NUM_STEPS + 1):
        outs = [
            TextOut(tokens=TokenOut(rid=one.key, token_ids=[7], finish=None, counts=Counts(9, step)), text="a")
            for one in generations
        ]
        began_ns = time.thread_time_ns()
        for generation, out in zip(generations, outs, strict=True):
            generation.push(out)
        spent_ns.append(time.thread_time_ns() - began_ns)
        for generation in generations:
            generation.take()
    return statistics.median(spent_ns) / 1e6
