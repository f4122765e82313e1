"""Packed weights from the cache: the same bits as packing at the start, and never those of another model."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf_models import Kind, split_gguf, write_gguf
from runner_driver import short_logits
from runners import make_runner
from safetensors.torch import load_file
from tiny_models import checkpoint, make_model, make_wide_model

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers import packing
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.weights import cache_folder, packed_cache, packed_file
from tercet.model_executor.weights.cache_folder import CacheFolder
from tercet.model_executor.weights.loader import load_parameters
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
MODELS: dict[str, Callable[[Path], ModelConfig]] = {
    "bfloat16 tied": lambda folder: checkpoint(folder, "llama_31_tied", dtype=BFLOAT16),
    "bfloat16 biases": lambda folder: checkpoint(folder, "llama_biases", dtype=BFLOAT16),
    "float32 norms": lambda folder: checkpoint(folder, "qwen3"),
    "4 bits": lambda folder: gguf(folder, "llama", Kind.Q4_1),
    "8 bits tied": lambda folder: gguf(folder, "llama_31_tied", Kind.Q8_0),
    "float16": lambda folder: gguf(folder, "llama", Kind.F16),
    "Q4_K tied": lambda folder: wide_gguf(folder, Kind.Q4_K),
    "Q6_K tied": lambda folder: wide_gguf(folder, Kind.Q6_K),
    "Q5_K tied": lambda folder: wide_gguf(folder, Kind.Q5_K),
    "IQ4_XS tied": lambda folder: wide_gguf(folder, Kind.IQ4_XS),
    "experts": lambda folder: checkpoint(folder, "qwen3_moe", dtype=BFLOAT16),
    "experts of 8 bits": lambda folder: gguf(folder, "mixtral", Kind.Q8_0),
}
CASES: list[tuple[str, str, dict]] = [
    *((name, "mapped", {}) for name in MODELS),
    ("4 bits", "copied", {}),
    ("bfloat16 tied", "copied", {}),
    ("bfloat16 biases", "mapped", {"dtype": "bfloat16"}),
    ("float32 norms", "mapped", {"quantization": "int4"}),
    ("8 bits tied", "mapped", {"quantization": "int8"}),
    ("4 bits", "mapped", {"quantization": "int8"}),
    ("experts", "mapped", {"dtype": "bfloat16"}),
    ("experts", "mapped", {"quantization": "int8"}),
    ("experts", "mapped", {"quantization": "int8", "dtype": "float16"}),
]


def gguf(folder: Path, name: str, kind: Kind) -> ModelConfig:
    folder.mkdir()
    return load_model_config(write_gguf(folder / "m.gguf", make_model(name), "llama", kind=kind))


def wide_gguf(folder: Path, kind: Kind) -> ModelConfig:
    """A file of a type with blocks of 256 weights."""
    folder.mkdir()
    return load_model_config(write_gguf(folder / "m.gguf", make_wide_model(tied=True), "llama", kind=kind))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, packed_cache.logger.name)
    caplog.set_level(logging.INFO, cache_folder.logger.name)
    return caplog


def runner_of(config: ModelConfig, folder: Path | str, **settings) -> ModelRunner:
    defaults = {"dtype": "float32", "max_total_tokens": 256, "max_running_requests": 3, "weight_cache": str(folder)}
    return make_runner(config, **{**defaults, **settings})


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


@pytest.mark.parametrize(("model", "use", "settings"), CASES, ids=str)
def test_cached_weights_give_the_bits_of_packed_ones(
    model: str, use: str, settings: dict, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`use`: a file counts as being on huge pages (mapped), or not (copied)."""
    monkeypatch.setattr(packed_file, "bytes_on_huge_pages", lambda m: m.nbytes if use == "mapped" else 0)
    config = MODELS[model](tmp_path / "model")
    expected = short_logits(runner_of(config, "off", **settings))
    assert torch.equal(short_logits(runner_of(config, folder, **settings)), expected)
    (entry,) = folder.iterdir()
    monkeypatch.setattr(packing, "on_huge_pages", None)  # nothing is packed again
    monkeypatch.setattr(packed_cache, "write_packed", None)
    runner = runner_of(config, folder, **settings)
    assert torch.equal(short_logits(runner), expected)
    assert is_mapped(runner, entry) == (use == "mapped")


