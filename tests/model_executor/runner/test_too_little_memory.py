"""A server that lacks memory says so in one message, and before it loads the weights if it can."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys

import pytest
import torch
from fake_accelerator import FakeAccelerator, use_fake
from toy_runner import TOY, make_toy_runner

from tercet.model_executor import cpu_extension
from tercet.model_executor.device.memory import Memory
from tercet.model_executor.runner import host_kv, load

TIERS = {"enable_hierarchical_cache": True, "hicache_size": 0.01}


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(load, "load_parameters", refuse)


@pytest.mark.usefixtures("unloaded")
def test_weights_that_do_not_fit_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake(monkeypatch, FakeAccelerator(memory=Memory(total=1 << 30, available=1 << 10)))
    with pytest.raises(ValueError, match=r"the weights need .* but only 0\.00 GiB of the GPU's 1\.00 GiB are"):
        make_toy_runner()


@pytest.mark.usefixtures("unloaded")
def test_a_host_tier_that_does_not_fit_into_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is taken at once. The system would end a process for it."""
    use_fake(monkeypatch, FakeAccelerator())
    monkeypatch.setattr(load, "host_memory", lambda: Memory(total=1 << 30, available=10 << 20))
    with pytest.raises(ValueError, match=r"--hicache-size 0\.01 needs 0\.01 GiB of host memory, but only 0\.01 GiB"):
        make_toy_runner(max_total_tokens=64, **TIERS)


def test_steps_that_do_not_fit_name_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    accelerator = FakeAccelerator()
    monkeypatch.setattr(accelerator, "peak_bytes", full)
    use_fake(monkeypatch, accelerator)
    with pytest.raises(ValueError, match=r"not enough memory .* --max-prefill-tokens.*Tried to allocate 2\.00 GiB"):
        make_toy_runner()


def test_memory_that_cannot_be_page_locked_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(num_bytes: int) -> torch.Tensor:
        raise MemoryError(f"CUDA error 2: {num_bytes >> 20} MiB of host memory cannot be page-locked")

    accelerator = FakeAccelerator()
    monkeypatch.setattr(accelerator, "pinned_exactly", refused)
    use_fake(monkeypatch, accelerator)
    with pytest.raises(ValueError, match=r"--hicache-size 0\.01 is too much .* 10 MiB of host memory cannot be"):
        make_toy_runner(max_total_tokens=64, **TIERS)


def test_host_memory_beyond_a_limit_of_the_system_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `ulimit -v`."""

    def refused(num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(host_kv, "zeroed", refused)
    with pytest.raises(ValueError, match=r"--hicache-size 0\.01 is too much for this system: Cannot allocate memory"):
        make_toy_runner(attention_backend="torch", max_total_tokens=64, **TIERS)


def test_torch_attention_of_a_long_prompt_that_does_not_fit_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may write the scores of a chunk. The warm-up steps attend to 4,096 tokens at most."""
    config = dataclasses.replace(TOY, context_len=1 << 16)
    use_fake(monkeypatch, FakeAccelerator(memory=Memory(total=1 << 34, available=1 << 30)))
    limits = {"attention_backend": "torch", "max_running_requests": 1, "page_size": 1, "max_total_tokens": None}
    with pytest.raises(ValueError, match=r"steps need 3\.\d+ GiB.* lower --max-prefill-tokens"):
        make_toy_runner(config, chunked_prefill_size=1024, max_prefill_tokens=1024, **limits)
    assert make_toy_runner(config, chunked_prefill_size=64, max_prefill_tokens=1024, **limits).max_total_num_tokens


UNUSED_ROWS = """
import mmap, torch
from tercet.model_executor.device.heap import keep_freed_memory, trim_heap
from tercet.model_executor.runner.slot_table import SlotTable

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

keep_freed_memory(of_any_size=True)
freed, kept = (torch.ones(num_bytes, dtype=torch.uint8) for num_bytes in (300 << 20, 1 << 20))
del freed
trim_heap()
before = resident_bytes()
table = SlotTable(256, 250_000, torch.device("cpu"))
table.write(torch.arange(100), torch.ones(100, dtype=torch.int32))
assert resident_bytes() - before < table.tensor.nbytes // 4
assert table.tensor[0, :101].sum() == 100 and table.tensor.dtype == torch.int32
"""


def test_rows_of_the_table_that_no_request_uses_take_no_memory_on_a_cpu() -> None:
    """Also in a process whose heap has so much free memory."""
    subprocess.run([sys.executable, "-c", UNUSED_ROWS], check=True)


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu")
def test_angles_that_do_not_fit_name_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from tercet.model_executor.layers import cpu_layers  # needs the compiled operations

    def full(num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(cpu_layers, "zeroed", full)
    with pytest.raises(ValueError, match=r"no memory for the angles of --context-length \d+ positions \(Cannot alloc"):
        make_toy_runner(attention_backend="cpu")
