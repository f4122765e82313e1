"""TenantQueue: the waiting queue of the policy `dlpm`. It knows the requests of each tenant.

The tenants share the places of a full queue as they share the engine, and the estimate of a wait knows their shares. So
the many requests of one tenant do not make the engine refuse those of another one.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice, zip_longest
from typing import cast

from .req import Req
from .tenant_shares import TenantShares
from .waiting_queue import Level, WaitingQueue

_MAX_COMPARED = 64
"""Tenants with equal places that are compared at once. There may be thousands, and a full queue compares them often."""


class TenantLevel(Level):
    """The waiting requests of one urgency, and of each tenant that has any here."""

    def __init__(self, urgency: int, shares: TenantShares, places: Counter[str]) -> None:
        """`shares`: of this urgency. `places`: the number of waiting requests of each tenant in all levels, which this
        one keeps up to date."""
        super().__init__(urgency)
        self.tenants: dict[str, Level] = {}
        self._by_places: dict[float, dict[str, None]] = {}
        """The tenants by their number of requests here, divided by their weights. In a group, those that changed last
        are last. No group is empty."""
        self._shares = shares
        self._places = places

    def add(self, req: Req) -> None:
        super().add(req)
        self._shares.join(req.tenant)
        self._places[req.tenant] += 1
        own = self.tenants.setdefault(req.tenant, Level(self.urgency))
        own.add(req)
        self._regroup(req.tenant, len(own.reqs) - 1, len(own.reqs))

    def remove(self, req: Req) -> None:
        super().remove(req)
        own = self.tenants[req.tenant]
        own.remove(req)
        self._regroup(req.tenant, len(own.reqs) + 1, len(own.reqs))
        if not own.reqs:
            del self.tenants[req.tenant]
        self._places[req.tenant] -= 1
        if not self._places[req.tenant]:
            del self._places[req.tenant]

    def put_back(self, reqs: Collection[Req]) -> None:
        super().put_back(reqs)
        for tenant in {req.tenant for req in reqs}:
            self.tenants[tenant].restore([req for req in reqs if req.tenant == tenant])

    def num_tokens_before(self, req: Req) -> int:
        """All of the same tenant, and of each other one as much as it may have until the request is in credit."""
        shares, own = self._shares, self.tenants.get(req.tenant)
        start = shares.position(req.tenant) + (0 if own is None else shares.rounds(req.tenant, own.num_tokens))
        end = math.floor(start) + 1  # the others may spend the credit of that round, too
        return sum(min(level.num_tokens, shares.num_tokens_until(end, name)) for name, level in self.tenants.items())

    def gives_way_to(self, req: Req) -> Req | None:
        """The newest request of the tenant with the most places, divided by its weight.

        Unless `req` is more urgent, that must be more places than the tenant of `req` would have with it. Of equal
        tenants, the one that has been served most goes first, and then the one with the newest request. Of more than
        _MAX_COMPARED equals, those whose number of places changed last go first.
        """
        enough = 0.0
        if req.urgency == self.urgency:
            own = self.tenants.get(req.tenant)
            enough = (1 + (0 if own is None else len(own.reqs))) / self._shares.weight(req.tenant)
        for places in sorted(self._by_places, reverse=True):
            if places <= enough:
                break
            equals = reversed(self._by_places[places])
            while names := list(islice(equals, _MAX_COMPARED)):
                names.sort(key=lambda name: (-self._shares.position(name), -self.tenants[name].last_arrival))
                found = (self.tenants[name].newest() for name in names)
                newest = next((one for one in found if one is not None), None)
                if newest is not None:
                    return newest
        return None

    def _regroup(self, tenant: str, before: int, now: int) -> None:
        """The tenant had so many requests here, and has so many now."""
        weight = self._shares.weight(tenant)
        if before:
            group = self._by_places[before / weight]
            del group[tenant]
            if not group:
                del self._by_places[before / weight]
        if now:
            self._by_places.setdefault(now / weight, {})[tenant] = None

    def in_turn(self, count: int) -> Iterator[Req]:
        """At most `count` requests, one of each tenant in turn. First those of the tenants that have had least."""
        names = heapq.nsmallest(count, self.tenants, key=self._shares.position)
        turns = zip_longest(*(self.tenants[name].reqs for name in names))
        return islice((req for req in chain.from_iterable(turns) if req is not None), count)


class TenantQueue(WaitingQueue):
    """A waiting queue whose tenants have shares, of each urgency by itself."""

    def __init__(
        self, shares_of: Callable[[int], TenantShares], on_join: Callable[[Req], None] = lambda req: None
    ) -> None:
        """`shares_of`: those of an urgency. `on_join`: called with a request before it is added, if no request of its
        tenant and its urgency waits."""
        super().__init__()
        self._shares_of = shares_of
        self._on_join = on_join
        self._places: Counter[str] = Counter()

    def add(self, req: Req) -> None:
        if req.tenant not in self.tenants(req.urgency):
            self._on_join(req)
        super().add(req)

    def tenants(self, urgency: int) -> dict[str, Level]:
        """Those with requests of this urgency waiting. Those that have joined last are last."""
        level = self._levels.get(urgency)
        return {} if level is None else cast("TenantLevel", level).tenants

    @property
    def has_several_tenants(self) -> bool:
        return len(self._places) > 1

    def share_of(self, req: Req) -> str:
        return req.tenant

    def in_turn(self, count: int) -> list[Req]:
        """The first `count` requests in the order of the queue, where equally urgent ones take turns by tenants."""
        found: list[Req] = []
        for level in cast("Iterable[TenantLevel]", self.levels()):
            found += level.in_turn(count - len(found))
            if len(found) == count:
                break
        return found

    def _make_level(self, urgency: int) -> TenantLevel:
        return TenantLevel(urgency, self._shares_of(urgency), self._places)
