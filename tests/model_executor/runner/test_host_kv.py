"""The host's KV memory: copies change no bit, whatever the layout of the pool and however late the copies are."""

from __future__ import annotations

import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_models import VARIANTS, make_cpu_runner
from fake_accelerator import FakeAccelerator, use_fake
from scheduler_rig import Rig
from tier_asks import settle, settle_copies
from toy_runner import make_toy_runner

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor.device.device_buffers import Uploads
from tercet.model_executor.device.dtypes import dtype_name
from tercet.model_executor.device.memory import Memory
from tercet.model_executor.runner import host_kv
from tercet.model_executor.runner.host_kv import HostKV
from tercet.model_executor.runner.settings import HostKVSettings
from tercet.model_executor.step import ForwardMode, KVCopies, StepInputs, decode_step, encode_step
from tercet.srt.logprobs import LogprobOptions

SIZE = 192
DTYPES = {"float32": torch.int32, "bfloat16": torch.int16, "float8_e4m3fn": torch.uint8}


def i32(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make_pool(dtype: str, page_size: int, panel: int | None) -> TokenToKVPool:
    """A pool of random bits, NaN included."""
    pool = TokenToKVPool(SIZE, page_size, 3, 2, 32, getattr(torch, dtype), "cpu", panel)
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        bits = buffer.view(DTYPES[dtype])
        bits.random_(generator=generator)
    return pool


def bits(pool: TokenToKVPool, pages: np.ndarray) -> torch.Tensor:
    slots = torch.from_numpy((pages[:, None] * pool.page_size + np.arange(pool.page_size)).reshape(-1)).long()
    kind = DTYPES[dtype_name(pool.dtype)]
    return torch.stack([part.view(kind) for layer in range(3) for part in pool.get_kv(layer, slots)])


@pytest.mark.parametrize("lag", [None, 0, 4])
@pytest.mark.parametrize(
    ("dtype", "page_size", "panel"),
    [
        ("float32", 1, None),
        ("bfloat16", 4, None),
        ("float32", 32, 16),
        ("bfloat16", 32, 32),
        ("float8_e4m3fn", 1, None),
    ],
)
def test_pages_come_back_with_the_same_bits(
    dtype: str, page_size: int, panel: int | None, lag: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_kv, "_BATCH_BYTES", 9000)  # several batches
    pool = make_pool(dtype, page_size, panel)
    accelerator = None if lag is None else FakeAccelerator(lag)
    uploads = Uploads(torch.device("cpu"), accelerator)
    memory = HostKV(pool, HostKVSettings(1 << 20, has_storage=True), uploads, accelerator)
    num_pages = SIZE // page_size
    rng = np.random.default_rng(1)
    pages = i32(rng.permutation(num_pages)[: num_pages // 2] + 1)
    host = i32(np.sort(rng.permutation(num_pages)[: len(pages)]))
    before = bits(pool, pages)
    empty = i32([])
    first = memory.run(KVCopies(pages, host, empty, empty))
    others = i32(np.setdiff1d(np.arange(1, num_pages + 1), pages)[: len(pages)])
    kept = bits(pool, others)
    pool.write_pages(torch.from_numpy(pages).long(), torch.zeros(len(pages), pool.page_bytes, dtype=torch.uint8))
    # In one step: other pages go out, and the first ones come back, to other pages of the pool.
    second = memory.run(KVCopies(others, host + num_pages, host, others))
    for copies in (first, second):
        if copies is not None:
            copies.wait()
    assert torch.equal(bits(pool, others), before)
    memory.run(KVCopies(empty, empty, host + num_pages, pages))
    assert torch.equal(bits(pool, pages), kept)
    assert memory.memory.shape == (memory.num_blocks, memory.block_len // page_size * pool.page_bytes)


def test_the_device_memory_of_many_copies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may copy a request of gigabytes. No event passes unless later work waits for it."""
    pool = make_pool("bfloat16", 4, None)
    monkeypatch.setattr(host_kv, "_BATCH_BYTES", 2 * pool.page_bytes)
    accelerator = FakeAccelerator(lag=1 << 30)
    uploads = Uploads(torch.device("cpu"), accelerator)
    memory = HostKV(pool, HostKVSettings(1 << 20, has_storage=True), uploads, accelerator)
    batches: list[weakref.ref[torch.Tensor]] = []
    most, out_of_turn = 0, []

    def noted(batch: torch.Tensor) -> torch.Tensor:
        nonlocal most
        batches.append(weakref.ref(batch))
        most = max(most, sum(one() is not None for one in batches) * batch.nbytes)
        return batch

    def bring(sources: list[torch.Tensor], after: object = None) -> torch.Tensor:
        out_of_turn.append(len(batches) >= host_kv._MAX_BROUGHT and after is None)
        return noted(FakeAccelerator.bring(accelerator, sources, after))

    read_pages = pool.read_pages
    pages, host, none = np.arange(1, 45, dtype=np.int32), np.arange(44, dtype=np.int32), i32([])
    monkeypatch.setattr(pool, "read_pages", lambda pages: noted(read_pages(pages)))
    memory.run(KVCopies(pages, host, none, none))
    gathered = 2 * pool.page_bytes
    assert len(batches) == 22 and most + gathered <= host_kv.device_bytes(pool.page_bytes)
    batches.clear()
    most = 0
    monkeypatch.setattr(accelerator, "bring", bring)
    memory.run(KVCopies(none, none, host, pages))
    assert len(batches) == 22 and most <= host_kv._MAX_BROUGHT * gathered and not any(out_of_turn)


def test_memory_for_copies_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    tiers = {"enable_hierarchical_cache": True, "hicache_size": 0.01, "hicache_storage_dir": str(tmp_path)}
    for options in ({}, tiers):
        use_fake(monkeypatch, FakeAccelerator(memory=Memory(total=1 << 30, available=1 << 29)))
        runner = make_toy_runner(disable_cuda_graph=True, max_total_tokens=None, **options)
        sizes.append(runner.max_total_num_tokens * runner.kv_pool.bytes_per_slot)
    needed = host_kv.device_bytes(runner.kv_pool.page_bytes)
    assert needed - runner.kv_pool.page_bytes <= sizes[0] - sizes[1] <= needed + runner.kv_pool.page_bytes


def test_sizes_that_make_no_sense_are_refused() -> None:
    pool = make_pool("float32", 4, None)
    uploads = Uploads(torch.device("cpu"), None)
    with pytest.raises(ValueError, match="less than one block of 64 tokens"):
        HostKV(pool, HostKVSettings(1000, has_storage=True), uploads, None)
    three_blocks = 3 * 64 * pool.page_bytes // 4
    with pytest.raises(ValueError, match="192 tokens and the KV pool 192: ") as refused:
        HostKV(pool, HostKVSettings(three_blocks, has_storage=False), uploads, None)
    (advised,) = re.findall(r"set --hicache-size (\S+) or more", str(refused.value))
    sizes = [int(size * 2**30) for size in (float(advised), float(advised) - 0.001)]
    assert HostKV(pool, HostKVSettings(sizes[0], has_storage=False), uploads, None).num_blocks > 3
    assert sizes[1] <= three_blocks, "it is no larger than it must be"
    assert HostKV(pool, HostKVSettings(three_blocks, has_storage=True), uploads, None).num_blocks == 3


def test_a_step_without_rows_only_copies() -> None:
    runner = make_toy_runner(attention_backend="torch", enable_hierarchical_cache=True, hicache_size=0.01)
    assert runner.host_kv is not None
    nothing = i32([])
    copies = KVCopies(i32([1]), i32([5]), nothing, nothing)
    step = StepInputs(ForwardMode.DECODE, nothing, nothing, nothing, kv_copies=copies)
    runner.kv_pool.k_buffer[0][1] = 7.0
    launched = runner.launch(decode_step(encode_step(step)))
    launched.sample()
    assert launched.wait().tokens.tolist() == []
    k_of_first_layer = runner.host_kv.memory.reshape(-1, runner.kv_pool.page_bytes)[5].view(np.float32)[:16]
    assert (k_of_first_layer == 7.0).all()


@pytest.mark.parametrize("kind", ["torch", "cpu", "panels", "late copies"])
def test_outputs_have_the_same_bits_from_every_tier(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is computed, loaded from host memory, and read from files by another engine."""
    monkeypatch.setattr(host_kv, "_BLOCK_LEN", 32)
    settings = {"enable_hierarchical_cache": True, "hicache_size": 0.0005, "hicache_storage_dir": str(tmp_path)}
    settings |= {"max_running_requests": 4, "max_total_tokens": 256, "disable_cuda_graph": True}
    if kind == "late copies":
        use_fake(monkeypatch, FakeAccelerator(lag=5))

    def make_runner():
        if kind in ("torch", "late copies"):
            return make_toy_runner(attention_backend="torch", **settings)
        return make_cpu_runner(VARIANTS[4] if kind == "panels" else VARIANTS[0], **settings)

    def make_rig(folder: Path) -> Rig:
        page_size = 32 if kind == "panels" else 1
        runner = make_runner()
        return Rig(
            pool_size=256,
            page_size=page_size,
            max_running=4,
            context_len=runner.settings.context_len,
            max_prefill_tokens=512,
            chunked_prefill_size=512,
            vocab_size=runner.config.vocab_size,
            overlap=kind == "late copies",
            make_runner=lambda: runner,
            host_blocks=runner.host_kv.num_blocks,
            block_pages=runner.host_kv.block_len // page_size,
            storage=folder,
        )

    length = 60 if kind in ("torch", "late copies") else 200
    rng = np.random.default_rng(0)
    prompt, other = (rng.integers(0, 90, length).tolist() for _ in range(2))

    def ask(rig: Rig, rid: str, ids: list[int]) -> tuple[list[int], int, int]:
        rig.add(rid, ids, max_new_tokens=4, temperature=0.0, ignore_eos=True, logprobs=LogprobOptions())
        rig.run()
        settle_copies(rig)  # until a block is written, no other can take its place in host memory
        heard = rig.heard[rid]
        floats = b"".join(part.output.own for part in heard.logprobs)
        return [*heard.ids, floats], heard.last.counts.host_tokens, heard.last.counts.storage_tokens

    rig = make_rig(tmp_path)
    first, *_ = ask(rig, "a", prompt)
    for number in range(256 // length + 1):
        ask(rig, f"o{number}", [number + 1, *other[1:]])
    again, num_host, _ = ask(rig, "b", prompt)
    assert num_host >= 32 and again == first
    settle(rig)
    fresh = make_rig(tmp_path)
    found, _, num_read = ask(fresh, "c", prompt)
    assert num_read >= 32 and found == first
