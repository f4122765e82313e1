from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import zlib

import pytest
import torch
from gguf_models import Kind, split_gguf, write_gguf
from runners import make_runner
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_wide_model

from tercet.model_executor.weights import cache_folder, weight_cache
from tercet.model_executor.weights import loader as weights
from tercet.model_executor.weights.cache_folder import CacheFolder, open_cache_folder
from tercet.model_executor.weights.loader import load_parameters
from tercet.model_executor.weights.weight_cache import LAYOUT
from tercet.srt.model_files.load_config import load_model_config

CPU = torch.device("cpu")
KEPT, FAILED, DAMAGED = "Cached the dequantised weights in", "Could not cache", "again"


@pytest.fixture
def config(tmp_path):
    return load_model_config(write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", kind=Kind.Q4_1))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, weight_cache.logger.name)
    caplog.set_level(logging.INFO, cache_folder.logger.name)
    return caplog


def load(config, folder, dtype=torch.bfloat16, **options):
    return load_parameters(config, dtype, CPU, cache=CacheFolder(folder, **options))


def equal(some, others):
    return list(some) == list(others) and all(
        tensor.dtype == others[name].dtype and torch.equal(tensor, others[name]) for name, tensor in some.items()
    )


def entries(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_weights_are_those_of_the_file_bit_for_bit(dtype, config, folder, monkeypatch):
    made = load_parameters(config, dtype, CPU)
    assert equal(load(config, folder, dtype), made)
    monkeypatch.delattr(weights, "StoredParameters")  # nothing is dequantised again
    assert equal(load(config, folder, dtype), made)
    (entry,) = entries(folder)
    stored = load_file(entry)
    assert len(stored) == len(made) and equal(made, {name: stored[name] for name in made})
    assert sorted(path.name for path in folder.iterdir()) == [entry.name]


def test_a_gpu_has_no_entry(config, folder):
    """It dequantises the blocks itself. The device "meta" stands for a GPU: a tensor on it has no values."""
    for dtype in (torch.float32, torch.bfloat16):
        found = load_parameters(config, dtype, torch.device("meta"), cache=CacheFolder(folder))
        assert all(tensor.is_meta and tensor.dtype == dtype for tensor in found.values())
    assert not folder.exists()


def test_a_gpu_has_an_entry_of_what_a_cpu_dequantises(tmp_path, folder, monkeypatch):
    model = make_wide_model(tied=False)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kind=Kind.TQ2_0))
    for device in (torch.device("meta"), CPU):  # made for one, and mapped for both
        found = load_parameters(config, torch.bfloat16, device, cache=CacheFolder(folder))
        assert all(tensor.device == device for tensor in found.values())
        monkeypatch.delattr(weights, "StoredParameters", raising=False)  # nothing is dequantised again
    assert len(entries(folder)) == 1


def test_what_is_made_does_not_change_without_another_layout(tmp_path):
    """Whoever changes what is made raises LAYOUT, and sets the number here anew: entries of old must not be found."""
    model = make_model("llama")
    for index, parameter in enumerate(model.parameters()):
        values = (torch.arange(parameter.numel()) * 37 + index) % 61 - 30
        parameter.data = (values / 64).view(parameter.shape)
    config = load_model_config(write_gguf(tmp_path / "m.gguf", model, "llama", kind=Kind.Q4_1))
    checksum = 0
    for name, tensor in load_parameters(config, torch.bfloat16, CPU).items():
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(tensor.flatten().view(torch.uint8).numpy(), checksum)
    assert (LAYOUT, checksum) == (1, 190363932)


def test_other_content_or_dtype_is_another_entry(config, folder, tmp_path):
    load(config, folder)
    load(config, folder, torch.float32)
    assert len(entries(folder)) == 2
    shutil.copy(config.model_path, tmp_path / "elsewhere.gguf")
    load(load_model_config(tmp_path / "elsewhere.gguf"), folder)
    assert len(entries(folder)) == 2

    before = os.stat(config.model_path)
    other = write_gguf(tmp_path / "other.gguf", make_model("llama"), "llama", kind=Kind.Q4_1)
    data = bytearray(other.read_bytes())
    data[-1] ^= 1
    with open(config.model_path, "r+b") as file:  # of the same length and time
        file.write(data)
    os.utime(config.model_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert equal(load(config, folder), load_parameters(config, torch.bfloat16, CPU))
    assert len(entries(folder)) == 3


def test_other_content_of_a_later_part_is_another_entry(config, folder):
    paths = split_gguf(config.model_path, max_tensors=10)
    split = load_model_config(paths[0])
    load(split, folder)
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    assert equal(load(split, folder), load_parameters(split, torch.bfloat16, CPU))
    assert len(entries(folder)) == 2


def cut_short(path):
    os.truncate(path, path.stat().st_size - 1)


def emptied(path):
    os.truncate(path, 0)


def flipped_bit(path):
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)


def lost_page(path):
    data = bytearray(path.read_bytes())
    data[-5000:-904] = bytes(4096)
    path.write_bytes(data)


def other_numbers(path):
    """A valid file of the right tensors."""
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)


def other_tensors(path):
    save_file({"norm.weight": torch.ones(3)}, path)


def nonsense(path):
    path.write_bytes(b"\xff" * path.stat().st_size)


def a_named_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm",
    [cut_short, emptied, flipped_bit, lost_page, other_numbers, other_tensors, nonsense, a_named_pipe],
    ids=lambda f: f.__name__,
)
def test_what_is_not_right_is_made_anew(harm, config, folder, said):
    load(config, folder)
    made = load_parameters(config, torch.bfloat16, CPU)
    (entry,) = entries(folder)
    good = entry.read_bytes()
    harm(entry)
    said.clear()
    assert equal(load(config, folder), made)
    assert DAMAGED in said.text and KEPT in said.text
    assert entries(folder) == [entry] and entry.read_bytes() == good


