"""TenantShares: how much of the engine each tenant has used, and who is in credit.

It is the deficit counter of DLPM (deficit longest prefix match; Cao et al., "Locality-aware Fair Scheduling in LLM
Serving", arXiv 2501.14312), in another form. There, each tenant has a credit in tokens. Service lowers it, and when no
waiting tenant is in credit, each gets a quantum. Here, service raises a tenant's `position`, and a refill raises the
common `round`:

    credit = (round - position) * quantum * weight

So a refill of any number of tenants, any number of times, is one addition. A tenant has at most one quantum of credit.
A tenant that is new, or that was idle, begins with a credit of 0. So idle time earns no credit, and a client gains
nothing by changing its name. Nor does the use of an idle engine cost anything later: when a tenant joins, the round
goes up to the least position of those that have requests (`catch_up`), as the virtual time of fair queueing does.

Each priority has shares of its own. If a refill of urgent requests had to wait for the less urgent ones of other
tenants, tenants would hoard credit meanwhile.

While two tenants both have requests waiting, their service, divided by their weights, differs by at most one quantum
and what is charged for a request after its choice: its prefill, and the outputs of running requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

_MIN_FORGET = 64


class TenantShares:
    """The positions of the tenants. One of weight 2 gets twice the service of one of weight 1."""

    def __init__(self, weights: Mapping[str, float], quantum: int) -> None:
        """`weights`: by the name of the tenant; 1 for all others. `quantum`: tokens that a refill gives to a tenant of
        weight 1. A larger one lets a tenant use a prefix for longer; the others wait for that long."""
        self.round = 0
        self._quantum = quantum
        self._weights = weights
        self._positions: dict[str, float] = {}
        self._forget_above = _MIN_FORGET

    def __len__(self) -> int:
        """The number of tenants in memory. Idle ones are removed once their debt is paid."""
        return len(self._positions)

    def join(self, tenant: str) -> None:
        """The tenant has requests waiting, so the next refill is for it, too."""
        self._positions.setdefault(tenant, self.round)

    def catch_up(self, active: Iterable[str]) -> None:
        """Move the round up to the least position of the active tenants: another one is about to join them.

        So it gets no credit for what they had while it had no requests.

        Stops at the first tenant in the present round: there may be thousands, and many may join at once.
        """
        least = math.inf
        for name in active:
            least = min(least, self.position(name))
            if least < self.round + 1:
                return
        self.round = math.floor(least)

    def position(self, tenant: str) -> float:
        """In rounds. The tenant is in credit if this is below `round`."""
        return max(self._positions.get(tenant, self.round), self.round - 1)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def rounds(self, tenant: str, num_tokens: int) -> float:
        """By how much service of so many tokens raises the position of a tenant."""
        return num_tokens / (self._quantum * self.weight(tenant))

    def num_tokens_until(self, position: float, tenant: str) -> int:
        """Tokens of service until the tenant is at a position; 0 if it is beyond."""
        return math.ceil(max(position - self.position(tenant), 0.0) * self._quantum * self.weight(tenant))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """The tenant has been served."""
        self._raise(tenant, self.position(tenant), num_tokens)

    def charge_chosen(self, tenant: str, num_tokens: int) -> None:
        """The tenant was chosen before all others that wait. If it was not in credit, no tenant was, and all get a
        refill."""
        position = self.position(tenant)
        self.round = math.floor(position) + 1  # the same round if the tenant was in credit
        self._raise(tenant, position, num_tokens)

    def _raise(self, tenant: str, position: float, num_tokens: int) -> None:
        self._positions[tenant] = position + self.rounds(tenant, num_tokens)
        if len(self._positions) > self._forget_above:
            self._forget()

    def _forget(self) -> None:
        """Forgets the tenants that a refill found with a whole quantum. They were away, or could not be served."""
        self._positions = {name: at for name, at in self._positions.items() if at >= self.round - 1}
        self._forget_above = max(2 * len(self._positions), _MIN_FORGET)
