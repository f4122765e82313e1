"""The folder of the KV files: names, times of use, and free space."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.mem_cache import kv_folder
from tercet.mem_cache.kv_folder import KVFile, file_name, in_order_of_use, list_folder, spare_bytes, use_time_ns


def test_a_list_has_the_files_of_blocks_only(tmp_path: Path) -> None:
    key = bytes(range(32))
    for name in (file_name(key), "tercet-kv-.kv", "tercet-kv-00.kv", "tercet-kv-x.kv", "x.tmp", "tercet-kv-a.tmp"):
        (tmp_path / name).write_bytes(b"12345")
    os.utime(tmp_path / file_name(key), ns=(5, 7))
    found = list_folder(tmp_path)
    assert found.files == [(7, 5, key)] and found.abandoned == [] and found.num_bytes == 10


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.binary(max_size=1))), st.booleans())
def test_few_files_are_sorted_at_once(files: list[tuple[int, int, bytes]], latest_first: bool) -> None:
    """Because no other thread runs meanwhile."""
    lens: list[int] = []

    def sorted_some(some: list[KVFile], *, reverse: bool) -> list[KVFile]:
        lens.append(len(some))
        return sorted(some, reverse=reverse)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_folder, "_SORTED_AT_ONCE", 3)
        patch.setattr(kv_folder, "sorted", sorted_some, raising=False)
        found = list(in_order_of_use([KVFile(*file) for file in files], latest_first=latest_first))
    assert found == sorted(files, reverse=latest_first) and max(lens, default=0) <= 3


@settings(max_examples=30, deadline=None)
@given(
    uses=st.lists(st.tuples(st.integers(0, 400 * 10**9), st.integers(1, 20), st.booleans()), min_size=1, max_size=20)
)
def test_no_block_outlives_one_that_precedes_it(uses: list[tuple[int, int, bool]]) -> None:
    """Two prefixes that share their first three blocks. A use of one is a use of all of its blocks."""
    used_ns: dict[tuple[bool, int], int] = {}
    with pytest.MonkeyPatch.context() as patch:
        for now_ns, length, which in sorted(uses):
            patch.setattr(kv_folder, "time", SimpleNamespace(time_ns=lambda now_ns=now_ns: 10**18 + now_ns))
            for index in range(length):
                used_ns[which and index >= 3, index] = use_time_ns(index)
    for (which, index), when_ns in used_ns.items():
        if index:
            assert used_ns[which and index - 1 >= 3, index - 1] > when_ns


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [(100 << 30, 5 << 30, 4 << 30), (1 << 30, 1 << 29, 0.45 * 2**30), (1 << 30, 0, -0.05 * 2**30), (0, 0, sys.maxsize)],
)
def test_a_share_of_the_disk_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, expected: float
) -> None:
    disk = SimpleNamespace(f_frsize=4096, f_blocks=total // 4096, f_bavail=free // 4096)
    monkeypatch.setattr(kv_folder.os, "statvfs", lambda folder: disk)
    assert spare_bytes(tmp_path) == pytest.approx(expected, abs=4096)
