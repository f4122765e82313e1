"""A reader of KV events, written from the wire format alone: it knows which prefixes a server has in its cache."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

Prefix = tuple[str, tuple[int, ...]]
"""Cache salt, and all tokens from the start of the prompt to the end of a block."""


class KVEventReader:
    def __init__(self) -> None:
        self.blocks: dict[int, Prefix] = {}
        """The prefix that each block ends, by the block's hash."""
        self.next_seq = 0
        self.missed: list[int] = []
        """Sequence numbers that have not come."""

    @property
    def prefixes(self) -> set[Prefix]:
        assert len(set(self.blocks.values())) == len(self.blocks), "two hashes for one prefix"
        return set(self.blocks.values())

    def on_message(self, frames: list[bytes]) -> None:
        """Applies a message, unless one before it is missing: then `missed` says what to ask for."""
        assert len(frames) == 3 and len(frames[1]) == 8
        (seq,) = struct.unpack(">Q", frames[1])
        if seq > self.next_seq:
            self.missed = list(range(self.next_seq, seq))
            return
        if seq == self.next_seq:
            self.next_seq += 1
            self.apply(frames[2])

    def apply(self, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload)
        assert isinstance(batch, list)
        time_s, events, rank = batch
        assert isinstance(time_s, float) and rank in (0, None) and events
        for event in events:
            {"BlockStored": self._stored, "BlockRemoved": self._removed, "AllBlocksCleared": self._cleared}[
                event["type"]
            ](event)

    def _stored(self, event: dict[str, Any]) -> None:
        assert {"lora_id", "medium", "lora_name", "parent_block_hash"} <= set(event), "strict readers want them all"
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        assert event["medium"] == "GPU" and event["lora_id"] is None and event["lora_name"] is None
        assert len(tokens) == len(hashes) * size and hashes
        assert all(-(2**63) <= one < 2**63 for one in hashes)
        salt = event.get("cache_salt", "")
        parent = event["parent_block_hash"]
        if parent is None:
            before: tuple[int, ...] = ()
            assert event.get("extra_keys") == ([[salt], *[None] * (len(hashes) - 1)] if salt else None)
        else:
            known_salt, before = self.blocks[parent]
            assert known_salt == salt and "extra_keys" not in event
        for place, one in enumerate(hashes):
            assert one not in self.blocks, "stored twice"
            self.blocks[one] = (salt, before + tuple(tokens[: (place + 1) * size]))

    def _removed(self, event: dict[str, Any]) -> None:
        assert event["medium"] == "GPU" and event["block_hashes"]
        for one in event["block_hashes"]:
            del self.blocks[one]

    def _cleared(self, event: dict[str, Any]) -> None:
        assert set(event) == {"type"}
        self.blocks.clear()
