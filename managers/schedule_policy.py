"""The order of the waiting queue, the expected memory of running requests, and the order of retraction."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from .kv_cache_manager import KVCacheManager
from .req import Req

CLIP_MAX_NEW_TOKENS = 4096
"""A request is expected to generate at most so many tokens. Otherwise one large `max_new_tokens` would reserve the
whole pool."""
MAX_SORTED = 128
"""Requests that a policy sorts in one pass. A policy that reads the cache leaves a longer queue in the order of
arrival, because matching costs more than the order gains. Another policy sorts the first of the queue."""
MAX_PASSED_OVER = 32
"""A request that was passed over so often goes first, under every policy. So no policy starves a request."""


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy may read beside the requests."""

    kv: KVCacheManager
    now_s: float
    """On the clock of `Req.arrived_s`."""
    seed: int = 0


Order = Callable[[Sequence[Req], PolicyInputs], Sequence[Req]]
"""Orders requests, best first. It gets them in the order of the queue, and equal ones keep it. It has no effect."""


def longest_prefix_first(reqs: Sequence[Req], inputs: PolicyInputs) -> Sequence[Req]:
    return sorted(reqs, key=inputs.kv.match_len, reverse=True)  # equal ones keep their order


def heaviest_subtree_first(reqs: Sequence[Req], inputs: PolicyInputs) -> Sequence[Req]:
    """Depth-first order of the cache's tree. Of two branches, the one that more requests continue goes first."""
    paths = {req: inputs.kv.match_path(req) for req in reqs}
    weights = Counter(chain.from_iterable(paths.values()))
    numbers = {node: number for number, node in enumerate(weights)}
    leaves_last = (1, 0)  # behind all branches, whose first number is negative
    return sorted(reqs, key=lambda req: [*((-weights[node], numbers[node]) for node in paths[req]), leaves_last])


def longest_output_first(reqs: Sequence[Req], inputs: PolicyInputs) -> Sequence[Req]:
    return sorted(reqs, key=lambda req: -req.num_new_left)


def random_order(reqs: Sequence[Req], inputs: PolicyInputs) -> Sequence[Req]:
    """Each request draws its place once, from the seed and its arrival."""
    return sorted(reqs, key=lambda req: hashlib.blake2b(b"%d %d" % (inputs.seed, req.arrival)).digest())


def shortest_prefill_first(reqs: Sequence[Req], inputs: PolicyInputs) -> Sequence[Req]:
    """Fewest uncached tokens first."""
    return sorted(reqs, key=lambda req: _num_uncached(req, inputs))


def highest_response_ratio_next(reqs: Sequence[Req], inputs: PolicyInputs) -> Sequence[Req]:
    """Longest wait for each uncached token first. It is the order of (wait + service) / service, because the time of a
    prefill grows with its tokens."""
    return sorted(reqs, key=lambda req: (req.arrived_s - inputs.now_s) / _num_uncached(req, inputs))


def _num_uncached(req: Req, inputs: PolicyInputs) -> int:
    """At least 1, because the last token is always computed."""
    return req.num_tokens - inputs.kv.match_len(req)


@dataclass(frozen=True)
class Policy:
    """A row of the table of policies. `order`: None keeps the order of arrival."""

    order: Order | None
    reads_cache: bool = False


POLICIES = {
    "fcfs": Policy(None),
    "lpm": Policy(longest_prefix_first, reads_cache=True),
    "dfs-weight": Policy(heaviest_subtree_first, reads_cache=True),
    "lof": Policy(longest_output_first),
    "random": Policy(random_order),
    "shortest-prefill-first": Policy(shortest_prefill_first, reads_cache=True),
    "hrrn": Policy(highest_response_ratio_next, reads_cache=True),
    "dlpm": Policy(longest_prefix_first, reads_cache=True),  # of one tenant; FairPolicy has the rest
}


