"""The radix cache: a radix tree of token prefixes. Requests with equal first tokens share the KV of these tokens.

Source: RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024).

An edge is a run of whole pages of tokens, with the slot of each token. A node stores its children by the bytes of
the first page of their edges, so siblings differ within their first page. Edges are compared token by token; the tree
relies on no hash. Each namespace in use has one node without tokens below the root, and its own tree below that node.
The namespace's node is removed with its last child.

A lock on a node counts on each node on the path to the root. So all descendants of an unlocked node are unlocked and
can be evicted, leaf by leaf.

A discarded prefix leaves the tree with all its descendants. The locked nodes among them keep their slots and their
parents until their last lock is released.

The evictable leaves are in a heap. When a leaf's key changes, the leaf is pushed again with a new ticket. Entries
with an old ticket are void and are skipped when they are popped. So no call visits the whole heap, except a rare
rebuild when most entries are void.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ..srt.arrays import Int32Array
from ..srt.view_parts import HotPrefix
from .allocator import BaseAllocator
from .base_prefix_cache import BasePrefixCache, CacheNode, InsertResult, Lookup, MatchResult, RetentionOwner
from .block_events import CacheListener
from .evict_policy import Value, get_evict_policy
from .radix_audit import audit_slices
from .radix_heat import hottest
from .radix_lookup import RadixLookup, find, look_up, namespace_key
from .radix_node import EMPTY, NO_TICKET, RadixNode, freed_by_unlock
from .retention import Retentions

# Added to the limit of the heap's length, so that small trees do not rebuild their heap all the time.
_HEAP_SLACK = 64


# Policy key, ticket, leaf. Tickets are unique, so nodes are never compared.
_HeapEntry = tuple[tuple[float, ...], int, RadixNode]


class RadixCache(BasePrefixCache):
    """The prefix cache that shares KV between requests. Not thread safe: only the scheduler's loop uses it."""

    shares = True

    def __init__(
        self,
        allocator: BaseAllocator,
        page_size: int,
        policy: str,
        *,
        equal_cost_depth: float | None = None,
        max_retained_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`allocator` gets the slots that are evicted. The other arguments are of the policy `value`: see its class and
        `Retentions`. Raises ValueError for an unknown eviction policy."""
        assert page_size == allocator.page_size
        self.page_size = page_size
        self._allocator = allocator
        self._policy = get_evict_policy(policy)
        self.retentions: Retentions | None = None
        """None: the policy honours none."""
        if isinstance(self._policy, Value):
            self.retentions = Retentions(clock, int(max_retained_share * allocator.size), self._push)
            if equal_cost_depth is not None:
                self._policy = Value(equal_cost_depth)
        self.listener: CacheListener | None = None
        """Told of every change of the cached prefixes; None: nobody is."""
        self.num_cuts = 0
        """How often a discarded prefix, an empty namespace or the whole tree was cut off (see RadixLookup)."""
        self.reset()

    def reset(self) -> None:
        if self.listener is not None:
            self.listener.cleared()
        self.evictable_size = 0
        self.protected_size = 0
        self.num_nodes = 0
        self.num_cuts += 1
        self._tick = 0
        self._next_ticket = NO_TICKET + 1
        self._heap: list[_HeapEntry] = []
        # Nodes that are no longer in the tree and still locked.
        self._discarded: set[RadixNode] = set()
        self._root = RadixNode(None, b"", EMPTY, EMPTY, tick=0)
        if self.retentions is not None:
            self.retentions.clear()

    # Lookup and insertion

    def match(self, tokens: Int32Array, namespace: str = "") -> MatchResult:
        path, matched_len = self._descend(tokens, namespace)
        if not matched_len:
            return MatchResult(EMPTY, self._root)
        self._touch(path)
        return MatchResult(np.concatenate([node.slots for node in path]), path[-1])

    def look_up(self, tokens: Int32Array, namespace: str = "", earlier: Lookup | None = None) -> Lookup:
        assert earlier is None or isinstance(earlier, RadixLookup)
        return look_up(self, self._root, tokens, namespace, earlier)

    def match_path(self, tokens: Int32Array, namespace: str = "") -> tuple[Sequence[CacheNode], int]:
        return find(self._root, tokens, namespace, self.page_size)[:2]

    def evictable_match_len(self, tokens: Int32Array, namespace: str = "") -> int:
        path, length, _ = find(self._root, tokens, namespace, self.page_size)
        return max(length - sum(len(node.tokens) for node in path if node.lock_count), 0)

    def insert(
        self,
        tokens: Int32Array,
        slots: Int32Array,
        namespace: str = "",
    ) -> InsertResult:
        assert len(tokens) == len(slots) and slots.dtype == np.int32
        taken_len = len(tokens) // self.page_size * self.page_size
        path, duplicate_len = self._descend(tokens, namespace)
        self._touch(path)
        end = path[-1] if path else self._root
        if duplicate_len < taken_len:
            parent = path[-1] if path else self._namespace_node(namespace)
            end = self._add_leaf(parent, tokens[duplicate_len:taken_len], slots[duplicate_len:taken_len])
        return InsertResult(duplicate_len, taken_len, end)

    def retain(self, tokens: Int32Array, seconds: float, owner: RetentionOwner, namespace: str = "") -> None:
        assert self.retentions is not None, "the eviction policy honours no retention"
        self._tick = self.retentions.lapse(self._tick)
        excess, length = 0, self.retentions.max_tokens
        while True:  # of a prefix that is too long, its beginning
            path, length = self._descend(tokens[: length - excess], namespace)
            excess = self.retentions.retain(path[-1] if path else None, seconds, owner, namespace)
            if not excess:
                return

    def _descend(self, tokens: Int32Array, namespace: str) -> tuple[list[RadixNode], int]:
        """Walk down as `find` does, and split the last node at the end of the match: all nodes then match whole."""
        path, matched_len, matched_in_last = find(self._root, tokens, namespace, self.page_size)
        if path and matched_in_last < len(path[-1].tokens):
            path[-1] = self._split(path[-1], matched_in_last)
        return path, matched_len

    def _touch(self, path: list[RadixNode]) -> None:
        if self.retentions is not None:
            self._tick = self.retentions.lapse(self._tick)
        self._tick += 1
        for node in path:
            node.last_access = self._tick
        if self.retentions is not None:
            self.retentions.touch(path, self._tick)
        # Only the last node of a path can be a leaf.
        if path and path[-1].ticket != NO_TICKET:
            self._push(path[-1])

    def _split(self, node: RadixNode, upper_len: int) -> RadixNode:
        """Cut an edge in two. Returns the new upper node, which copies the locks and history of `node`.

        `node` becomes the lower half. Its end does not move, so handles and locks on it keep their meaning.
        """
        assert 0 < upper_len < len(node.tokens) and node.parent is not None
        # Copies, not views: each half must be able to release its memory alone.
        upper_tokens, upper_slots = node.tokens[:upper_len].copy(), node.slots[:upper_len].copy()
        upper = RadixNode(node.parent, node.key, upper_tokens, upper_slots, node.created)
        upper.lock_count = node.lock_count
        upper.num_uses = node.num_uses
        upper.last_access = node.last_access
        node.parent.children[node.key] = upper
        node.tokens = node.tokens[upper_len:].copy()
        node.slots = node.slots[upper_len:].copy()
        node.key = node.tokens[: self.page_size].tobytes()
        node.parent = upper
        upper.children[node.key] = node
        self.num_nodes += 1
        if self.retentions is not None:
            self.retentions.split(upper, node)
        if self.listener is not None:
            self.listener.split(upper, node)
        return upper

    def _namespace_node(self, namespace: str) -> RadixNode:
        key = namespace_key(namespace)
        node = self._root.children.get(key)
        if node is None:
            node = RadixNode(self._root, key, EMPTY, EMPTY, self._tick)
            self._root.children[key] = node
        return node

    def _add_leaf(self, parent: RadixNode, tokens: Int32Array, slots: Int32Array) -> RadixNode:
        key = tokens[: self.page_size].tobytes()
        leaf = RadixNode(parent, key, tokens.copy(), slots.copy(), self._tick)
        parent.children[key] = leaf
        parent.ticket = NO_TICKET
        self.num_nodes += 1
        self.evictable_size += len(tokens)
        self._push(leaf)
        if self.listener is not None:
            self.listener.stored(leaf)
        return leaf

    # Locks

    def lock(self, node: CacheNode, *, is_use: bool = True) -> None:
        self._lock_up_to(node, self._root, is_use)

    def unlock(self, node: CacheNode) -> None:
        current = self._attached(node)
        while current is not self._root:
            parent = current.parent
            assert current.lock_count > 0, "unlocked more often than locked"
            current.lock_count -= 1
            if current.lock_count == 0:
                self.protected_size -= len(current.tokens)
                if current in self._discarded:
                    self._discarded.remove(current)
                    self._allocator.free(self._clear_node(current))
                else:
                    self.evictable_size += len(current.tokens)
                    if not current.children:
                        self._push(current)
            assert parent is not None
            current = parent

    def freed_by_unlock(self, nodes: Iterable[CacheNode]) -> Iterator[int]:
        return freed_by_unlock(map(self._attached, nodes))

    def move_lock(self, held: CacheNode, node: CacheNode) -> None:
        # The shared path up to the root keeps the lock that it has from `held`.
        self._lock_up_to(node, self._attached(held), is_use=True)

    def _lock_up_to(self, node: CacheNode, stop: RadixNode, is_use: bool) -> None:
        current = self._attached(node)
        while current is not stop:
            assert current.parent is not None, "the lock that moves is not on the way to the root"
            if current.lock_count == 0:
                self.evictable_size -= len(current.tokens)
                self.protected_size += len(current.tokens)
                current.ticket = NO_TICKET
            current.lock_count += 1
            current.num_uses += is_use
            current = current.parent

    def _attached(self, node: CacheNode) -> RadixNode:
        assert isinstance(node, RadixNode)
        assert node.parent is not None or node is self._root, "this handle's node was evicted, discarded or reset"
        return node

    # Eviction

    def evict(self, num_tokens: int) -> int:
        """Evict leaves in the order of the policy. The last leaf loses only the pages that are needed, from its end."""
        page_size = self.page_size
        freed: list[Int32Array] = []
        num_freed = 0
        if self.retentions is not None:
            self._tick = self.retentions.lapse(self._tick)
        while num_freed < num_tokens and self._heap:
            _, ticket, leaf = heapq.heappop(self._heap)
            if ticket != leaf.ticket:
                continue
            wanted = -(-(num_tokens - num_freed) // page_size) * page_size
            kept = max(len(leaf.tokens) - wanted, 0)
            freed.append(leaf.slots[kept:])
            num_freed += len(leaf.slots) - kept
            if self.listener is not None:
                self.listener.removed(leaf, kept)
            if self.retentions is not None:
                self.retentions.shorten(leaf, kept)
            if kept:
                self._shorten_leaf(leaf, kept)
                heapq.heappush(self._heap, (self._policy(leaf), ticket, leaf))
            else:
                self._remove_leaf(leaf)
        self._bound_heap()
        if freed:
            self.evictable_size -= num_freed
            self._allocator.free(np.concatenate(freed))
        return num_freed

    def _shorten_leaf(self, leaf: RadixNode, kept: int) -> None:
        leaf.shorten(kept)

    def _remove_leaf(self, leaf: RadixNode) -> None:
        self._unlink(leaf)
        self._clear_node(leaf)
        self.num_nodes -= 1

    def _unlink(self, node: RadixNode) -> None:
        """Take a node, with all its descendants, out of the tree. The node keeps its link to its parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.children:
            return
        if parent.parent is self._root:  # a namespace without tokens
            del self._root.children[parent.key]
            self.num_cuts += 1
            if parent.lock_count:
                self._discarded.add(parent)
        elif parent.lock_count == 0:
            self._push(parent)

    def _clear_node(self, node: RadixNode) -> Int32Array:
        """Invalidate a node that is no longer in the tree. Returns its slots."""
        slots = node.slots
        # Void heap entries may keep the node in memory for a while. They must not keep its arrays.
        node.parent = None
        node.tokens = node.slots = EMPTY
        node.ticket = NO_TICKET
        return slots

    def _push(self, leaf: RadixNode) -> None:
        """Push a leaf without locks onto the heap with its present key. Its earlier entry becomes void."""
        leaf.ticket = self._next_ticket
        self._next_ticket += 1
        heapq.heappush(self._heap, (self._policy(leaf), leaf.ticket, leaf))
        self._bound_heap()

    @property
    def _max_heap_len(self) -> int:
        return 2 * self.num_nodes + _HEAP_SLACK

    def _bound_heap(self) -> None:
        """Rebuild the heap without void entries once they are the majority. So a push costs O(log n) on average."""
        if len(self._heap) > self._max_heap_len:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)

    # Discarding

    def discard(self, tokens: Int32Array, kept_len: int, namespace: str = "") -> None:
        assert kept_len % self.page_size == 0
        path, matched_len = self._descend(tokens[:kept_len], namespace)
        parent = path[-1] if path else self._root.children.get(namespace_key(namespace))
        if parent is None or matched_len < kept_len:
            return
        top = parent.children.get(tokens[kept_len : kept_len + self.page_size].tobytes())
        if top is None:
            return
        if self.retentions is not None:
            self.retentions.cut_off(top)
        self._unlink(top)
        self.num_cuts += 1
        freed = [EMPTY]
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children = {}
            self.num_nodes -= 1
            if self.retentions is not None:
                self.retentions.discard(node)
            if self.listener is not None:
                self.listener.removed(node, 0)
            if node.lock_count:
                self._discarded.add(node)
            else:
                self.evictable_size -= len(node.tokens)
                freed.append(self._clear_node(node))
        self._bound_heap()
        self._allocator.free(np.concatenate(freed))

    def is_discarded(self, node: CacheNode) -> bool:
        return node in self._discarded

    # Checks and views

    @property
    def retained_size(self) -> int:
        return 0 if self.retentions is None else self.retentions.num_tokens

    def hottest(self, max_prefixes: int, max_tokens: int) -> list[HotPrefix]:
        return hottest(self._root.children.get(namespace_key("")), max_prefixes, max_tokens)

    def audit_slices(self) -> Iterator[Int32Array]:
        return audit_slices(self)