def is_mapped(runner: ModelRunner, entry: Path) -> bool:
    """Whether the matrices of a runner are in the mapped entry."""
    places = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(entry)):
            places.append([int(part, 16) for part in line.split(" ")[0].split("-")])
    layers = runner.model.layers
    matrices = [layer.packed for one in layers for layer in (one.qkv_proj, one.o_proj)]
    matrices += [
        layer.packed for one in layers if hasattr(one, "down_proj") for layer in (one.inner_proj, one.down_proj)
    ]
    found = {any(start <= matrix.data_ptr() < end for start, end in places) for matrix in matrices}
    assert len(found) == 1
    return found.pop()


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 4
    path.write_bytes(data)


def a_named_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_models(path: Path) -> None:
    other = checkpoint(path.parents[1] / "other", seed=2)
    elsewhere = path.parents[1] / "elsewhere"
    runner_of(other, elsewhere)
    shutil.copy(entries(elsewhere)[0], path)


@pytest.mark.parametrize("harm", [cut_short, emptied, flipped_bit, a_named_pipe, another_models])
def test_what_is_not_right_is_made_again(
    harm: Callable[[Path], None], tmp_path: Path, folder: Path, said: pytest.LogCaptureFixture
) -> None:
    config = checkpoint(tmp_path / "model")
    expected = short_logits(runner_of(config, folder))
    (entry,) = entries(folder)
    good = entry.read_bytes()
    harm(entry)
    said.clear()
    assert torch.equal(short_logits(runner_of(config, folder)), expected)
    assert f"Writing {entry} again" in said.text and "Cached the packed weights in" in said.text
    assert list(folder.iterdir()) == [entry] and entry.read_bytes() == good


