"""A file of packed tensors: the same bits in the mapping and in the copy, nothing damaged is used, pages are shared."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.model_executor.weights import packed_file
from tercet.model_executor.weights.packed_file import PackedFile, write_packed

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]
FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["mapped", "copied"])
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether files count as being on huge pages."""
    monkeypatch.setattr(packed_file, "bytes_on_huge_pages", lambda m: m.nbytes if request.param == "mapped" else 0)
    return request.param


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small files have several."""
    monkeypatch.setattr(packed_file, "_PIECE", 1 << 12)
    monkeypatch.setattr(packed_file, "HUGE_PAGE", 1 << 10)


def write(path: Path, tensors: dict[str, torch.Tensor], key: str = "k") -> None:
    with path.open("wb") as file:
        write_packed(file, key, tensors.items())


def random_bits(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


shapes = st.lists(st.integers(0, 40), min_size=1, max_size=3)
some_tensors = st.lists(st.builds(random_bits, st.sampled_from(DTYPES), shapes, st.integers(0, 99)), max_size=5)


@FEW
@given(some_tensors)
def test_tensors_come_back_bit_for_bit(use: str, tmp_path: Path, drawn: list[torch.Tensor]) -> None:
    tensors = {str(number): tensor for number, tensor in enumerate(drawn)}
    write(tmp_path / "f", tensors)
    found = PackedFile(tmp_path / "f", "k")
    assert found.is_mapped == (use == "mapped") and list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        assert not tensor.numel() or found[name].data_ptr() % 64 == 0


def test_some_tensors_are_never_copied(use: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    tensors = {"a": torch.ones(2000), "b": torch.ones(3000), "c": torch.ones(1)}
    write(path, tensors)
    found = PackedFile(path, "k", {"b"})
    assert {name for name in found if is_in(found[name], path)} == (set(tensors) if use == "mapped" else {"b"})
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def is_in(tensor: torch.Tensor, path: Path) -> bool:
    """Whether a tensor is in the mapped file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith(str(path))
    return False


def test_a_tensor_that_is_not_contiguous(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    write(tmp_path / "f", {"a": tensor})
    assert torch.equal(PackedFile(tmp_path / "f", "k")["a"], tensor)


@FEW
@given(st.data())
def test_no_damaged_file_is_used(tmp_path: Path, data: st.DataObject) -> None:
    """Any byte, with any other value, and any length."""
    path = tmp_path / "f"
    write(path, {"a": random_bits(torch.float32, [30, 40], 1), "b": random_bits(torch.uint8, [70], 2)})
    good = path.read_bytes()
    if data.draw(st.booleans(), label="cut"):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        at, flipped = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(1, 255))
        bad = good[:at] + bytes([good[at] ^ flipped]) + good[at + 1 :]
    path.write_bytes(bad)
    with pytest.raises(ValueError):
        PackedFile(path, "k")


def footers() -> Iterator[bytes]:
    """Valid files of other programs, or of this one."""
    for content in ([], {}, {"key": "other"}, 1):
        text = json.dumps(content).encode()
        yield bytes(1024) + text + packed_file._TAIL.pack(len(text), zlib.crc32(text), packed_file._MAGIC)
    yield b""
    yield bytes(5000)


@pytest.mark.parametrize("content", list(footers()))
def test_a_foreign_file_is_not_used(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match="damaged or incomplete, or has another key"):
        PackedFile(tmp_path / "f", "k")


def test_a_file_of_another_key_is_not_used(tmp_path: Path) -> None:
    write(tmp_path / "f", {"a": torch.ones(3)}, key="other")
    with pytest.raises(ValueError, match="another key"):
        PackedFile(tmp_path / "f", "k")


_SECOND = """
import sys
from pathlib import Path
from tercet.model_executor.weights import packed_file
packed_file.bytes_on_huge_pages = lambda memory: memory.nbytes
file = packed_file.PackedFile(Path(sys.argv[1]), "k")
print(file["a"].sum().item(), flush=True)
sys.stdin.readline()
"""


def test_two_processes_share_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # pieces and pages of the real size
    monkeypatch.setattr(packed_file, "bytes_on_huge_pages", lambda memory: memory.nbytes)
    path = tmp_path / "f"
    write(path, {"a": torch.ones(3 << 18)})
    mine = PackedFile(path, "k")
    assert _kib(path, "Rss") == 4096 and _kib(path, "Pss") == pytest.approx(4096, rel=0.1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _SECOND, str(path)], **pipes) as second:
        assert second.stdout.readline() == f"{float(3 << 18)}\n"
        assert _kib(path, "Rss") == 4096 and _kib(path, "Pss") == pytest.approx(2048, rel=0.1)
        second.communicate("\n")
    assert second.returncode == 0 and mine["a"].sum() == 3 << 18


def _kib(path: Path, field: str) -> int:
    """What smaps tells about the mapping of a file."""
    mapping = Path("/proc/self/smaps").read_text().partition(f"{path}\n")[2]
    return int(mapping.partition(f"\n{field}:")[2].split()[0])
