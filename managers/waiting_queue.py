"""The waiting queue, in the order of `Req.place`: most urgent first, then in the order of arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain, groupby, takewhile
from operator import attrgetter

from .req import Req

_arrival_of = attrgetter("arrival")
_place_of = attrgetter("place")
_urgency_of = attrgetter("urgency")


class Level:
    """The waiting requests of one urgency, in the order of arrival. `num_tokens`: what they have to compute."""

    def __init__(self, urgency: int) -> None:
        self.urgency = urgency
        self.reqs: OrderedDict[Req, None] = OrderedDict()
        self.num_tokens = 0

    def add(self, req: Req) -> None:
        """Adds a request that arrived after all others."""
        self.reqs[req] = None
        self.num_tokens += req.queued_tokens

    def remove(self, req: Req) -> None:
        del self.reqs[req]
        self.num_tokens -= req.queued_tokens

    def put_back(self, reqs: Collection[Req]) -> None:
        """Adds requests that arrived at any time, at least one."""
        for req in reqs:
            self.add(req)
        self.restore(reqs)

    def restore(self, reqs: Collection[Req]) -> None:
        """Moves the requests that were added last to their places. Looks only at the requests that are before them."""
        newest = max(map(_arrival_of, reqs))
        older = takewhile(lambda req: req.arrival < newest, self.reqs)
        for req in sorted({*older, *reqs}, key=_arrival_of, reverse=True):
            self.reqs.move_to_end(req, last=False)

    @property
    def last_arrival(self) -> int:
        return next(reversed(self.reqs)).arrival

    def newest(self) -> Req | None:
        """The newest request that may be refused: one without output that is not aborted."""
        reqs = (req for req in reversed(self.reqs) if not req.output_ids and req.pending_abort is None)
        return next(reqs, None)

    def num_tokens_before(self, req: Req) -> int:
        """Tokens of this level that are computed before a new request of the same urgency."""
        return self.num_tokens

    def gives_way_to(self, req: Req) -> Req | None:
        """The request to refuse in place of a new one, which is at least as urgent. None: none of this level."""
        return self.newest() if self.urgency < req.urgency else None


class TokensByUrgency:
    """Sums of tokens of requests that are at least so urgent. A call takes at most 65 steps, and 2 for urgency 0.

    It is a Fenwick tree. Only its nodes that are not 0 are stored.
    """

    _SIZE = 1 << 65
    """Urgencies are numbers of 64 bits. Larger ones, which only a Python engine can have, count as equal."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def add(self, urgency: int, num_tokens: int) -> None:
        """`num_tokens`: negative for requests that leave."""
        place = self._place(urgency)
        while place <= self._SIZE:
            total = self._sums.get(place, 0) + num_tokens
            if total:
                self._sums[place] = total
            else:
                self._sums.pop(place, None)
            place += place & -place

    def at_least(self, urgency: int) -> int:
        place, total = self._place(urgency), 0
        while place:
            total += self._sums.get(place, 0)
            place &= place - 1
        return total

    def _place(self, urgency: int) -> int:
        return min(max(self._SIZE // 2 - urgency, 1), self._SIZE)


class WaitingQueue(Collection[Req]):
    """The time to add a new request or to remove one does not depend on their number, and grows with the logarithm of
    the number of priorities in use. To put retracted ones back sorts those of their urgency up to their places."""

    def __init__(self) -> None:
        self._levels: dict[int, Level] = {}
        """By urgency. None is empty."""
        self._order: list[int] = []
        """The urgencies of the levels, each times -1, sorted: most urgent first."""
        self.num_tokens = 0
        """What all of them have to compute."""
        self._tokens_by_urgency = TokensByUrgency()
        self._len = 0
        self.num_changes = 0
        """How often requests have come or left."""

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Req]:
        return chain.from_iterable(level.reqs for level in self.levels())

    def __contains__(self, req: object) -> bool:
        return isinstance(req, Req) and req.urgency in self._levels and req in self._levels[req.urgency].reqs

    @property
    def num_levels(self) -> int:
        return len(self._levels)

    def levels(self) -> Iterator[Level]:
        """Most urgent first."""
        return (self._levels[-key] for key in self._order)

    def add(self, req: Req) -> None:
        """Adds a request that arrived after all others."""
        self._level(req.urgency).add(req)
        self._count(req, 1)
        self.num_changes += 1

    def remove(self, req: Req) -> None:
        level = self._levels[req.urgency]
        level.remove(req)
        if not level.reqs:
            del self._levels[req.urgency]
            del self._order[bisect_left(self._order, -req.urgency)]
        self._count(req, -1)
        self.num_changes += 1

    def put_back(self, reqs: Collection[Req]) -> None:
        """Adds retracted requests."""
        for urgency, equally_urgent in groupby(sorted(reqs, key=_place_of), key=_urgency_of):
            self._level(urgency).put_back(list(equally_urgent))
        for req in reqs:
            self._count(req, 1)
        self.num_changes += 1

    def _count(self, req: Req, sign: int) -> None:
        self._len += sign
        self.num_tokens += sign * req.queued_tokens
        self._tokens_by_urgency.add(req.urgency, sign * req.queued_tokens)

    def share_of(self, req: Req) -> str:
        """The tenant whose share of the engine serves a request; "" if there are no shares."""
        return ""

    def num_tokens_before(self, req: Req) -> int:
        """Tokens of waiting requests that are computed before a new one."""
        level = self._levels.get(req.urgency)
        equally_urgent = 0 if level is None else level.num_tokens_before(req)
        return self._tokens_by_urgency.at_least(req.urgency + 1) + equally_urgent

    def gives_way_to(self, req: Req) -> Req | None:
        """The waiting request to refuse in place of a new one. None: none of them."""
        for key in reversed(self._order):
            if -key > req.urgency:
                return None
            found = self._levels[-key].gives_way_to(req)
            if found is not None:
                return found
        return None

    def _level(self, urgency: int) -> Level:
        level = self._levels.get(urgency)
        if level is None:
            level = self._levels[urgency] = self._make_level(urgency)
            insort(self._order, -urgency)
        return level

    def _make_level(self, urgency: int) -> Level:
        return Level(urgency)
