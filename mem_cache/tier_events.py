"""Turns what the lower tiers keep and drop into KV events. Their blocks have several pages, and events name each page.

A page has the same hash in all tiers (block_events.py). To hash it, the hash of the page before it must be known. A
request that saves or reads a block has all tokens before it. A file of an earlier engine or of another server only
names the block before it. So it is reported when that block has been, or when a request has the block.

Blocks with the same beginning may share pages. A page is in a medium as long as a block with it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..srt.arrays import Int32Array
from ..srt.kv_events import MEDIUM_DISK, MEDIUM_HOST, BlockRemoved, KVEvent
from .block_events import TOKEN_BYTES, hash_pages, salt_of, stored_event
from .block_keys import BlockContent

_MAX_ORPHANS = 1 << 14
"""They take about 1 kB each. A prompt of a million tokens has so many blocks of 64 tokens."""


@dataclass(eq=False, slots=True)
class _Block:
    """A block of a lower tier."""

    salt: str
    before: int | None
    """The hash of the page before it; None: it begins a prompt."""
    tokens: bytes
    """int32"""
    hashes: list[int]
    """Of its pages."""
    media: set[str] = field(default_factory=set)


class TierEvents:
    """Knows the blocks that the readers know, by their keys. `add` gets the events.

    Files whose parents are not known yet are orphans. A folder may have any number of them, for example files of other
    models. So only the latest ones are remembered. The others are reported when a request has their blocks.
    """

    def __init__(self, page_size: int, block_len: int, identity: bytes, add: Callable[[KVEvent], None]) -> None:
        """`block_len`: tokens of a block. `identity`: of the model, as in the keys."""
        self._page_size = page_size
        self._block_len = block_len
        self._identity = identity
        self._add = add
        self._blocks: dict[bytes, _Block] = {}
        """Those that a lower tier has."""
        self._reading: dict[bytes, _Block] = {}
        """Those that are read from files into host memory."""
        self._orphans: dict[bytes, dict[bytes, BlockContent]] = {}
        """By the key of the parent, and their own."""
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()
        """The parent's key of each orphan, the one that was found first first."""
        self._num_holders: dict[str, dict[int, int]] = {MEDIUM_HOST: {}, MEDIUM_DISK: {}}
        """How many blocks of a medium have a page, by its hash."""

    def on_saved(self, keys: Sequence[bytes], index: int, tokens: Int32Array, namespace: str) -> None:
        """Host memory has a block of a request. `keys`: at least up to this block. `tokens`: at least as many."""
        self._on_stored(keys[index], self._block(keys, index, tokens, namespace), MEDIUM_HOST)

    def on_used_file(self, keys: Sequence[bytes], index: int, tokens: Int32Array, namespace: str) -> None:
        """A file has a block of a request. The arguments are those of `on_saved`."""
        self._on_stored(keys[index], self._block(keys, index, tokens, namespace), MEDIUM_DISK)

    def on_read_begins(self, keys: Sequence[bytes], index: int, tokens: Int32Array, namespace: str) -> None:
        """A block is read into host memory. The arguments are those of `on_saved`."""
        self._reading[keys[index]] = self._block(keys, index, tokens, namespace)

    def on_read(self, key: bytes, *, is_kept: bool) -> None:
        """A read has ended. `is_kept`: whether host memory has the block."""
        block = self._reading.pop(key, None)
        if is_kept and block is not None:
            self._on_stored(key, self._blocks.get(key, block), MEDIUM_HOST)

    def on_dropped(self, key: bytes) -> None:
        """Host memory no longer has a block."""
        self._on_removed(key, MEDIUM_HOST)

    def on_file(self, key: bytes, content: BlockContent | None) -> None:
        """There is a file of this key. `content`: what the key stands for; None: the file has gone."""
        if content is None:
            self._on_removed(key, MEDIUM_DISK)
            self._leave_parent(key)
            return
        if len(content.tokens) != self._block_len * TOKEN_BYTES:  # no engine of this identity has written it
            return
        block = self._blocks.get(key)
        if block is None and content.before in self._blocks:
            block = self._child(self._blocks[content.before], content)
        elif block is None and content.is_first(self._identity):
            block = self._first(content)
        if block is not None:
            self._on_stored(key, block, MEDIUM_DISK)
        else:
            self._orphans.setdefault(content.before, {})[key] = content
            self._parents[key] = content.before
            if len(self._parents) > _MAX_ORPHANS:
                self._leave_parent(next(iter(self._parents)))

    def clear(self, identity: bytes) -> None:
        """Forget everything, as the readers do because of AllBlocksCleared. From now on, keys have this identity."""
        self._identity = identity
        self._blocks.clear()
        self._reading.clear()
        self._orphans.clear()
        self._parents.clear()
        for num_holders in self._num_holders.values():
            num_holders.clear()

    def _block(self, keys: Sequence[bytes], index: int, tokens: Int32Array, namespace: str) -> _Block:
        known = self._find(keys[index])
        if known is not None:
            return known
        begin, parent = index, None
        while begin and (parent := self._find(keys[begin - 1])) is None:
            begin -= 1
        before = None if parent is None else parent.hashes[-1]
        salt, start, end = salt_of(namespace), index * self._block_len, (index + 1) * self._block_len
        if begin < index:  # no lower tier has or reads the blocks between
            before = hash_pages(tokens[begin * self._block_len : start].tobytes(), self._page_size, salt, before)[-1]
        data = tokens[start:end].tobytes()
        return _Block(salt, before, data, hash_pages(data, self._page_size, salt, before))

    def _find(self, key: bytes) -> _Block | None:
        return self._blocks.get(key) or self._reading.get(key)

    def _first(self, content: BlockContent) -> _Block:
        salt = salt_of(content.namespace)
        return _Block(salt, None, content.tokens, hash_pages(content.tokens, self._page_size, salt, None))

    def _child(self, parent: _Block, content: BlockContent) -> _Block:
        before = parent.hashes[-1]
        hashes = hash_pages(content.tokens, self._page_size, parent.salt, before)
        return _Block(parent.salt, before, content.tokens, hashes)

    def _on_stored(self, key: bytes, block: _Block, medium: str) -> None:
        self._report(key, block, medium)
        if key in self._parents:
            self._leave_parent(key)
            self._report(key, block, MEDIUM_DISK)
        found = [key]
        while found:  # not recursive, because prompts are long
            parent = found.pop()
            for child, content in self._orphans.pop(parent, {}).items():
                del self._parents[child]
                self._report(child, self._child(self._blocks[parent], content), MEDIUM_DISK)
                found.append(child)

    def _report(self, key: bytes, block: _Block, medium: str) -> None:
        if medium in block.media:
            return
        self._blocks[key] = block
        block.media.add(medium)
        num_holders, hashes = self._num_holders[medium], block.hashes
        known = sum(one in num_holders for one in hashes)  # always the first ones
        for one in hashes:
            num_holders[one] = num_holders.get(one, 0) + 1
        if known < len(hashes):
            before = hashes[known - 1] if known else block.before
            tokens = np.frombuffer(block.tokens, np.int32)[known * self._page_size :].tolist()
            self._add(stored_event(hashes[known:], before, tokens, self._page_size, block.salt, medium))

    def _on_removed(self, key: bytes, medium: str) -> None:
        block = self._blocks.get(key)
        if block is None or medium not in block.media:
            return
        block.media.remove(medium)
        if not block.media:
            del self._blocks[key]
        num_holders = self._num_holders[medium]
        for one in block.hashes:
            num_holders[one] -= 1
        gone = [one for one in block.hashes if not num_holders[one]]
        for one in gone:
            del num_holders[one]
        if gone:
            self._add(BlockRemoved(gone, medium))

    def _leave_parent(self, key: bytes) -> None:
        parent = self._parents.pop(key, None)
        if parent is not None:
            del self._orphans[parent][key]
            if not self._orphans[parent]:
                del self._orphans[parent]