def test_servers_that_start_together_pack_once(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, num_written = checkpoint(tmp_path / "model"), []
    write = packed_cache.write_packed
    monkeypatch.setattr(packed_cache, "write_packed", lambda *args: (num_written.append(1), write(*args)))
    monkeypatch.setattr(cache_folder, "_BYTES_PER_S", 1)  # nobody gives up
    servers = [
        load_parameters(config, FLOAT32, torch.device("cpu"), cache=CacheFolder(folder), packed=True) for _ in range(3)
    ]
    with ThreadPoolExecutor(3) as pool:
        norms = list(pool.map(lambda parameters: parameters["norm.weight"], servers))
    assert len(num_written) == 1 and all(torch.equal(norm, norms[0]) for norm in norms)
    assert all(isinstance(parameters._found, packed_file.PackedFile) for parameters in servers)


def test_other_weights_settings_or_code_are_another_entry(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkpoint(tmp_path / "model", dtype=BFLOAT16)
    runner_of(config, folder)
    runner_of(config, folder)
    assert len(entries(folder)) == 1
    runner_of(config, folder, quantization="int8")
    runner_of(config, folder, quantization="int4")
    assert len(entries(folder)) == 3
    monkeypatch.setattr(packed_cache, "_code_digest", lambda: "other")
    runner_of(config, folder)
    assert len(entries(folder)) == 4


def test_weights_that_change_in_place_are_noticed(tmp_path: Path, folder: Path) -> None:
    """The file keeps its size, and a program sets its time back."""
    config = checkpoint(tmp_path / "model")
    before = short_logits(runner_of(config, folder))
    path = tmp_path / "model" / "model.safetensors"
    status = path.stat()
    other = checkpoint(tmp_path / "other", seed=2)
    path.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    after = short_logits(runner_of(config, folder))
    assert torch.equal(after, short_logits(runner_of(other, "off"))) and not torch.equal(after, before)


def test_a_later_part_that_changes_in_place_is_noticed(tmp_path: Path, folder: Path) -> None:
    paths = split_gguf(gguf(tmp_path / "model", "llama", Kind.Q8_0).model_path, max_tensors=10)
    config = load_model_config(paths[0])
    before = short_logits(runner_of(config, folder))
    data = bytearray(paths[1].read_bytes())
    data[-1000:] = bytes(1000)
    paths[1].write_bytes(data)
    after = short_logits(runner_of(config, folder))
    assert torch.equal(after, short_logits(runner_of(config, "off"))) and not torch.equal(after, before)


def test_a_shard_in_a_folder_of_its_own_that_changes_is_noticed(tmp_path: Path, folder: Path) -> None:
    config = checkpoint(tmp_path / "model")
    model, names = tmp_path / "model", sorted(load_file(tmp_path / "model" / "model.safetensors"))
    (model / "parts").mkdir()
    shard = (model / "model.safetensors").rename(model / "parts" / "1.safetensors")
    index = {"weight_map": dict.fromkeys(names, "parts/1.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    before = short_logits(runner_of(config, folder))
    checkpoint(tmp_path / "other", seed=2)
    shutil.copy(tmp_path / "other" / "model.safetensors", shard)
    after = short_logits(runner_of(config, folder))
    assert torch.equal(after, short_logits(runner_of(config, "off"))) and not torch.equal(after, before)


def test_another_index_is_noticed(tmp_path: Path, folder: Path) -> None:
    """It decides which of the files are read."""
    config = checkpoint(tmp_path / "model")
    model, names = tmp_path / "model", sorted(load_file(tmp_path / "model" / "model.safetensors"))
    shutil.copy(model / "model.safetensors", model / "first.safetensors")
    checkpoint(tmp_path / "other", seed=2)
    shutil.copy(tmp_path / "other" / "model.safetensors", model / "second.safetensors")
    (model / "model.safetensors").unlink()
    found = []
    for name in ("first", "second"):
        index = {"weight_map": dict.fromkeys(names, f"{name}.safetensors")}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        found.append(short_logits(runner_of(config, folder)))
        assert torch.equal(found[-1], short_logits(runner_of(config, "off")))
    assert not torch.equal(*found)


def test_a_folder_that_cannot_be_written(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    """Root may write everywhere, so a file is in the way."""
    (tmp_path / "file").write_text("")
    config = checkpoint(tmp_path / "model")
    found = short_logits(runner_of(config, tmp_path / "file" / "cache"))
    assert torch.equal(found, short_logits(runner_of(config, "off")))
    assert said.text.count("Could not cache the packed weights") == 1


def test_an_entry_that_cannot_be_read_is_left_to_others(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """It may belong to another user, or this process has too many open files."""
    config = checkpoint(tmp_path / "model")
    expected = short_logits(runner_of(config, folder))
    (entry,) = folder.iterdir()
    before = os.stat(entry)

    def refused(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(packed_file.PackedFile, "__init__", refused)
    assert torch.equal(short_logits(runner_of(config, folder)), expected)
    assert os.stat(entry).st_ino == before.st_ino and f"Could not open {entry}: Permission denied" in said.text


def test_a_read_only_folder_is_used(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = checkpoint(tmp_path / "model")
    expected = short_logits(runner_of(config, folder))

    def refused(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(cache_folder.CacheFolder, "make_room", refused)
    assert torch.equal(short_logits(runner_of(config, folder)), expected)


@pytest.mark.parametrize("where", ["free", "replace"])
def test_a_full_disk(
    where: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    config = checkpoint(tmp_path / "model")
    usage = shutil.disk_usage("/")
    if where == "free":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    else:
        monkeypatch.setattr(os, "replace", full)
    assert torch.equal(short_logits(runner_of(config, folder)), short_logits(runner_of(config, "off")))
    assert "Could not cache" in said.text and not any(folder.iterdir())


def test_an_update_frees_the_mapping_and_leaves_the_file(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "bytes_on_huge_pages", lambda memory: memory.nbytes)
    first, second = checkpoint(tmp_path / "1", seed=1), checkpoint(tmp_path / "2", seed=2)
    runner = runner_of(first, folder)
    (entry,) = entries(folder)
    content, before = entry.read_bytes(), short_logits(runner)
    assert is_mapped(runner, entry)
    runner.weights.update(second)
    assert torch.equal(short_logits(runner), short_logits(runner_of(second, "off")))
    assert str(entry) not in Path("/proc/self/maps").read_text()
    assert entries(folder) == [entry] and entry.read_bytes() == content
    runner.weights.update(first)
    assert torch.equal(short_logits(runner), before)


def test_nothing_is_read_before_the_first_access(tmp_path: Path, folder: Path) -> None:
    """The size of the KV pool is computed from the memory that is free before that."""
    config = checkpoint(tmp_path / "model")
    parameters = load_parameters(config, FLOAT32, torch.device("cpu"), cache=CacheFolder(folder), packed=True)
    assert len(parameters) == len(list(parameters)) and not folder.exists()
    assert parameters["norm.weight"].shape == (config.hidden_size,) and len(entries(folder)) == 1


def test_the_entry_is_about_as_large_as_was_asked_for(tmp_path: Path, folder: Path, monkeypatch) -> None:
    asked = []
    real = cache_folder.CacheFolder.make_room
    monkeypatch.setattr(
        cache_folder.CacheFolder, "make_room", lambda self, size: (asked.append(size), real(self, size))[1]
    )
    runner_of(checkpoint(tmp_path / "model"), folder)
    assert asked[0] <= entries(folder)[0].stat().st_size <= asked[0] + (2 << 20) + (64 << 10)


def test_layers_of_torch_have_no_packed_weights(tmp_path: Path, folder: Path) -> None:
    runner_of(checkpoint(tmp_path / "model"), folder, attention_backend="torch")
    assert not folder.exists()
