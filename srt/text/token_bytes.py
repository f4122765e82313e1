"""The bytes of each token, with which output can be decoded token by token.

In the two common kinds of vocabulary, the text of a sequence is the concatenation of its tokens' bytes. In byte-level
BPE (GPT-2 and its successors) each character of a token stands for one byte. In sentencepiece U+2581 stands for a
space, and with byte fallback (Llama 2) a token such as <0x0A> for a byte.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_SPACE_MARK = "\u2581"
_MAX_SHARED = 8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = re.compile("(ByteFallback )?(Replace|Metaspace)( ByteFallback)?( Fuse( Strip)?)?")
"""The steps of decoders that join the bytes of all tokens. They may then drop the space at the start of the text."""


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    A printable Latin-1 character stands for its own byte. The characters from U+0100 on stand for the other bytes, in
    order. Source: the GPT-2 release (`bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a vocabulary; empty for an unknown id. They are computed on first access and kept.

    Raises OverflowError for an id outside [0, 2**32).
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_level: bool, byte_fallback: bool = False) -> None:
        super().__init__()
        self._backend = backend
        self._alphabet = byte_level_alphabet() if byte_level else None
        self._byte_fallback = byte_fallback
        self._without: dict[frozenset[int], set[int]] = {}

    def known_without(self, some_bytes: frozenset[int]) -> set[int]:
        """Tokens that are known to have none of some bytes: callers add those that they find.

        Those who ask for the same bytes share a set, so the vocabulary is tested once. The last `_MAX_SHARED` sets are
        kept, because clients choose the bytes.
        """
        found = self._without[some_bytes] = self._without.pop(some_bytes, set())
        if len(self._without) > _MAX_SHARED:
            del self._without[next(iter(self._without))]
        return found

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBytes | None:
        """The TokenBytes of a tokenizer. None if its decoder does more than concatenate bytes."""
        if backend.decoder is None:
            return None
        # A decoder has no attributes for its parts, but its pickled state is JSON.
        decoder = json.loads(backend.decoder.__getstate__())
        steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(backend, byte_level=True)
        if _SENTENCEPIECE.fullmatch(" ".join(kinds)) and any(map(_spells_spaces, steps)):
            return cls(backend, byte_level=False, byte_fallback="ByteFallback" in kinds)
        return None

    def __missing__(self, token_id: int) -> bytes:
        spelled = self[token_id] = self._spell(self._backend.id_to_token(token_id))
        return spelled

    def _spell(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if self._alphabet is not None:
            try:
                return bytes(map(self._alphabet.__getitem__, token))
            except KeyError:  # an added token, which is plain text
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE_MARK, " ").encode()


def _spells_spaces(step: dict[str, Any]) -> bool:
    """Whether a step of a decoder replaces each U+2581 by a space."""
    replaces = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    return step == replaces or (step["type"] == "Metaspace" and step["replacement"] == _SPACE_MARK)
