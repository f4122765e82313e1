"""Synthetic traffic from a seed: random prompts, trees of shared prefixes, and agents that return after tool calls."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..offline_workloads import Span
from .traffic import SimRequest

DEFAULT_INPUT_LEN = Span(256, 256)
DEFAULT_OUTPUT_LEN = Span(128, 128)
_BLOCK = 1024
"""Random numbers that are drawn at once."""


class Stream(IntEnum):
    """Independent streams of random numbers from one seed, so that the draws of one do not shift those of another."""

    ARRIVALS = 0
    INPUT_LENGTHS = 1
    OUTPUT_LENGTHS = 2
    CONTENT = 3
    TREE = 4
    TENANTS = 5
    ABORTS = 6
    SESSIONS = 7
    DOCUMENTS = 8
    STREAMS = 9


@dataclass(frozen=True, kw_only=True)
class TrafficSettings:
    """What all kinds of synthetic traffic have in common."""

    num_requests: int
    """Of agents: the number of sessions."""
    request_rate: float
    """Arrivals per second on average; inf: all at once."""
    burstiness: float = 1.0
    """1: a Poisson process; below: bursts."""
    input_len: Span = DEFAULT_INPUT_LEN
    output_len: Span = DEFAULT_OUTPUT_LEN
    length_sigma: float = 0.0
    """0: lengths are uniform in their spans. Otherwise log-normal around the middle of the span, with this standard
    deviation of the logarithm, and cut at 1 and at 16 times the end of the span: a long tail."""
    max_new_tokens: int = 0
    abort_share: float = 0.0
    abort_after_s: float = 1.0
    """Mean of an exponential distribution."""
    num_tenants: int = 1
    tenant_skew: float = 0.0
    """Tenant k (from 1) sends requests in proportion to k ** -skew."""
    vocab_size: int = 32_000
    seed: int = 0


class _Draws:
    """The random choices of all requests, drawn in blocks."""

    def __init__(self, settings: TrafficSettings) -> None:
        self.settings = settings
        sigma = settings.length_sigma
        self.arrivals = _blocks(self._rng(Stream.ARRIVALS), self._gaps)
        self.input_lens = _blocks(self._rng(Stream.INPUT_LENGTHS), _lengths(settings.input_len, sigma))
        self.output_lens = _blocks(self._rng(Stream.OUTPUT_LENGTHS), _lengths(settings.output_len, sigma))
        weights = np.arange(1, settings.num_tenants + 1) ** -settings.tenant_skew
        self.tenants = _blocks(
            self._rng(Stream.TENANTS), lambda rng, n: rng.choice(len(weights), n, p=weights / weights.sum())
        )
        self.aborts = _blocks(self._rng(Stream.ABORTS), self._aborts)
        self.content = self._rng(Stream.CONTENT)

    def _rng(self, stream: Stream) -> np.random.Generator:
        return np.random.default_rng([self.settings.seed, stream])

    def _gaps(self, rng: np.random.Generator, count: int) -> np.ndarray:
        settings = self.settings
        if settings.request_rate == math.inf:
            return np.zeros(count)
        return rng.gamma(settings.burstiness, 1.0 / (settings.request_rate * settings.burstiness), count)

    def _aborts(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """NaN: the client stays."""
        after_s = rng.exponential(self.settings.abort_after_s, count)
        after_s[rng.random(count) >= self.settings.abort_share] = np.nan
        return after_s

    def ids(self, count: int) -> np.ndarray:
        """Random token ids, int32 [count]. None of them is the end of an output."""
        return self.content.integers(1, self.settings.vocab_size, count, dtype=np.int32)

    def requests(self, prompt: Callable[[int], np.ndarray]) -> Iterator[SimRequest]:
        """The requests with their times. `prompt`: makes the prompt of the given number of own tokens."""
        now_s = 0.0
        for place in range(self.settings.num_requests):
            gap_s = next(self.arrivals)
            now_s += gap_s if place else 0.0
            yield self.request(now_s, prompt(next(self.input_lens)), next(self.tenants))

    def request(self, arrival_s: float, prompt_ids: np.ndarray, tenant: int) -> SimRequest:
        abort_s = next(self.aborts)
        return SimRequest(
            arrival_s,
            prompt_ids,
            next(self.output_lens),
            self.settings.max_new_tokens,
            tenant,
            aborts_after_s=None if math.isnan(abort_s) else abort_s,
        )


def random_prompts(settings: TrafficSettings) -> Iterator[SimRequest]:
    """Prompts of random tokens, which share nothing."""
    draws = _Draws(settings)
    return draws.requests(draws.ids)


def prefix_tree(
    settings: TrafficSettings, levels: int, branching: int, level_len: int, skew: float
) -> Iterator[SimRequest]:
    """Prompts that begin with a path from the root of a tree to a leaf, and end with `input_len` tokens of their own.

    Each of the `levels` below the root has `level_len` tokens and `branching` children. Child k (from 1) is chosen in
    proportion to k ** -skew.
    """
    draws = _Draws(settings)
    rng = np.random.default_rng([settings.seed, Stream.TREE])
    weights = np.arange(1, branching + 1) ** -skew
    paths = _blocks(rng, lambda rng, n: rng.choice(branching, n, p=weights / weights.sum()))
    nodes: dict[tuple[int, ...], np.ndarray] = {}

    def prompt(own_len: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        path: tuple[int, ...] = ()
        for _ in range(levels):
            path = (*path, next(paths))
            if path not in nodes:
                of_node = np.random.default_rng([settings.seed, Stream.TREE, *path])
                nodes[path] = of_node.integers(1, settings.vocab_size, level_len, dtype=np.int32)
            parts.append(nodes[path])
        return np.concatenate([*parts, draws.ids(own_len)])

    return draws.requests(prompt)


class _Agent:
    """A session of several turns. A prompt is all that was said before, and the result of a tool.

    It has random numbers of its own, so that its turns do not depend on when others end.
    """

    def __init__(self, settings: TrafficSettings, turns: Span, tool_len: Span, tool_s: float, place: int) -> None:
        self._rng = np.random.default_rng([settings.seed, Stream.SESSIONS, place])
        self._settings = settings
        self._turns_left = int(self._rng.integers(*turns, endpoint=True)) - 1
        self._tool_len = tool_len
        self._tool_s = tool_s
        self._output_lens = _lengths(settings.output_len, settings.length_sigma)

    def next(self, request: SimRequest, ended_s: float, output_ids: list[int]) -> SimRequest | None:
        if self._turns_left == 0 or not output_ids:  # without an output it was refused or aborted
            return None
        self._turns_left -= 1
        settings, rng = self._settings, self._rng
        num_result = int(rng.integers(*self._tool_len, endpoint=True))
        result = rng.integers(1, settings.vocab_size, num_result, dtype=np.int32)
        num_output = int(self._output_lens(rng, 1)[0])
        tool_s = rng.exponential(self._tool_s)
        abort_s = rng.exponential(settings.abort_after_s) if rng.random() < settings.abort_share else None
        return SimRequest(
            ended_s + tool_s,
            np.concatenate([request.prompt_ids, np.array(output_ids, dtype=np.int32), result]),
            num_output,
            settings.max_new_tokens,
            request.tenant,
            aborts_after_s=abort_s,
            session=self,
            ends_in_tool_call=self.has_turns,
        )

    @property
    def has_turns(self) -> bool:
        """Whether a turn follows the one that was made last."""
        return self._turns_left > 0


def agents(settings: TrafficSettings, turns: Span, tool_len: Span, tool_s: float) -> Iterator[SimRequest]:
    """Sessions of agents. Their first requests arrive like random prompts, of `input_len` tokens.

    After each answer, a tool runs for `tool_s` seconds on average (exponential) and returns `tool_len` tokens.
    """
    draws = _Draws(settings)
    for place, request in enumerate(draws.requests(draws.ids)):
        agent = _Agent(settings, turns, tool_len, tool_s, place)
        request.session, request.ends_in_tool_call = agent, agent.has_turns
        yield request


def beside_documents(
    requests: Iterator[SimRequest], settings: TrafficSettings, num_documents: int, length: Span, rate: float
) -> Iterator[SimRequest]:
    """The requests, and documents that are sent once, of `length` tokens, `rate` of them in a second on average.

    They are of one more tenant.
    """
    rng = np.random.default_rng([settings.seed, Stream.DOCUMENTS])

    def documents() -> Iterator[SimRequest]:
        now_s = 0.0
        for _ in range(num_documents):
            now_s += rng.exponential(1 / rate)
            ids = rng.integers(1, settings.vocab_size, int(rng.integers(*length, endpoint=True)), dtype=np.int32)
            yield SimRequest(now_s, ids, settings.output_len.low, tenant=settings.num_tenants)

    return heapq.merge(requests, documents(), key=lambda request: request.arrival_s)


def _lengths(span: Span, sigma: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        if not sigma:
            return rng.integers(span.low, span.high, count, endpoint=True)
        lengths = rng.lognormal(math.log((span.low + span.high) / 2), sigma, count)
        return np.clip(np.rint(lengths), 1, 16 * span.high).astype(np.int64)

    return draw


def _blocks(rng: np.random.Generator, draw: Callable[[np.random.Generator, int], np.ndarray]) -> Iterator:
    while True:
        yield from draw(rng, _BLOCK).tolist()
