"""Blocks that tests write to KV files, and read again."""

from __future__ import annotations

import numpy as np

from tercet.mem_cache.block_keys import BlockContent
from tercet.mem_cache.kv_files import KVFiles

SIZE = 1000
CONTENT = BlockContent(b"before" * 5 + b"..", "salt", b"tokens.." * 2)
FILE_SIZE = SIZE + 116


def key(number: int) -> bytes:
    return bytes([number]) * 32


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def read(files: KVFiles, number: int) -> bool:
    target = np.zeros(SIZE, np.uint8)
    found = files.read(key(number), target)
    assert not found or np.array_equal(target, block(number))
    return found
