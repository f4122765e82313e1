"""Runs the same requests on several engines, in alternating order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..srt.entrypoints.engine import Engine
from .offline_workloads import ids_of
from .workloads import Request

_WARMUP_OUTPUT = 8


@dataclass(frozen=True)
class Round:
    """The result of running all requests once."""

    seconds: float
    output_ids: list[list[int]]
    cached_tokens: int = 0
    num_retractions: int = 0


class Side(Protocol):
    """One of the compared engines."""

    def run(self, requests: Sequence[Request]) -> Round:
        """Runs all requests at once, greedily and to their full lengths. No prefix of earlier rounds is cached."""


def warmups(requests: Sequence[Request]) -> list[Request]:
    """The same prompts with short outputs. They trigger compilation and graph recording before the timed rounds."""
    return [
        Request(request.prompt, request.prompt_len, min(request.output_len, _WARMUP_OUTPUT)) for request in requests
    ]


def run_alternating(
    sides: dict[str, Side],
    requests: Sequence[Request],
    num_rounds: int,
    on_failure: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[Round]]:
    """Runs each side once in each round. The order is reversed in every second round.

    `on_failure`: is told of a side that fails, unless it is the first one. This side runs no more, and has no rounds in
    the result. None: its error is raised.

    Raises ValueError for an answer that is too short.
    """
    rounds: dict[str, list[Round]] = {name: [] for name in sides}
    first = next(iter(sides))
    for number in range(num_rounds):
        for name in reversed(sides) if number % 2 else sides:
            if name not in rounds:
                continue
            try:
                done = sides[name].run(requests)
                check_lengths(name, requests, done)
            except Exception as error:
                if on_failure is None or name == first:
                    raise
                on_failure(name, error)
                del rounds[name]
            else:
                rounds[name].append(done)
    return rounds


def check_lengths(name: str, requests: Sequence[Request], done: Round) -> None:
    """Raises ValueError for an answer that is too short, because its speed would not be comparable."""
    short = [
        (len(ids), request.output_len)
        for request, ids in zip(requests, done.output_ids, strict=True)
        if len(ids) != request.output_len
    ]
    if short:
        raise ValueError(
            f"{name}: {len(short)} answers do not have the requested length; one has {short[0][0]} tokens "
            f"instead of {short[0][1]}"
        )


def median_seconds(rounds: Sequence[Round]) -> float:
    return statistics.median(round_.seconds for round_ in rounds)


class TercetSide:
    """Tercet: an Engine with its three processes, as users run it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, requests: Sequence[Request]) -> Round:
        self.engine.flush_cache(timeout_s=60)
        sampling = [
            {"temperature": 0, "max_new_tokens": request.output_len, "ignore_eos": True} for request in requests
        ]
        start = time.perf_counter()
        answers: list[dict[str, Any]] = self.engine.generate(
            input_ids=[ids_of(request) for request in requests], sampling_params=sampling, progress=False
        )
        seconds = time.perf_counter() - start
        meta = [answer["meta_info"] for answer in answers]
        return Round(
            seconds,
            [answer["output_ids"] for answer in answers],
            cached_tokens=sum(info["cached_tokens"] for info in meta),
            num_retractions=sum(info["num_retractions"] for info in meta),
        )