def test_an_entry_under_another_ones_name_is_made_anew(config, folder, tmp_path):
    load(config, folder)
    (first,) = entries(folder)
    other = load_model_config(write_gguf(tmp_path / "n.gguf", make_model("llama"), "llama", kind=Kind.Q8_0))
    load(other, folder)
    second = next(path for path in entries(folder) if path != first)
    shutil.copy(first, second)
    assert equal(load(other, folder), load_parameters(other, torch.bfloat16, CPU))


def test_where_nothing_can_be_written_the_start_goes_on(config, tmp_path, said):
    """Root may write everywhere, so that a file is in the way."""
    (tmp_path / "file").write_text("")
    assert equal(load(config, tmp_path / "file" / "cache"), load_parameters(config, torch.bfloat16, CPU))
    assert said.text.count(FAILED) == 1


def test_an_entry_that_cannot_be_replaced(config, folder, said):
    load(config, folder)
    (entry,) = entries(folder)
    a_folder(entry)
    said.clear()
    assert equal(load(config, folder), load_parameters(config, torch.bfloat16, CPU))
    assert said.text.count(FAILED) == 1
    assert list(folder.iterdir()) == [entry], "the unfinished file was left"


def test_a_full_disk(config, folder, monkeypatch, said):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert equal(load(config, folder), load_parameters(config, torch.bfloat16, CPU))
    assert FAILED in said.text and not any(folder.iterdir())


def test_a_disk_that_is_full_in_the_middle(config, folder, monkeypatch, said):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert equal(load(config, folder), load_parameters(config, torch.bfloat16, CPU))
    assert "No space left" in said.text and not any(folder.iterdir())


def test_what_was_used_longest_ago_goes(config, folder, tmp_path):
    paths, configs = [], []
    for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q5_0):
        path = write_gguf(tmp_path / f"{kind}.gguf", make_model("llama"), "llama", kind=kind)
        configs.append(load_model_config(path))
        load(configs[-1], folder)
        paths.extend(set(entries(folder)) - set(paths))
        os.utime(paths[-1], (1000 + len(paths), 1000 + len(paths)))
    size = paths[0].stat().st_size
    load(configs[0], folder)  # used: now the youngest
    (folder / "somebody's.safetensors").write_bytes(bytes(size))
    (folder / "tercet-abandoned.tmp").write_bytes(b"")
    with open(folder / "tercet-busy.tmp", "wb") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        load(config, folder, torch.float16, max_bytes=2 * size)
    left = set(folder.iterdir())
    assert paths[0] in left and paths[1] not in left and paths[2] not in left
    assert len(left) == 4 and folder / "somebody's.safetensors" in left and folder / "tercet-busy.tmp" in left


def test_what_is_larger_than_the_limit_costs_nobody_a_place(config, folder, said):
    load(config, folder)
    before = entries(folder)
    load(config, folder, torch.float32, max_bytes=1000)
    assert entries(folder) == before and FAILED in said.text


_START = """
import sys, torch
from pathlib import Path
from tercet.model_executor.weights.cache_folder import CacheFolder
from tercet.model_executor.weights.loader import load_parameters
from tercet.srt.model_files.load_config import load_model_config
config = load_model_config(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    cached = load_parameters(config, torch.bfloat16, torch.device("cpu"), cache=CacheFolder(Path(sys.argv[2])))
    made = load_parameters(config, torch.bfloat16, torch.device("cpu"))
    assert all(torch.equal(cached[name], tensor) for name, tensor in made.items())
    for path in Path(sys.argv[2]).glob("*.safetensors"):
        path.unlink(missing_ok=True)  # so that everybody writes again
"""


def test_many_start_at_once(config, folder):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    starts = [
        subprocess.Popen([sys.executable, "-c", _START, config.model_path, str(folder)], **pipes) for _ in range(3)
    ]
    for start in starts:
        assert start.stdout.readline() == "ready\n"
    for start in starts:
        start.stdin.write("\n")
        start.stdin.flush()
    assert [(start.communicate()[0] and start.returncode) or start.returncode for start in starts] == [0, 0, 0]
    assert not list(folder.glob("*.tmp"))


def test_settings(monkeypatch, tmp_path):
    assert open_cache_folder("off") is None
    assert open_cache_folder(str(tmp_path / "x")).path == tmp_path / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_cache_folder("auto").path == tmp_path / "tercet"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_cache_folder("auto").path == tmp_path / ".cache" / "tercet"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    assert open_cache_folder("auto") is None


def test_a_runner_keeps_nothing_unless_it_is_told_to(config, folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    # A type for which every CPU dequantises.
    settings = {"max_running_requests": 1, "max_total_tokens": 64, "dtype": "float16"}
    make_runner(config, **settings)
    assert not folder.exists()
    make_runner(config, **settings, weight_cache="auto")
    assert len(entries(folder / "tercet")) == 1


def test_an_entry_that_goes_before_it_is_opened(config, folder, monkeypatch):
    """Another server may make room at any moment."""
    asked = []

    def gone(path):
        asked.append(path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr("tercet.model_executor.weights.safetensors_file.open_file", gone)
    # A type for which every CPU dequantises.
    settings = {"max_running_requests": 1, "max_total_tokens": 64, "dtype": "float16"}
    driver = make_runner(config, **settings, weight_cache=str(folder))
    assert driver.num_bytes.weights > 0
    assert asked == [str(path) for path in entries(folder)] * 2  # before and after it is written