class SchedulePolicy:
    """Orders the waiting queue by a policy of the table, and lets no request be passed over forever.

    Requests of higher priority go first. Among equals there is a bound: when MAX_PASSED_OVER passes have admitted later
    arrivals before a request, every later pass tries it before all later arrivals. Then only memory, prompts in chunks,
    a prefix that the step computes, its grammar or its KV files (READ_TIMEOUT_S) delay it.
    """

    def __init__(self, name: str, kv: KVCacheManager, clock: Callable[[], float], seed: int = 0) -> None:
        """`clock`: that of `Req.arrived_s`. Raises ValueError on an unknown name."""
        if name not in POLICIES:
            raise ValueError(f"schedule policy must be one of {', '.join(POLICIES)}; got {name!r}")
        self._policy = POLICIES[name]
        self._kv = kv
        self._clock = clock
        self._seed = seed

    def order(self, waiting: Collection[Req]) -> Iterable[Req]:
        """All of `waiting`, best first. `waiting` is in the order of `Req.place`."""
        if self._policy.order is None or (self._policy.reads_cache and len(waiting) > MAX_SORTED):
            return waiting
        rest = iter(waiting)
        first = list(islice(rest, MAX_SORTED))
        aged = [req for req in first if req.passed_over >= MAX_PASSED_OVER]
        young = [req for req in first if req.passed_over < MAX_PASSED_OVER] if aged else first
        inputs = PolicyInputs(self._kv, self._clock(), self._seed)
        ordered = [*aged, *self._policy.order(young, inputs)]
        if first and first[0].urgency != first[-1].urgency:
            ordered.sort(key=lambda req: -req.urgency)
        return chain(ordered, rest)

    def on_admitted(self, admitted: Sequence[Req], waiting: Iterable[Req]) -> None:
        """Called after a pass that admitted requests. `waiting`: those that still wait.

        Ages the requests that wait although one from behind them was admitted. The order of arrival needs no ages.
        """
        if self._policy.order is None or not admitted:
            return
        last = max(req.place for req in admitted)
        for req in waiting:
            if req.place > last:
                return
            req.passed_over += 1


def expected_growth(req: Req) -> int:
    """The number of tokens that a request may still generate, at most CLIP_MAX_NEW_TOKENS."""
    left = req.max_new_tokens - len(req.output_ids)
    return left if left < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS


class NewTokenRatio:
    """The share of their remaining `max_new_tokens` that running requests are expected to generate.

    The rule is SGLang's. The ratio starts at min(0.7 * conservativeness, 1), and decays linearly over 600 decode steps
    to 0.14 of that. A retraction sets it from the actual output lengths. An idle engine resets it.
    """

    _START, _FLOOR_SHARE, _DECAY_STEPS, _MARGIN_TOKENS = 0.7, 0.14, 600, 20

    def __init__(self, conservativeness: float) -> None:
        self._start = min(self._START * conservativeness, 1.0)
        self._floor = self._start * self._FLOOR_SHARE
        self._decay = (self._start - self._floor) / self._DECAY_STEPS
        self.value = self._start

    def on_decode(self) -> None:
        """Counts a decode step: one, however many tokens it returns. Reserved memory is counted in tokens."""
        self.value = max(self.value - self._decay, self._floor)

    def on_retract(self, kept: Sequence[Req]) -> None:
        """`kept`: the decoding requests that stay. If there are none, nothing was learned."""
        if not kept:
            return
        decoded = sum(len(req.output_ids) + self._MARGIN_TOKENS for req in kept)
        wished = sum(req.max_new_tokens for req in kept)
        self.value = min(1.0, decoded / max(wished, 1))

    def on_idle(self) -> None:
        self.value = self._start

    def reserved_by(self, running: Collection[Req]) -> float:
        """The number of tokens that running requests are expected to need in addition to those that they hold."""
        likely = sum([expected_growth(req) for req in running])
        sure = sum([expected_growth(req) for req in running if req.options.sampling.ignore_eos])
        return likely * self.value + sure * (1 - self.value)


def retraction_order(decodes: Sequence[Req], prompts: Collection[Req]) -> list[Req]:
    """The requests with KV, first to retract first. The last one stays. `prompts`: those in chunks.

    Less urgent ones go first. Of equally urgent ones, these go first: decoding requests with the fewest output tokens,
    then the longest prompt, then the latest arrival. Prompts in chunks follow, the newest first. The decoding request
    that would go last among its kind goes after them, so that something decodes.
    """
    *first, last = sorted(
        decodes, key=lambda req: (req.urgency, len(req.output_ids), -len(req.prompt_ids), -req.arrival)
    )
    newest_first = sorted(prompts, key=lambda req: req.arrival, reverse=True)
    return sorted([*first, *newest_first, last], key=lambda req: req.urgency)
