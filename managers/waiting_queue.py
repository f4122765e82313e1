"""The waiting queue, in the order of `Req.place`: most urgent first, then in the order of arrival."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from math import inf
from operator import attrgetter

from .req import Req

_arrival_of = attrgetter("arrival")


class Level:
    """The waiting requests of one urgency, in the order of arrival. `num_tokens`: what they have to compute."""

    def __init__(self, urgency: int) -> None:
        self.urgency = urgency
        self.reqs: dict[Req, None] = {}
        self.num_tokens = 0

    def add(self, req: Req) -> None:
        """Adds a request that arrived after all others."""
        self.reqs[req] = None
        self.num_tokens += req.queued_tokens

    def remove(self, req: Req) -> None:
        del self.reqs[req]
        self.num_tokens -= req.queued_tokens

    def put_back(self, reqs: Collection[Req]) -> None:
        """Adds requests that arrived at any time."""
        for req in reqs:
            self.add(req)
        self.sort()

    def sort(self) -> None:
        self.reqs = dict.fromkeys(sorted(self.reqs, key=_arrival_of))

    @property
    def last_arrival(self) -> int:
        return next(reversed(self.reqs)).arrival

    def newest(self) -> Req | None:
        """The newest request that may be refused: one without output that is not aborted."""
        reqs = (req for req in reversed(self.reqs) if not req.output_ids and not req.num_steps_in_flight)
        return next((req for req in reqs if req.pending_abort is None), None)

    def num_tokens_before(self, req: Req) -> int:
        """Tokens of this level that are computed before a new request of the same urgency."""
        return self.num_tokens

    def gives_way_to(self, req: Req) -> Req | None:
        """The request to refuse in place of a new one, which is at least as urgent. None: none of this level."""
        return self.newest() if self.urgency < req.urgency else None


class WaitingQueue(Collection[Req]):
    """The time to add a new request or to remove one does not depend on their number. It depends on the number of
    priorities in use. To put retracted ones back sorts those of their urgency."""

    def __init__(self) -> None:
        self._levels: dict[int, Level] = {}
        """By urgency, most urgent first. None is empty."""
        self._len = 0
        self.num_changes = 0
        """How often requests have come or left."""

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Req]:
        return chain.from_iterable(level.reqs for level in self._levels.values())

    def __contains__(self, req: object) -> bool:
        return isinstance(req, Req) and req.urgency in self._levels and req in self._levels[req.urgency].reqs

    def add(self, req: Req) -> None:
        """Adds a request that arrived after all others."""
        self._level(req.urgency).add(req)
        self._len += 1
        self.num_changes += 1

    def remove(self, req: Req) -> None:
        level = self._levels[req.urgency]
        level.remove(req)
        self._len -= 1
        self.num_changes += 1
        if not level.reqs:
            del self._levels[req.urgency]

    def put_back(self, reqs: Collection[Req]) -> None:
        """Adds retracted requests."""
        for urgency in {req.urgency for req in reqs}:
            self._level(urgency).put_back([req for req in reqs if req.urgency == urgency])
        self._len += len(reqs)
        self.num_changes += 1

    @property
    def lowest_urgency(self) -> float:
        """Infinite if nobody waits."""
        return next(reversed(self._levels), inf)

    def share_of(self, req: Req) -> str:
        """The tenant whose share of the engine serves a request; "" if there are no shares."""
        return ""

    def num_tokens_before(self, req: Req) -> int:
        """Tokens of waiting requests that are computed before a new one."""
        ahead = [level for urgency, level in self._levels.items() if urgency >= req.urgency]
        return sum(
            level.num_tokens_before(req) if level.urgency == req.urgency else level.num_tokens for level in ahead
        )

    def gives_way_to(self, req: Req) -> Req | None:
        """The waiting request to refuse in place of a new one. None: none of them."""
        for urgency in reversed(self._levels):
            if urgency > req.urgency:
                return None
            found = self._levels[urgency].gives_way_to(req)
            if found is not None:
                return found
        return None

    def _level(self, urgency: int) -> Level:
        level = self._levels.get(urgency)
        if level is None:
            level = self._levels[urgency] = self._make_level(urgency)
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        return level

    def _make_level(self, urgency: int) -> Level:
        return Level(urgency)
