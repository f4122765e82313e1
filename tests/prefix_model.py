"""A simple prefix cache as the reference for the radix cache: one dictionary entry for each cached page.

Pages that were inserted and used together have equal histories. So eviction by single pages must choose the same pages
as the radix tree, which evicts from the ends of edges.
"""

from __future__ import annotations

from dataclasses import dataclass

from tercet.mem_cache.evict_policy import get_evict_policy

Key = tuple[str, tuple[int, ...]]
"""(namespace, all tokens from the start to the end of the page)."""


@dataclass
class Page:
    slots: tuple[int, ...]
    created: int
    last_access: int
    num_uses: int = 0
    num_locks: int = 0
    is_discarded: bool = False


class PrefixModel:
    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.policy = get_evict_policy(policy)
        self.pages: dict[Key, Page] = {}
        self.discarded: list[Page] = []
        """Pages that are no longer cached but still locked."""
        self.tick = 0

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
        self.tick += 1
        path = self.path(namespace, tokens)
        for page in path:
            page.last_access = self.tick
        return [slot for page in path for slot in page.slots]

    def insert(self, namespace: str, tokens: list[int], slots: list[int]) -> tuple[int, int]:
        self.match(namespace, tokens)
        path = self.path(namespace, tokens)
        taken_len = len(tokens) // self.page_size * self.page_size
        duplicate_len = len(path) * self.page_size
        for start in range(duplicate_len, taken_len, self.page_size):
            end = start + self.page_size
            page = Page(tuple(slots[start:end]), self.tick, self.tick)
            self.pages[namespace, tuple(tokens[:end])] = page
        return duplicate_len, taken_len

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
            page = self.pages.pop(key)
            page.is_discarded = True
            if page.num_locks:
                self.discarded.append(page)

    def evict(self, num_tokens: int) -> int:
        num_freed = 0
        while num_freed < num_tokens:
            inner = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.pages}
            leaves = [key for key, page in self.pages.items() if key not in inner and not page.num_locks]
            if not leaves:
                break
            del self.pages[min(leaves, key=self.rank)]
            num_freed += self.page_size
        return num_freed

    def rank(self, key: Key) -> tuple[int, ...]:
        return self.policy(self.pages[key])

    def num_tokens(self, locked: bool) -> int:
        num_pages = sum(bool(page.num_locks) == locked for page in self.pages.values())
        return self.page_size * (num_pages + (len(self.discarded) if locked else 0))

    def slots(self) -> list[int]:
        return [slot for page in [*self.pages.values(), *self.discarded] for slot in page.slots]
