"""What `peak_bytes` counts, and what it must leave out."""

from __future__ import annotations

import torch
from peak_memory import peak_bytes

SIZE = 131_072


def test_it_counts_what_a_run_holds_at_once():
    def run():
        first = torch.empty(SIZE, dtype=torch.uint8)
        del first
        _second, _third = (torch.empty(SIZE, dtype=torch.uint8) for _ in range(2))

    assert peak_bytes(run) == 2 * SIZE


def test_a_block_that_a_run_only_frees_is_not_subtracted():
    """torch still knows the size of a block at this address from a profile before."""
    kept = {}

    def allocate():
        kept["block"] = torch.empty(SIZE, dtype=torch.uint8)

    assert peak_bytes(allocate) == SIZE

    def free_and_allocate():
        kept.clear()
        _other = torch.empty(2 * SIZE, dtype=torch.uint8)

    assert peak_bytes(free_and_allocate) == 2 * SIZE
