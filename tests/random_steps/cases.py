"""Random cases for the whole scheduler: its settings, requests that arrive, and what else happens.

A case is drawn from one number. It is plain data, so a case that fails can be made smaller by leaving things out.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from tercet.managers.schedule_policy import POLICIES
from tercet.mem_cache.evict_policy import EVICT_POLICIES

CONTEXT_LEN = 256
POISON = 96
"""A token whose KV is NaN. No prompt has it; the fake model generates it now and then."""
_MAX_TURNS = 300


class Happening(NamedTuple):
    """Something that happens before a turn of the scheduler."""

    turn: int
    kind: str
    """`arrive`, or an event of `_EVENTS`."""
    number: int
    """Of the request that arrives or is aborted, or of the call."""
    request: dict[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """`rig`: the arguments of Rig. `num_turns`: after them, nothing happens any more but the end of a pause."""

    seed: int
    rig: dict[str, Any]
    has_files: bool
    has_poison: bool
    has_listener: bool
    num_turns: int
    happenings: tuple[Happening, ...]


_CHOICES: dict[str, list[Any]] = {
    "page_size": [1, 1, 4, 16],
    "pool_size": [64, 96, 160, 512],
    "max_prefill_tokens": [16, 24, 64, 256],
    "chunked_prefill_size": [16, 20, 64],
    "policy": ["dlpm", "dlpm", *sorted(POLICIES)],
    "tenant_weights": [None, {"a": 3.0, "b": 0.5}],
    "mixed": [False, True],
    "overlap": [False, True],
    "eviction": sorted(EVICT_POLICIES),
    "max_drafts": [0, 0, 0, 3],
    "watermark": [0.0, 0.1],
    "preemption_threshold": [None, 0, 1],
    "max_itl_s": [None, "auto", 0.01],
    "max_queued": [4, 10_000],
    "max_queue_time_s": [None, None, 0.2, 5.0],
    "waiting_timeout": [None, None, 0.5],
    "running_timeout": [None, None, 0.5],
    "explain_s": [None, None, 0.0],
    "conservativeness": [1.0, 0.01],
    "host_blocks": [0, 2, 5, 40],
    "block_pages": [1, 2, 3],
}
_EVENTS = ["pause", "retract", "continue", "continue", "continue", "flush", "abort", "abort", "abort all", "late"]


def draw_case(seed: int) -> Case:
    rng = Random(seed)
    rig = {name: rng.choice(values) for name, values in _CHOICES.items()}
    rig["max_running"] = rng.randint(1, 8)
    grammars = Random(f"grammars {seed}")  # of its own, so that the older choices of each case stay as they were
    rig["joins_forced"] = grammars.random() < 0.5
    constrained = grammars.choice([0.0, 0.0, 0.5])
    num_turns = rng.randint(30, _MAX_TURNS)
    is_overloaded = rng.random() < 0.05
    arrivals_per_turn = 2.0 if is_overloaded else rng.choice([0.05, 0.2, 0.2, 0.6])
    events_per_turn = rng.choice([0.0, 0.02, 0.1])
    happenings: list[Happening] = []
    num_requests = 0
    for turn in range(num_turns):
        while rng.random() < arrivals_per_turn / (1 + arrivals_per_turn):
            request = _draw_request(rng, [0, 1] if is_overloaded else [0, 1, 4, 12, 40])
            if rig["preemption_threshold"] is None:  # there are no priorities
                request["priority"] = 0
            if grammars.random() < constrained:
                request["regex"] = str(grammars.randrange(4))
            happenings.append(Happening(turn, "arrive", num_requests, request))
            num_requests += 1
        if rng.random() < events_per_turn:
            number = max(num_requests - 1 - rng.randrange(8), 0)
            happenings.append(Happening(turn, rng.choice(_EVENTS), number))
    return Case(
        seed,
        rig,
        has_files=rig["host_blocks"] > 0 and rng.random() < 0.5,
        has_poison=rng.random() < 0.25,
        has_listener=rng.random() < 0.25,
        num_turns=num_turns,
        happenings=tuple(happenings),
    )


def _draw_request(rng: Random, lengths: list[int]) -> dict[str, Any]:
    """Prompts of one family share a prefix, and many of all families are short. `lengths`: of outputs."""
    factor = rng.randint(1, 3)
    shared = [factor * index % 7 for index in range(rng.choice([4, 20, 60]))]
    tail = [rng.randrange(6) for _ in range(rng.choice([0, 1, 5, 20]))]
    return {
        "prompt": shared[: rng.randint(1, 60)] + tail,
        "salt": rng.choice(["", "", "x"]),
        "priority": rng.randrange(3),
        "tenant": rng.choice("abc"),
        "max_new_tokens": rng.choice(lengths),
    }
