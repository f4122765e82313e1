"""A single safetensors file: damaged, replaced while it is opened, or written by a program with other limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tercet.model_executor.weights import safetensors_file
from tercet.model_executor.weights.safetensors_file import SafetensorsFile

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.zeros(2, 0, dtype=torch.int8),
}


def write(path: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    save_file(TENSORS, path)
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    file = SafetensorsFile(path)
    assert all(file[name].shape == file.shape(name) and file[name].dtype == file.dtype(name) for name in file)
    return dict(file)


def test_it_has_what_was_written(whole: Path) -> None:
    found = read(whole)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_file_cut_anywhere_is_a_value_error(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut' is not a valid safetensors file"):
            SafetensorsFile(tmp_path / "cut")


@settings(max_examples=200)
@given(changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_bytes_never_do_worse_than_a_value_error(whole: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(whole.read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for place, byte in changes:
        content[place % header_bytes] = byte
    damaged = whole.with_name("damaged")
    damaged.write_bytes(content)
    try:
        read(damaged)
    except ValueError as error:
        assert str(damaged) in str(error) or str(error).startswith("tensor ")


@pytest.mark.parametrize("shape", [[0, 2**63], [2**63 - 1, 0, 2], [0] * 65, [1] * 65])
def test_a_shape_that_torch_does_not_have_is_named(tmp_path: Path, shape: list[int]) -> None:
    data = bytes(0 if 0 in shape else 4)
    path = write(tmp_path / "x", {"big": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}, data)
    with pytest.raises(ValueError, match=r"x': tensor 'big' has shape .*, which torch does not allow"):
        SafetensorsFile(path)


@pytest.mark.parametrize("shape", [[2**63 - 1, 0], [0] * 64, [1] * 64, []])
def test_any_other_shape_is_read(tmp_path: Path, shape: list[int]) -> None:
    data = bytes(0 if 0 in shape else 4)
    path = write(tmp_path / "x", {"big": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}, data)
    assert read(path)["big"].shape == tuple(shape)


@pytest.mark.parametrize("new_content", [b"", b"\xff" * 100, None])
def test_another_program_replaces_the_file_while_it_is_opened(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_content: bytes | None
) -> None:
    """Servers that share a weight cache do. None: it removes the file."""
    path = tmp_path / "x"
    path.write_bytes(whole.read_bytes())
    open_file: Callable[[str], Any] = safetensors_file.open_file

    def opened_and_replaced(name: str) -> Any:
        file = open_file(name)
        path.unlink()
        if new_content is not None:
            path.write_bytes(new_content)
        return file

    monkeypatch.setattr(safetensors_file, "open_file", opened_and_replaced)
    found = read(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
