"""FairPolicy: the schedule policy `dlpm`, which shares the engine among tenants (tenant_shares.py has the rule)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter

from .kv_cache_manager import KVCacheManager
from .req import Req
from .schedule_policy import MAX_PASSED_OVER, MAX_SORTED, SchedulePolicy
from .tenant_queue import TenantQueue
from .tenant_shares import TenantShares

OUTPUT_TOKEN_COST = 2
"""An output token counts as so many prefill tokens. It occupies a row of a step of its own, and is priced so."""

_MIN_FORGET = 64
"""Priorities that may stay in memory beyond twice those in use. Clients choose them, so there may be any number."""

_place_of = attrgetter("place")
_urgency_of = attrgetter("urgency")
_tenant_of = attrgetter("tenant")


def make_policy(
    name: str,
    kv: KVCacheManager,
    clock: Callable[[], float],
    seed: int = 0,
    *,
    tenant_weights: Mapping[str, float] | None = None,
    max_prefill_tokens: int,
) -> SchedulePolicy:
    """The policy of a row of POLICIES. Raises ValueError on an unknown name.

    `max_prefill_tokens`: in a step. The quantum of a tenant is a quarter of it, so a step has room for several tenants.
    """
    if name == "dlpm":
        return FairPolicy(kv, clock, tenant_weights or {}, max(max_prefill_tokens // 4, 1))
    return SchedulePolicy(name, kv, clock, seed)


class FairPolicy(SchedulePolicy):
    """Deficit longest prefix match: of the tenants in credit, the request with the longest cached prefix goes first.

    Requests of higher priority go first, of any tenant. So each priority is shared by itself: the use of one counts in
    no other. With one tenant it is `lpm`. The bound on waiting holds among the requests of a tenant: MAX_PASSED_OVER
    passes may admit a later request of the same tenant. Between tenants, the shares are the bound. A bound across
    tenants would make those who send little wait behind those who send much.

    Tokens are charged when they are computed: the uncached tokens of a prompt at its admission, output tokens at the
    next pass or at the end. Nothing is counted in a decode step.
    """

    def __init__(
        self, kv: KVCacheManager, clock: Callable[[], float], weights: Mapping[str, float], quantum: int
    ) -> None:
        """`clock`: that of `Req.arrived_s`. `weights`, `quantum`: those of TenantShares."""
        super().__init__("dlpm", kv, clock)
        self._weights = weights
        self._quantum = quantum
        self._shares: dict[int, TenantShares] = {}
        """By urgency. Those without requests are removed before they are the majority."""
        self.waiting = TenantQueue(self.shares_of, self._on_join)
        """The waiting queue of the engine."""
        self._num_charged: dict[Req, int] = {}
        """Admitted live requests, and how many of their output tokens are charged."""
        self._num_admitted: dict[int, Counter[str]] = {}
        """Those of each urgency and tenant. None is empty."""

    def shares_of(self, urgency: int) -> TenantShares:
        shares = self._shares.get(urgency)
        if shares is None:
            shares = self._shares[urgency] = TenantShares(self._weights, self._quantum)
        return shares

    def on_end(self, req: Req) -> None:
        self._charge_output(req)
        if self._num_charged.pop(req, None) is not None:
            admitted = self._num_admitted[req.urgency]
            admitted[req.tenant] -= 1
            if not admitted[req.tenant]:
                del admitted[req.tenant]
            if not admitted:
                del self._num_admitted[req.urgency]

    def order(self, waiting: Collection[Req]) -> Iterable[Req]:
        """All of `waiting`, best first. Of more than MAX_SORTED, only some are sorted: those of the highest priority,
        and among equals the first of each tenant."""
        if not self.waiting.has_several_tenants:
            return super().order(waiting)
        self._charge_outputs()
        if len(waiting) <= MAX_SORTED:
            return self._by_credit(waiting)
        first = dict.fromkeys(sorted(self.waiting.in_turn(MAX_SORTED), key=_place_of))
        return chain(self._by_credit(first), (req for req in waiting if req not in first))

    def on_admitted(self, admitted: Sequence[Req], waiting: Iterable[Req]) -> None:
        """Charges the prompts, and ages the requests of the same tenants that were passed over."""
        if not admitted:
            return
        last: dict[str, tuple[int, int]] = {}
        for req in admitted:
            self.shares_of(req.urgency).charge_chosen(req.tenant, req.num_tokens - req.matched_len)
            self._charge_output(req)  # of the time before a retraction
            self._num_admitted.setdefault(req.urgency, Counter())[req.tenant] += req not in self._num_charged
            self._num_charged[req] = len(req.output_ids)
            last[req.tenant] = max(req.place, last.get(req.tenant, req.place))
        end = max(last.values())
        for req in waiting:
            if req.place > end:
                return
            if req.tenant in last and req.place < last[req.tenant]:
                req.passed_over += 1

    def _by_credit(self, waiting: Iterable[Req]) -> Iterator[Req]:
        """The order in which the requests would be served, if all were admitted. `waiting`: in the order of `place`.

        Read as far as a pass admits, so a pass pays only for the requests that it looks at.
        """
        for urgency, equally_urgent in groupby(waiting, key=_urgency_of):
            shares = self.shares_of(urgency)
            left = sorted(equally_urgent, key=self._rank)
            round_now = shares.round
            positions = {tenant: shares.position(tenant) for tenant in set(map(_tenant_of, left))}
            while left:
                lowest = min(positions[tenant] for tenant in map(_tenant_of, left))
                round_now = max(round_now, math.floor(lowest) + 1)  # a refill, unless somebody is in credit
                chosen, left = left, []
                for req in chosen:
                    tenant = req.tenant
                    if positions[tenant] < round_now:
                        yield req
                        positions[tenant] += shares.rounds(tenant, req.num_tokens - req.matched_len)
                    else:
                        left.append(req)

    def _rank(self, req: Req) -> tuple[bool, int]:
        """Those that were passed over too often come first, in the order of arrival, then the longest prefix."""
        is_young = req.passed_over < MAX_PASSED_OVER
        return is_young, -self._kv.match_len(req) if is_young else 0

    def _on_join(self, req: Req) -> None:
        """The tenant of the request is about to have requests of its urgency waiting, and has none now."""
        waiting, admitted = self.waiting.tenants(req.urgency), self._num_admitted.get(req.urgency, {}).keys()
        if not waiting and not admitted:
            self._shares.pop(req.urgency, None)  # nobody has had anything at the expense of another
            self._forget_unused()
        elif waiting or admitted != {req.tenant}:
            self._charge_outputs()
            latest_first = chain(reversed(waiting), admitted)  # the last to join is the least ahead
            self.shares_of(req.urgency).catch_up(latest_first)

    def _forget_unused(self) -> None:
        if len(self._shares) > 2 * (len(self._num_admitted) + self.waiting.num_levels) + _MIN_FORGET:
            used = {*self._num_admitted, *(level.urgency for level in self.waiting.levels())}
            self._shares = {urgency: shares for urgency, shares in self._shares.items() if urgency in used}

    def _charge_outputs(self) -> None:
        for req in self._num_charged:
            self._charge_output(req)

    def _charge_output(self, req: Req) -> None:
        """Charges the tokens that an admitted request has generated since the last call."""
        num_tokens = len(req.output_ids)
        num_new = num_tokens - self._num_charged.get(req, num_tokens)
        if num_new:
            self.shares_of(req.urgency).charge(req.tenant, OUTPUT_TOKEN_COST * num_new)
            self._num_charged[req] = num_tokens
