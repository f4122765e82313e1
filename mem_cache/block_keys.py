"""The keys of KV blocks: each names the tokens of its block, all tokens before them, and the model that computed them.

A block is `block_len` tokens. Its key is a hash of the key before it and of its own tokens, so equal keys mean equal
prefixes. The first key continues a hash of the namespace and of the identity of the model (`model_executor/runner/
kv_identity.py`). The hash is cryptographic, because the tokens come from clients.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from ..srt.arrays import Int32Array

KEY_BYTES = 32


class BlockContent(NamedTuple):
    """What a key stands for."""

    before: bytes
    """The key before it: of the block before, or the first key of its namespace."""
    namespace: str
    tokens: bytes
    """int32 [block_len]"""

    @property
    def key(self) -> bytes:
        return _hash(self.before + self.tokens)

    def is_first(self, identity: bytes) -> bool:
        """Whether it begins a prompt, for a model of this identity."""
        return self.before == first_key(identity, self.namespace)


def first_key(identity: bytes, namespace: str) -> bytes:
    """The key before the first block of a namespace."""
    # Hashed alone, so that no end of an identity can pass for the start of a namespace.
    return _hash(_hash(identity) + namespace.encode("utf-8", "surrogatepass"))


class BlockKeys:
    """The keys of one growing sequence. `keys[i]`: of the tokens [i * block_len, (i + 1) * block_len)."""

    def __init__(self, identity: bytes, namespace: str, block_len: int) -> None:
        self.keys: list[bytes] = []
        self.places: dict[bytes, int] = {}
        """The index of each key."""
        self._namespace = namespace
        self._first = self._before = first_key(identity, namespace)
        self._block_len = block_len

    def key(self, tokens: Int32Array, index: int) -> bytes | None:
        """The key of one block of `tokens`, or None if they do not fill it. Hashes only what is before its end."""
        if (index + 1) * self._block_len > len(tokens):
            return None
        self._hash_up_to(tokens, index + 1)
        return self.keys[index]

    def cover(self, tokens: Int32Array) -> list[bytes]:
        """The keys of the whole blocks of `tokens`: int32 [n], which continue the tokens of earlier calls."""
        assert tokens.dtype == np.int32
        num_blocks = len(tokens) // self._block_len
        self._hash_up_to(tokens, num_blocks)
        return self.keys[:num_blocks]

    def _hash_up_to(self, tokens: Int32Array, num_blocks: int) -> None:
        for index in range(len(self.keys), num_blocks):
            block = tokens[index * self._block_len : (index + 1) * self._block_len]
            self._before = _hash(self._before + block.tobytes())
            self.places[self._before] = index
            self.keys.append(self._before)

    def content(self, tokens: Int32Array, index: int) -> BlockContent:
        """What one key stands for, of a block that `cover` has had."""
        block = tokens[index * self._block_len : (index + 1) * self._block_len]
        return BlockContent(self.keys[index - 1] if index else self._first, self._namespace, block.tobytes())


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
