"""A reader of KV events, written from the wire format alone: it knows the prefixes that each medium of a server has."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

Prefix = tuple[str, tuple[int, ...]]
"""Cache salt, and all tokens from the start of the prompt to the end of a block."""


DEVICE, HOST, DISK = "GPU", "CPU_PINNED", "DISK"
"""The media that SGLang's router knows, without EXTERNAL. It drops what is stored in any other."""


class KVEventReader:
    def __init__(self) -> None:
        self.media: dict[str, dict[int, Prefix]] = {DEVICE: {}, HOST: {}, DISK: {}}
        """The prefix that each block ends, by the block's hash, for each medium."""
        self.sessions: dict[int, str] = {}
        """Whose request stored a block, by the block's hash."""
        self.next_seq = 0
        self.missed: list[int] = []
        """Sequence numbers that have not come."""
        self._names: dict[int, Prefix] = {}
        """All blocks since AllBlocksCleared. A block may be stored when its parent has left all media."""

    @property
    def prefixes(self) -> set[Prefix]:
        """Those in the memory of the model's device."""
        return self.prefixes_in(DEVICE)

    def prefixes_in(self, medium: str) -> set[Prefix]:
        blocks = self.media[medium]
        assert len(set(blocks.values())) == len(blocks), "two hashes for one prefix"
        return set(blocks.values())

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
        assert isinstance(time_s, float) and rank in (0, None) and isinstance(events, list)
        for event in events:
            {"BlockStored": self._stored, "BlockRemoved": self._removed, "AllBlocksCleared": self._cleared}[
                event["type"]
            ](event)

    def _stored(self, event: dict[str, Any]) -> None:
        assert {"lora_id", "medium", "lora_name", "parent_block_hash"} <= set(event), "strict readers want them all"
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        blocks = self.media[event["medium"]]
        assert event["lora_id"] is None and event["lora_name"] is None
        assert len(tokens) == len(hashes) * size and hashes
        assert all(-(2**63) <= one < 2**63 for one in hashes)
        salt = event.get("cache_salt", "")
        parent = event["parent_block_hash"]
        if parent is None:
            before: tuple[int, ...] = ()
            assert event.get("extra_keys") == ([[salt], *[None] * (len(hashes) - 1)] if salt else None)
        else:
            known_salt, before = self._names[parent]
            assert known_salt == salt and "extra_keys" not in event
            assert parent in blocks or event["medium"] != DEVICE, "a prefix with a gap"
        for place, one in enumerate(hashes):
            assert one not in blocks, "stored twice"
            prefix = (salt, before + tuple(tokens[: (place + 1) * size]))
            assert self._names.setdefault(one, prefix) == prefix, "one hash for two prefixes"
            blocks[one] = prefix
            if "session_id" in event:
                self.sessions[one] = event["session_id"]

    def _removed(self, event: dict[str, Any]) -> None:
        assert event["block_hashes"]
        for one in event["block_hashes"]:
            del self.media[event["medium"]][one]

    def _cleared(self, event: dict[str, Any]) -> None:
        assert set(event) == {"type"}
        for known in (*self.media.values(), self._names, self.sessions):
            known.clear()
