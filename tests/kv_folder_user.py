"""A server that uses a folder of KV files, as a process of its own: it writes, reads, and makes room.

It writes a line when it is ready, begins at a line on stdin, and then writes what it has done, as JSON. Wrong bytes are
an AssertionError.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from random import Random

import numpy as np

from tercet.mem_cache import kv_files
from tercet.mem_cache.block_keys import BlockContent
from tercet.mem_cache.kv_files import KVFiles

BLOCK_BYTES = 1000
FILE_BYTES = BLOCK_BYTES + 104
NUM_BLOCKS = 100
MAX_FILES = 20
LOOK_INTERVAL = 16
"""Steps between two looks at the folder. A step writes at most one file."""
CONTENT = BlockContent(bytes(32), "", bytes(8))


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def folder_bytes(folder: Path) -> int:
    total = 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(folder / name).st_size
    return total


def use(folder: Path, seed: int, num_steps: int) -> dict[str, int]:
    """Returns counts."""
    kv_files.spare_bytes = lambda _: sys.maxsize  # however full the disk is
    files, rng, own = KVFiles(folder, MAX_FILES * FILE_BYTES), Random(seed), set[int]()
    blocks, target = [block(number) for number in range(NUM_BLOCKS)], np.zeros(BLOCK_BYTES, np.uint8)
    counts = dict.fromkeys(("written", "read", "read of others", "gone", "removed", "damaged", "most bytes"), 0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for step in range(num_steps):
        if step % LOOK_INTERVAL == 0:
            files.look()
        number = rng.randrange(NUM_BLOCKS)
        key = number.to_bytes(32, "big")
        if not files.has(key):
            counts["written"] += files.write(key, CONTENT, blocks[number])
            own.add(number)
        elif files.read(key, target):
            assert np.array_equal(target, blocks[number]), f"block {number} has wrong bytes"
            counts["read"] += 1
            counts["read of others"] += number not in own
        else:
            counts["gone"] += 1
        for one, used_ns in files.unrenewed([key]).items():
            files.renew(one, used_ns)
        counts["most bytes"] = max(counts["most bytes"], folder_bytes(folder))
    return counts | {"removed": files.num_removed, "damaged": files.num_damaged}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(use(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
