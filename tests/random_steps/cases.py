"""Random cases for the whole scheduler: its settings, requests that arrive, and what else happens.

A case is drawn from one number. It is plain data, so a case that fails can be made smaller by leaving things out.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
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
    """`arrive`, an event of `_EVENTS`, `pause abort`, `weights`, `load adapter`, `unload adapter`, or `restart`."""
    number: int
    """Of the request that arrives or is aborted, of the call, of the adapter, or the version of the weights."""
    request: dict[str, Any] | None = None
    name: str = ""
    """Of the adapter."""


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
_PENALTIES = ["frequency_penalty", "presence_penalty", "repetition_penalty"]
NUM_WEIGHTS = 3
"""Versions of the weights. Those of an update are drawn, so earlier ones come back and find their KV files."""
NUM_ADAPTERS = 3
"""Files of adapters, numbered from 1. The names are a letter, and a name may have any of the files."""
UNSUITABLE, BROKEN = -1, -2
"""Versions that cannot be loaded: the engine refuses them, or fails to load them."""


def draw_case(seed: int) -> Case:
    rng = Random(seed)
    rig = {name: rng.choice(values) for name, values in _CHOICES.items()}
    rig["max_running"] = rng.randint(1, 8)
    grammars = Random(f"grammars {seed}")  # of its own, so that the older choices of each case stay as they were
    rig["joins_forced"] = grammars.random() < 0.5
    constrained = grammars.choice([0.0, 0.0, 0.5])
    lives = Random(f"retention, weights and restarts {seed}")
    rig["max_retained_share"] = lives.choice([0.1, 0.5, 1.0])
    if lives.random() < 0.4:  # other policies honour no retention
        rig["eviction"] = "value"
    returns = Random(f"log probabilities, hidden states and samples {seed}")
    returning = returns.choice([0.0, 0.0, 0.3])
    penalties = Random(f"penalties {seed}")
    penalised = penalties.choice([0.0, 0.0, 0.5])
    adapters = Random(f"adapters {seed}")
    adapted = adapters.choice([0.0, 0.0, 0.6])
    rig["max_loras"] = adapters.choice([1, 2, 3]) if adapted else 0
    loads_per_turn = adapters.choice([0.02, 0.1])
    updates_per_turn = lives.choice([0.0, 0.0, 0.02])
    restarts_per_turn = lives.choice([0.0, 0.0, 0.02])
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
            if penalties.random() < penalised:
                request[penalties.choice(_PENALTIES)] = 0.5
            if adapters.random() < adapted:
                request["lora_name"] = adapters.choice("ab")
            request["stream"] = lives.random() < 0.8
            if rig["eviction"] == "value":
                request |= _draw_retention(lives, num_requests)
            if returns.random() < returning:
                request |= _draw_returned(returns)
            for _ in range(1 if returns.random() > returning / 2 else 2):  # the samples of a request with `n`
                happenings.append(Happening(turn, "arrive", num_requests, dict(request)))
                num_requests += 1
        if rng.random() < events_per_turn:
            number = max(num_requests - 1 - rng.randrange(8), 0)
            happenings.append(Happening(turn, rng.choice(_EVENTS), number))
        if lives.random() < updates_per_turn:
            happenings += _draw_update(lives, turn)
        if adapted and (turn < 3 or adapters.random() < loads_per_turn):
            kind = "unload adapter" if turn >= 3 and adapters.random() < 0.5 else "load adapter"
            name, files = adapters.choice("ab"), adapters.choice([*range(1, NUM_ADAPTERS + 1), UNSUITABLE])
            happenings.append(Happening(turn, kind, files, name=name))
        if lives.random() < restarts_per_turn:
            happenings.append(Happening(turn, "restart", 0))
        if lives.random() < events_per_turn / 8:
            happenings.append(Happening(turn, "pause abort", 0))
    happenings.sort(key=attrgetter("turn"))  # stable
    has_files = rig["host_blocks"] > 0 and rng.random() < 0.5
    has_poison = rng.random() < 0.25
    has_listener = rng.random() < 0.25
    states = Random(f"recurrent layers {seed}")
    if states.random() < 0.25:  # models with them have neither tiers nor drafts nor KV events
        rig |= {"saved_states": states.choice([1, 3, 12]), "min_gain": states.choice([1, 4, 16])}
        rig |= {"host_blocks": 0, "max_drafts": 0}
        has_files = has_listener = False
    return Case(
        seed,
        rig,
        has_files=has_files,
        has_poison=has_poison,
        has_listener=has_listener,
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


def _draw_retention(rng: Random, number: int) -> dict[str, Any]:
    """`continues`: a request whose prompt and output go before this prompt, if it has ended. `tool_call`: turns until
    the scheduler learns that the output is a tool call, and seconds of its retention."""
    seconds = rng.choice([None, None, 0.0, 0.05, 2.0, 3600.0])
    return {
        "session_id": rng.choice(["", "", "s", "u"]),
        "retention_seconds": seconds,
        "tool_call": rng.choice([None, (1, 60.0), (3, 0.5)]) if seconds is None else None,
        "continues": rng.randrange(max(number - 8, 0), number) if number and rng.random() < 0.4 else None,
    }


def _draw_returned(rng: Random) -> dict[str, Any]:
    """`logprobs`: the first position of the prompt and the number of the most probable tokens."""
    kind = rng.choice(["logprobs", "logprobs", "hidden", "both"])
    wish = (rng.choice([-1, 0, 4, 30]), rng.choice([0, 1]))
    return {"hidden": kind != "logprobs", "logprobs": None if kind == "hidden" else wish}


def _draw_update(rng: Random, turn: int) -> list[Happening]:
    """An update of the weights. It must be refused before a pause has begun, and while requests keep their KV."""
    pause = rng.choice(["retract", "retract", "retract", "pause abort", "pause", None])
    version = rng.choice([*range(NUM_WEIGHTS), *range(NUM_WEIGHTS), UNSUITABLE, BROKEN])
    update = [Happening(turn, pause, 0)] if pause is not None else []
    turn += rng.choice([0, 1, 1, 1])  # 0: the pause has only begun
    update.append(Happening(turn, "weights", version))
    return [*update, Happening(turn + rng.randrange(4), "continue", 0)]
