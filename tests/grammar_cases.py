"""A small vocabulary for the tests of real grammar libraries, and what a grammar takes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tercet.managers.grammar import Grammar, Vocabulary
from tercet.srt.grammar_spec import GrammarSpec

WORDS = [b"true", b"false", b"null", b'{"', b'": ', b", ", b"</f>", b"<f>", b"ab", b"abc", "\u00e9".encode(), b"\xff"]
EOS, SPECIAL, UNUSED = 256, 257, 258
TOKENS = [bytes([i]) for i in range(256)] + [b"<eos>", b"<special>", b"", *WORDS]
VOCABULARY = Vocabulary(
    TOKENS, frozenset({EOS, SPECIAL}), frozenset({EOS}), {"<special>": SPECIAL}, lambda text: [*text.encode()]
)


def spec_of(**given: Any) -> GrammarSpec:
    ((kind, value),) = given.items()
    return GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value))


def allowed(matcher: Any, *, special: bool = False) -> set[int]:
    """The tokens that may come next. `special`: special tokens may be among them."""
    bits = np.full((2, VOCABULARY.num_words), -1, np.int32)
    matcher.fill(bits, 1)
    assert (bits[0] == -1).all(), "another line was written"
    unpacked = np.unpackbits(bits[1].view(np.uint8), bitorder="little")
    ids = set(np.flatnonzero(unpacked[: len(TOKENS)]).tolist())
    assert UNUSED not in ids and (special or SPECIAL not in ids)
    return ids


def takes(grammar: Grammar, text: str | bytes) -> bool:
    """Whether the whole text, byte by byte, matches."""
    matcher = grammar.start()
    for byte in text.encode() if isinstance(text, str) else text:
        if byte not in allowed(matcher):
            return False
        matcher.accept(byte)
    return EOS in allowed(matcher)
