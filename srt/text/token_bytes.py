"""What each token stands for in the text, as bytes, so that output can be decoded token by token.

In the two common kinds of vocabulary the text of some tokens is the concatenation of what each of them stands for:
byte-level BPE (GPT-2 and its heirs), where every character of a token spells one byte, and sentencepiece with byte
fallback (Llama 2), where U+2581 spells a space and <0x0A> a byte.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """The character that spells each byte in a byte-level vocabulary, and that byte.

    Printable Latin-1 characters spell themselves; the others, in order, are spelt by the characters from U+0100 on.
    Source: the GPT-2 release (`bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


class TokenBytes:
    """The bytes of each token of one vocabulary; worked out when asked for, then kept."""

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_level: bool) -> None:
        self._backend = backend
        self._alphabet = byte_level_alphabet() if byte_level else None
        self._known: dict[int, bytes] = {}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBytes | None:
        """None when the tokenizer's decoder does something else than to concatenate bytes."""
        if backend.decoder is None:
            return None
        # The parts of a decoder are not readable as attributes; its pickled state is JSON.
        decoder = json.loads(backend.decoder.__getstate__())
        steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(backend, byte_level=True)
        spells_spaces = steps[:1] == [{"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}]
        if spells_spaces and kinds[1:] in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
            return cls(backend, byte_level=False)
        return None

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for an id that the vocabulary does not have; OverflowError for one that no vocabulary can have."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(self._backend.id_to_token(token_id))
        return known

    def _spell(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if self._alphabet is not None:
            try:
                return bytes(map(self._alphabet.__getitem__, token))
            except KeyError:  # an added token: written as it is
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE_MARK, " ").encode()
