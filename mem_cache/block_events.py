"""Turns the changes of a radix cache into KV events about blocks. A block of an event is a page.

The hash of a block is the start of the SHA-256 of the hash before it and its tokens. So it stands for the whole prefix.
A namespace (cache salt and adapter) changes the hashes of all its blocks. The hash is the same in all tiers.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET

from ..srt.adapters import AdapterFacts, parts_of
from ..srt.kv_events import MEDIUM_DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from .radix_node import RadixNode

_HASH_BYTES = 8
TOKEN_BYTES = 4


class CacheListener(Protocol):
    """What a radix cache tells about its tree."""

    def stored(self, leaf: RadixNode) -> None:
        """A new leaf is in the tree."""

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """The edge of `lower` was cut. `upper` has its first tokens. The cached prefixes are the same."""

    def removed(self, node: RadixNode, kept_len: int) -> None:
        """The tokens of a node from `kept_len` on leave the tree. The node still has them."""

    def cleared(self) -> None:
        """The tree is empty."""


class _Edge(NamedTuple):
    """The blocks of a node's edge."""

    salt: str
    hashes: list[int]


class BlockEvents:
    """A CacheListener that collects events."""

    def __init__(
        self, page_size: int, adapter_with: Callable[[str], AdapterFacts | None] = lambda fingerprint: None
    ) -> None:
        """`adapter_with`: the loaded adapter with a fingerprint."""
        self._adapter_with = adapter_with
        self.session_id = ""
        """Of the request whose KV is stored next."""
        self._page_size = page_size
        self._edges: dict[RadixNode, _Edge] = {}
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        events = self._events
        if events:
            self._events = []
        return events

    def add(self, event: KVEvent) -> None:
        """An event of any tier. Until here, a namespace with an adapter stands in the place of the salt."""
        if isinstance(event, BlockStored) and isinstance(event.cache_salt, str):
            event = self._with_adapter(event, event.cache_salt)
        self._events.append(event)

    def _with_adapter(self, event: BlockStored, namespace: str) -> BlockStored:
        """The event with the adapter and the salt of its namespace.

        Blocks of an adapter that is not loaded keep the namespace as their salt. No request has it, so no reader takes
        them for blocks of the model alone.
        """
        fingerprint, salt = parts_of(namespace)
        adapter = self._adapter_with(fingerprint) if fingerprint else None
        if salt == namespace or (fingerprint and adapter is None):
            return event
        begins, num_blocks = event.parent_block_hash is None and bool(salt), len(event.block_hashes)
        names = [] if adapter is None else [adapter.name]
        first, others = [*names, *([salt] if begins else [])], names or None
        return msgspec.structs.replace(
            event,
            lora_id=None if adapter is None else adapter.number,
            lora_name=None if adapter is None else adapter.name,
            cache_salt=salt or UNSET,
            extra_keys=[first or None, *[others] * (num_blocks - 1)] if names or begins else UNSET,
        )

    def stored(self, leaf: RadixNode) -> None:
        assert leaf.parent is not None
        before = self._edges.get(leaf.parent)
        salt = _salt(leaf.parent.key) if before is None else before.salt
        parent_hash = None if before is None else before.hashes[-1]
        hashes = hash_pages(leaf.tokens.tobytes(), self._page_size, salt, parent_hash)
        self._edges[leaf] = _Edge(salt, hashes)
        tokens = leaf.tokens.tolist()
        self.add(stored_event(hashes, parent_hash, tokens, self._page_size, salt, MEDIUM_DEVICE, self.session_id))

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        salt, hashes = self._edges[lower]
        num_upper = len(upper.tokens) // self._page_size
        self._edges[upper] = _Edge(salt, hashes[:num_upper])
        self._edges[lower] = _Edge(salt, hashes[num_upper:])

    def removed(self, node: RadixNode, kept_len: int) -> None:
        salt, hashes = self._edges.pop(node)
        num_kept = kept_len // self._page_size
        if num_kept:
            self._edges[node] = _Edge(salt, hashes[:num_kept])
        self._events.append(BlockRemoved(hashes[num_kept:]))

    def cleared(self) -> None:
        self._edges.clear()
        self._events.append(AllBlocksCleared())


def hash_pages(tokens: bytes, page_size: int, salt: str, parent_hash: int | None) -> list[int]:
    """The hashes of successive pages. `tokens`: int32 of whole pages. `parent_hash`: of the page before them."""
    if parent_hash is not None:
        last = parent_hash.to_bytes(_HASH_BYTES, "big", signed=True)
    else:
        last = sha256(salt.encode()).digest()[:_HASH_BYTES] if salt else b""
    page_bytes = TOKEN_BYTES * page_size
    hashes = []
    for start in range(0, len(tokens), page_bytes):
        last = sha256(last + tokens[start : start + page_bytes]).digest()[:_HASH_BYTES]
        hashes.append(int.from_bytes(last, "big", signed=True))
    return hashes


def stored_event(
    hashes: list[int],
    parent_hash: int | None,
    tokens: list[int],
    page_size: int,
    salt: str,
    medium: str,
    session_id: str = "",
) -> BlockStored:
    """Pages are stored. `hashes`: of each page. `tokens`: of all of them."""
    begins = bool(salt) and parent_hash is None
    return BlockStored(
        hashes,
        parent_hash,
        tokens,
        page_size,
        medium=medium,
        extra_keys=[[salt], *[None] * (len(hashes) - 1)] if begins else UNSET,
        cache_salt=salt or UNSET,
        session_id=session_id or UNSET,
    )


def salt_of(namespace: str) -> str:
    """The salt in events. It is valid Unicode, which a namespace need not be."""
    return _salt(namespace.encode("utf-8", "surrogatepass"))


def _salt(key: bytes) -> str:
    return key.decode("utf-8", "replace")
