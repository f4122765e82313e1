from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from tercet.srt.machine import mapped_file
from tercet.srt.machine.huge_pages import HUGE_PAGE
from tercet.srt.machine.mapped_file import bytes_on_huge_pages, lock, map_file

SIZE = 2 * HUGE_PAGE
MAPPING = """{start:x}-{end:x} r--s 00000000 fe:00 7 {path}
Size:               4096 kB
Rss:                4096 kB
{fields}VmFlags: rd mr me ms hg
7fffffff0000-7fffffff1000 r--s 00000000 fe:00 8 /other
FilePmdMapped:      2048 kB
VmFlags: rd
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


def mapped(path: Path, num_bytes: int = SIZE) -> np.ndarray:
    with path.open("rb") as file:
        return map_file(file, num_bytes)


def test_a_mapped_file_is_its_bytes_and_cannot_be_written(path: Path) -> None:
    memory = mapped(path)
    assert memory.tobytes() == path.read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        memory[0] = 1
    assert mapped(path, 300).tobytes() == path.read_bytes()[:300]


def test_a_file_that_is_too_short_is_an_error(path: Path) -> None:
    with pytest.raises(ValueError, match="greater than file size"):
        mapped(path, SIZE + 1)


def test_the_last_view_unmaps_the_file(path: Path) -> None:
    view = mapped(path)[5:9]
    assert str(path) in Path("/proc/self/maps").read_text()
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_huge_pages_are_counted(path: Path) -> None:
    memory = mapped(path)
    assert int(memory.sum()) > 0  # every page is read
    found = bytes_on_huge_pages(memory)
    assert 0 <= found <= SIZE and found % HUGE_PAGE == 0


@pytest.mark.parametrize(("fields", "expected"), [("FilePmdMapped:     4096 kB\n", 4 << 20), ("", 0)])
def test_only_the_mapping_itself_counts(path: Path, tmp_path: Path, fields: str, expected: int) -> None:
    memory = mapped(path)
    smaps = tmp_path / "smaps"
    start = memory.ctypes.data
    smaps.write_text("1000-2000 rw-p\nVmFlags: rd\n" + MAPPING.format(start=start, end=start, path=path, fields=fields))
    assert bytes_on_huge_pages(memory, smaps) == expected
    smaps.write_text("1000-2000 rw-p\nFilePmdMapped:  2048 kB\nVmFlags: rd\n")
    assert bytes_on_huge_pages(memory, smaps) == 0
    assert bytes_on_huge_pages(memory, tmp_path / "none") == 0


def test_a_name_that_is_not_utf_8_disturbs_nothing(path: Path, tmp_path: Path) -> None:
    memory = mapped(path)
    smaps = tmp_path / "smaps"
    start, fields = memory.ctypes.data, "FilePmdMapped:     4096 kB\n"
    smaps.write_bytes(
        MAPPING.format(start=start, end=start, path="PATH", fields=fields).encode().replace(b"PATH", b"\xff")
    )
    assert bytes_on_huge_pages(memory, smaps) == 4 << 20


@pytest.mark.parametrize("mlock", [lambda start, size: -1, None], ids=["the limit is too low", "there is no mlock"])
def test_pages_that_cannot_be_locked_are_no_error(path: Path, monkeypatch: pytest.MonkeyPatch, mlock: object) -> None:
    monkeypatch.setattr(mapped_file, "_mlock", mlock)
    lock(mapped(path))


def test_locked_pages_are_counted_by_the_system(path: Path) -> None:
    memory, before = mapped(path), locked_bytes()
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < before + SIZE:
        pytest.skip("the limit of locked memory is too low")
    lock(memory)
    assert locked_bytes() - before >= SIZE


def locked_bytes() -> int:
    """Of this process."""
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    return int(status.partition("VmLck:")[2].split()[0]) * 1024
