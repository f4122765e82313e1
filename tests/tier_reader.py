"""A reader of the KV events of a scheduler's tiers, and whether it knows what the tiers have."""

from __future__ import annotations

import time

import msgspec
import numpy as np
from kv_event_reader import DISK, HOST, KVEventReader
from patience import PATIENCE_S

from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.mem_cache.block_events import BlockEvents
from tercet.mem_cache.block_keys import BlockKeys
from tercet.srt.kv_events import EventBatch


class TierReader:
    """Watches a KVCacheManager. `reader` is the reader."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.reader = KVEventReader()
        self._kv = kv
        self._events = BlockEvents(kv.page_size)
        self._key_of: dict[tuple[bytes, int], bytes] = {}
        """By the identity of the model, and the last hash of a block."""
        kv.watch(self._events)
        self.read()

    def read(self) -> None:
        """As a publisher does in each turn, until all files that are found are reported."""
        self._kv.report_files()
        while self._kv.tiers is not None and self._kv.tiers.has_file_changes:
            self._kv.report_files()
        found = self._events.take()
        if found:
            self.reader.apply(msgspec.msgpack.encode(EventBatch(0.0, found)))

    def keys_in(self, medium: str) -> set[bytes]:
        """The blocks of a lower tier that the reader knows. It must know nothing else."""
        tiers = self._kv.tiers
        assert tiers is not None
        blocks = self.reader.media[medium]
        ends = {one for one, (_, tokens) in blocks.items() if len(tokens) % tiers._block_len == 0}
        pages = range(0, tiers._block_len, tiers._page_size)
        whole = [blocks[one] for one in ends]
        expected = {(salt, tokens[: len(tokens) - page]) for salt, tokens in whole for page in pages}
        assert expected == self.reader.prefixes_in(medium), "a part of a block"
        named = {(tiers._identity, one) for one in ends}
        for identity, one in named - self._key_of.keys():
            salt, tokens = blocks[one]
            keys = BlockKeys(identity, salt, tiers._block_len)
            self._key_of[identity, one] = keys.cover(np.array(tokens, np.int32))[-1]
        return {self._key_of[one] for one in named}

    def check_host(self) -> None:
        """The reader knows what host memory has."""
        assert self._kv.tiers is not None
        assert self.keys_in(HOST) == self._kv.tiers.blocks._block_of.keys()

    def wait_for_files(self, keys: set[bytes]) -> None:
        """Until the reader knows these files and no others."""
        deadline = time.monotonic() + PATIENCE_S
        self.read()
        while self.keys_in(DISK) != keys:
            assert time.monotonic() < deadline, "the reader does not learn which files there are"
            time.sleep(0.002)
            self.read()
