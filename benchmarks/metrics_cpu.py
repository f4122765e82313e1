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
    """Milliseconds that counting adds when a step has a token for each request. The median of many steps, with and
    without counting in turns."""
    metrics, owner = RequestMetrics(), _Owner()
    plain = [Generation(owner, index, str(index)) for index in range(num_requests)]
    counted = [metrics.generation(owner, index, str(index)) for index in range(num_requests)]
    added_ns = []
    for step in range(1, _NUM_STEPS + 1):
        plain_ns = _push_ns(plain, step, lambda: None, lambda: None)
        added_ns.append(_push_ns(counted, step, metrics.begin_message, metrics.end_message) - plain_ns)
    return statistics.median(added_ns) / 1e6


def _push_ns(generations: Sequence[Generation], step: int, begin: Callable[[], None], end: Callable[[], None]) -> int:
    """The processor time of a message of one output for each. `begin`, `end`: called before and after the outputs."""
    outs = [
        TextOut(tokens=TokenOut(rid=one.key, token_ids=[7], finish=None, counts=Counts(9, step)), text="a")
        for one in generations
    ]
    began_ns = time.thread_time_ns()
    begin()
    for generation, out in zip(generations, outs, strict=True):
        generation.push(out)
    end()
    spent_ns = time.thread_time_ns() - began_ns
    for generation in generations:
        generation.take()
    return spent_ns
