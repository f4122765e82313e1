"""A simple prefix cache as the reference for the radix cache: one dictionary entry for each cached page.

Pages that were inserted and used together have equal histories. So eviction by single pages must choose the same pages
as the radix tree, which evicts from the ends of edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tercet.mem_cache.evict_policy import get_evict_policy

Key = tuple[str, tuple[int, ...]]
"""(namespace, all tokens from the start to the end of the page)."""


@dataclass
class Page:
    slots: tuple[int, ...]
    created: int
    last_access: int
    end: int
    lead: int
    num_uses: int = 0
    num_locks: int = 0
    is_discarded: bool = False
    retentions: list[ModelRetention] = field(default_factory=list)

    @property
    def retained_until_s(self) -> float:
        return max((one.end_s for one in self.retentions), default=0.0)


@dataclass(eq=False)
class ModelRetention:
    end_s: float
    tenant: str
    session: tuple[str, str, str] | None
    num_tokens: int
    key: Key


class PrefixModel:
    def __init__(
        self, page_size: int, policy: str, clock: Callable[[], float] = lambda: 0.0, max_retained: int = 0
    ) -> None:
        """`clock` and `max_retained`: see `Retentions`."""
        self.page_size = page_size
        self.policy = get_evict_policy(policy)
        self.clock = clock
        self.max_retained = max_retained
        self.discarded: list[Page] = []
        """Pages that are no longer cached but still locked."""
        self.clear()

    def clear(self) -> None:
        self.pages: dict[Key, Page] = {}
        self.tick = self.evicted_tick = 0
        self.retentions: list[ModelRetention] = []
        """Oldest first."""

    def path(self, namespace: str, tokens: list[int]) -> list[Page]:
        """The cached pages at the start of tokens."""
        found = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.pages.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def match(self, namespace: str, tokens: list[int]) -> list[int]:
        path = self.path(namespace, tokens)
        if path:
            self.touch(path)
        return [slot for page in path for slot in page.slots]

    def insert(self, namespace: str, tokens: list[int], slots: list[int]) -> tuple[int, int]:
        path = self.path(namespace, tokens)
        self.touch(path)
        taken_len = len(tokens) // self.page_size * self.page_size
        duplicate_len = len(path) * self.page_size
        for start in range(duplicate_len, taken_len, self.page_size):
            end = start + self.page_size
            page = Page(tuple(slots[start:end]), self.tick, self.tick, end, self.tick - self.evicted_tick)
            self.pages[namespace, tuple(tokens[:end])] = page
        return duplicate_len, taken_len

    def touch(self, path: list[Page]) -> None:
        self.lapse()
        self.tick += 1
        for page in path:
            page.last_access, page.lead = self.tick, self.tick - self.evicted_tick

    def lock(self, namespace: str, tokens: list[int], already: int = 0) -> list[Page]:
        """Locks the pages of `tokens` from token `already` on, and returns them."""
        pages = self.path(namespace, tokens)[already // self.page_size :]
        for page in pages:
            page.num_locks += 1
            page.num_uses += 1
        return pages

    def unlock(self, pages: list[Page]) -> None:
        for page in pages:
            page.num_locks -= 1
        self.discarded = [page for page in self.discarded if page.num_locks]

    def discard(self, namespace: str, tokens: list[int], kept_len: int) -> None:
        end = kept_len + self.page_size
        if end > len(tokens):
            return
        for key in [key for key in self.pages if key[0] == namespace and key[1][:end] == tuple(tokens[:end])]:
            page = self.pages[key]
            for retention in [*page.retentions]:
                self.end(retention)
            del self.pages[key]
            page.is_discarded = True
            if page.num_locks:
                self.discarded.append(page)

    def evict(self, num_tokens: int) -> int:
        num_freed = 0
        self.lapse()
        while num_freed < num_tokens:
            inner = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.pages}
            leaves = [key for key, page in self.pages.items() if key not in inner and not page.num_locks]
            if not leaves:
                break
            self.remove(min(leaves, key=self.rank))
            num_freed += self.page_size
        return num_freed

    def rank(self, key: Key) -> tuple[int, ...]:
        return self.policy(self.pages[key])

    # Retention

    def remove(self, key: Key) -> None:
        page = self.pages.pop(key)
        self.evicted_tick = max(self.evicted_tick, page.last_access)
        above = (key[0], key[1][: -self.page_size])
        for retention in [*page.retentions]:
            if above in self.pages:
                retention.key = above
                self.pages[above].retentions.append(retention)
            else:
                self.retentions.remove(retention)

    def lapse(self) -> None:
        over = [one for one in self.retentions if one.end_s <= self.clock()]
        for retention in sorted(over, key=lambda one: one.end_s):
            self.tick += 1
            for page in self.path(retention.key[0], list(retention.key[1])):
                page.last_access = self.tick
            self.end(retention)

    def end(self, retention: ModelRetention) -> None:
        self.retentions.remove(retention)
        if retention.key in self.pages:
            self.pages[retention.key].retentions.remove(retention)

    def retain(self, namespace: str, tokens: list[int], seconds: float, tenant: str, session: str) -> None:
        self.lapse()
        key = (namespace, tenant, session) if session else None
        for retention in [one for one in self.retentions if key is not None and one.session == key]:
            self.end(retention)
        path = self.path(namespace, tokens[: self.max_retained])
        while path and seconds > 0:
            excess = self.try_to_retain(namespace, tokens, seconds, tenant, key, path)
            if not excess:
                return
            path = self.path(namespace, tokens[: path[-1].end - excess])

    def try_to_retain(
        self,
        namespace: str,
        tokens: list[int],
        seconds: float,
        tenant: str,
        key: tuple[str, str, str] | None,
        path: list[Page],
    ) -> int:
        """Returns by how many tokens it is too long."""
        place = (namespace, tuple(tokens[: path[-1].end]))
        retention = ModelRetention(self.clock() + seconds, tenant, key, path[-1].end, place)
        self.retentions.append(retention)
        path[-1].retentions.append(retention)
        while self.num_retained > self.max_retained:
            totals: dict[str, int] = {}
            for one in self.retentions:
                totals[one.tenant] = totals.get(one.tenant, 0) + one.num_tokens
            _, payer = max((total, name) for name, total in totals.items())
            excess = self.num_retained - self.max_retained
            self.end(oldest := next(one for one in self.retentions if one.tenant == payer))
            if oldest is retention:
                return excess
        return 0

    @property
    def num_retained(self) -> int:
        """Tokens of all retained prefixes. Those of shared prefixes count once."""
        return self.page_size * len(
            {
                (one.key[0], one.key[1][:end])
                for one in self.retentions
                for end in range(self.page_size, len(one.key[1]) + 1, self.page_size)
            }
        )

    def num_tokens(self, locked: bool) -> int:
        num_pages = sum(bool(page.num_locks) == locked for page in self.pages.values())
        return self.page_size * (num_pages + (len(self.discarded) if locked else 0))

    def slots(self) -> list[int]:
        return [slot for page in [*self.pages.values(), *self.discarded] for slot in page.slots]
