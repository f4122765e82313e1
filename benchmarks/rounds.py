"""The same requests through several engines, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..srt.entrypoints.engine import Engine
from .offline_workloads import ids_of
from .workloads import Request

_WARMUP_OUTPUT = 8


@dataclass(frozen=True)
class Round:
    """What came of all requests, run once."""

    seconds: float
    output_ids: list[list[int]]
    cached_tokens: int = 0
    num_retractions: int = 0


class Side(Protocol):
    """An engine that is compared."""

    def run(self, requests: Sequence[Request]) -> Round:
        """All of them at once, greedily, each to its full length. Nothing is cached from earlier rounds."""


def warmups(requests: Sequence[Request]) -> list[Request]:
    """The same prompts for a few tokens: what is compiled or recorded at first use is out of the clock."""
    return [Request(one.prompt, one.prompt_len, min(one.output_len, _WARMUP_OUTPUT)) for one in requests]


def in_turns(sides: dict[str, Side], requests: Sequence[Request], num_rounds: int) -> dict[str, list[Round]]:
    """Each side once a round, the order reversed from round to round. Raises ValueError when an answer is short."""
    rounds: dict[str, list[Round]] = {name: [] for name in sides}
    for number in range(num_rounds):
        for name in reversed(sides) if number % 2 else sides:
            done = sides[name].run(requests)
            check_lengths(name, requests, done)
            rounds[name].append(done)
    return rounds


def check_lengths(name: str, requests: Sequence[Request], done: Round) -> None:
    """Speed counts only for whole answers."""
    short = [
        (len(ids), one.output_len)
        for one, ids in zip(requests, done.output_ids, strict=True)
        if len(ids) != one.output_len
    ]
    if short:
        raise ValueError(
            f"{name}: {len(short)} answers do not have the requested length; one has {short[0][0]} tokens "
            f"instead of {short[0][1]}"
        )


def median_seconds(rounds: Sequence[Round]) -> float:
    return statistics.median(one.seconds for one in rounds)


class TercetSide:
    """Our engine: three processes, the way that users take."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, requests: Sequence[Request]) -> Round:
        self.engine.flush_cache(timeout_s=60)
        sampling = [{"temperature": 0, "max_new_tokens": one.output_len, "ignore_eos": True} for one in requests]
        start = time.perf_counter()
        answers: list[dict[str, Any]] = self.engine.generate(
            input_ids=[ids_of(one) for one in requests], sampling_params=sampling, progress=False
        )
        seconds = time.perf_counter() - start
        meta = [answer["meta_info"] for answer in answers]
        return Round(
            seconds,
            [answer["output_ids"] for answer in answers],
            cached_tokens=sum(one["cached_tokens"] for one in meta),
            num_retractions=sum(one["num_retractions"] for one in meta),
        )
