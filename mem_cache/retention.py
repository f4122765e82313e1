"""Retentions: requests whose prefix will probably be needed again say for how long it should be kept.

A retention is no pin. It only moves the prefix back in the order of eviction, and it expires. Everything that no
request uses can still be evicted.

A retention belongs to the node where its request ended, because eviction begins at leaves. When that node is evicted,
the retention moves to the node's parent, which has become the end of what is left. Each node counts the retentions at
and below it, as it counts locks. So the number of retained tokens is exact, and can be limited. Of a prefix that is
longer than the limit, or than what other tenants leave of it, the radix cache retains the beginning.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from .base_prefix_cache import RetentionOwner
from .radix_node import NO_TICKET, RadixNode

MAX_RETENTIONS = 16_384
"""A limit on the memory of retentions. Many may name the same tokens."""
_HEAP_SLACK = 64


class Retention:
    """One retention. `node` None: it has ended."""

    __slots__ = ("end_s", "key", "node", "num_tokens", "tenant")

    def __init__(self, node: RadixNode, end_s: float, tenant: str, key: tuple[str, RetentionOwner] | None) -> None:
        self.node: RadixNode | None = node
        self.end_s = end_s
        self.tenant = tenant
        self.key = key
        """Namespace and owner of a named session."""
        self.num_tokens = node.end


class Retentions:
    """The retentions of one radix cache."""

    def __init__(self, clock: Callable[[], float], max_tokens: int, push: Callable[[RadixNode], None]) -> None:
        """`clock`: in seconds, never backwards. `max_tokens`: the limit of `num_tokens`. `push`: told of each evictable
        leaf whose key has changed."""
        self.max_tokens = max_tokens
        self._clock = clock
        self._push = push
        self.clear()

    def clear(self) -> None:
        self.num_tokens = 0
        """Tokens of all prefixes that are retained. Those of shared prefixes count once."""
        self.num_live = 0
        self._evicted_tick = 0
        """The latest last access of anything that was evicted."""
        self._ends: list[tuple[float, int, Retention]] = []
        self._numbers = itertools.count()
        self._sessions: dict[tuple[str, RetentionOwner], Retention] = {}
        self._tenants: dict[str, _Tenant] = {}

    # Times

    def touch(self, path: Iterable[RadixNode], tick: int) -> None:
        """These nodes are used in this tick."""
        lead = tick - self._evicted_tick
        for node in path:
            node.lead = lead

    def lapse(self, tick: int) -> int:
        """End the retentions whose time is over. Their prefixes age from now on, as if they were used now.

        Each takes a tick. Returns the last one. It reads the clock only if there are retentions.
        """
        while self._ends and self._ends[0][0] <= self._clock():
            _, _, retention = heapq.heappop(self._ends)
            if retention.node is None:
                continue
            tick += 1
            node: RadixNode | None = retention.node
            while node is not None:
                node.last_access = tick
                node = node.parent
            self._end(retention)
        return tick

    # Retaining

    def retain(self, node: RadixNode | None, seconds: float, owner: RetentionOwner, namespace: str) -> int:
        """Retain the prefix that ends at `node`, in place of the last one of the same session. `lapse` goes before.

        `node` None, or 0 seconds: only end that one. Over a limit, the tenant with the most retained tokens or
        retentions loses its oldest ones. So a long retention displaces none of another tenant, and none that is newer.

        Returns by how many tokens the prefix is too long; it is not retained then. 0: it is not too long.
        """
        key = (namespace, owner) if owner.session else None
        if key is not None and key in self._sessions:
            self._end(self._sessions[key])
        if node is None or seconds <= 0:
            return 0
        retention = Retention(node, self._clock() + seconds, owner.tenant, key)
        self._add(retention, node)
        while self.num_tokens > self.max_tokens or self.num_live > MAX_RETENTIONS:
            oldest = self._largest_tenant().oldest()
            excess = max(self.num_tokens - self.max_tokens, 0)
            self._end(oldest)
            if oldest is retention:
                return excess
        return 0

    def _largest_tenant(self) -> _Tenant:
        """The tenant with the most of what is limited: retentions, if these are too many, else retained tokens."""
        by_number = self.num_live > MAX_RETENTIONS
        sizes = ((len(one.retentions) if by_number else one.num_tokens, name) for name, one in self._tenants.items())
        return self._tenants[max(sizes)[1]]

    def _add(self, retention: Retention, node: RadixNode) -> None:
        self.num_live += 1
        if retention.key is not None:
            self._sessions[retention.key] = retention
        tenant = self._tenants.setdefault(retention.tenant, _Tenant())
        tenant.retentions[retention] = None
        tenant.num_tokens += retention.num_tokens
        heapq.heappush(self._ends, (retention.end_s, next(self._numbers), retention))
        self._bound_ends()
        self._count(node, 1)
        self._attach(node, {retention: None}, retention.end_s)

    def _end(self, retention: Retention) -> None:
        node = retention.node
        assert node is not None and node.retentions is not None
        self._forget(retention)
        del node.retentions[retention]
        self._count(node, -1)
        end_s = node.retained_until_s
        if retention.end_s == end_s:  # otherwise another one is the last to end, and there may be thousands
            end_s = max((one.end_s for one in node.retentions), default=0.0)
        self._set_end(node, end_s)
        node.retentions = node.retentions or None

    def _forget(self, retention: Retention) -> None:
        retention.node = None
        self.num_live -= 1
        if retention.key is not None:
            del self._sessions[retention.key]
        tenant = self._tenants[retention.tenant]
        del tenant.retentions[retention]
        tenant.num_tokens -= retention.num_tokens
        if not tenant.retentions:
            del self._tenants[retention.tenant]

    def _count(self, node: RadixNode | None, change: int) -> None:
        while node is not None:
            was_retained = bool(node.num_retained)
            node.num_retained += change
            self.num_tokens += (bool(node.num_retained) - was_retained) * len(node.tokens)
            node = node.parent

    def _attach(self, node: RadixNode, new: dict[Retention, None], end_s: float) -> None:
        """Give retentions to a node. `end_s`: the latest end of them."""
        if node.retentions is None:
            node.retentions = new
        else:
            node.retentions |= new
        self._set_end(node, max(node.retained_until_s, end_s))

    def _set_end(self, node: RadixNode, end_s: float) -> None:
        """Set the time until which the node is retained, and push it if it can be evicted."""
        node.retained_until_s = end_s
        if node.ticket != NO_TICKET:
            self._push(node)

    def _bound_ends(self) -> None:
        """Drop the entries of ended retentions once they are the majority."""
        if len(self._ends) > 2 * self.num_live + _HEAP_SLACK:
            self._ends = [entry for entry in self._ends if entry[2].node is not None]
            heapq.heapify(self._ends)

    # Changes of the tree

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """An edge was cut. `upper` has its first tokens."""
        upper.lead = lower.lead
        upper.num_retained = lower.num_retained

    def shorten(self, leaf: RadixNode, kept_len: int) -> None:
        """A leaf is about to lose its last tokens, all but `kept_len`. Without any, its retentions move up."""
        self._evicted_tick = max(self._evicted_tick, leaf.last_access)
        if leaf.num_retained:
            num_lost = len(leaf.tokens) - kept_len
            self.num_tokens -= num_lost
            for retention in leaf.retentions or ():
                retention.num_tokens -= num_lost
                self._tenants[retention.tenant].num_tokens -= num_lost
        if not kept_len:
            self._move_up(leaf)

    def _move_up(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        moved, leaf.retentions = leaf.retentions, None
        if moved is None:
            return
        if not len(parent.tokens):  # nothing is left of the prefix
            for retention in moved:
                self._forget(retention)
            self._count(parent, -len(moved))
            return
        for retention in moved:
            retention.node = parent
        self._attach(parent, moved, leaf.retained_until_s)

    def cut_off(self, top: RadixNode) -> None:
        """A node is about to leave the tree with all its descendants. `discard` follows for each of them."""
        if top.num_retained:
            self._count(top.parent, -top.num_retained)

    def discard(self, node: RadixNode) -> None:
        """A node has left the tree, and still has its tokens."""
        if not node.num_retained:
            return
        self.num_tokens -= len(node.tokens)
        node.num_retained, node.retained_until_s = 0, 0.0
        for retention in node.retentions or ():
            self._forget(retention)
        node.retentions = None


class _Tenant:
    """The retentions of one tenant, oldest first."""

    __slots__ = ("num_tokens", "retentions")

    def __init__(self) -> None:
        self.num_tokens = 0
        """Those of shared prefixes count more than once."""
        self.retentions: dict[Retention, None] = {}

    def oldest(self) -> Retention:
        return next(iter(self.retentions))
