"""The memory that a GPU server keeps free for steps which its warm-up steps do not show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from fake_accelerator import FakeAccelerator, use_fake
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runners import make_runner
from serving_shapes import SHAPES, Shape, meta, operands, options
from triton_aot import recorded
from triton_interpreter import examples

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor.attention import triton_backend
from tercet.model_executor.attention.base import AttentionSpec
from tercet.model_executor.attention.triton_backend import TritonAttentionBackend
from tercet.model_executor.device.memory import Memory
from tercet.model_executor.forward_batch import ForwardBatch
from tercet.model_executor.kernels import decode_attention
from tercet.model_executor.kernels import extend_attention as module
from tercet.model_executor.kernels.tuning import extend_tile
from tercet.model_executor.runner.cuda_graph_runner import max_work_lens
from tercet.model_executor.step import ForwardMode
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import RopeConfig

MULTIPROCESSORS = 132
CONTEXT = 131_072
BFLOAT16 = [shape for shape in SHAPES if shape.dtype == torch.bfloat16]
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=40,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=99,
    context_len=96,
    sliding_windows=(None,),
    load_format="dummy",
)


def part_bytes(shape: Shape, new: list[int], prefix: list[int]) -> int:
    """What the partial results of a step take, if its splits are work units; else 0."""
    tile = extend_tile("sm_90", shape.head_dim, shape.fp8)
    new_lens = np.array(new, np.int32)
    seq_lens = np.minimum(new_lens + np.array(prefix, np.int32), CONTEXT)
    starts, batch = meta(len(new) + 1), meta(len(new))
    with recorded() as launches:
        work = module.extend_work(starts, batch, new_lens, seq_lens, shape.num_heads, shape.num_kv_heads, tile)
        if work.split is None:
            return 0
        q, *kv = operands(shape, int(new_lens.sum()))
        out = meta(*q.shape, dtype=q.dtype)
        module.extend_attention(
            q, *kv, batch, starts, batch, work, out, longest=int(seq_lens.max()), tile=tile, **options(shape)
        )
    *parts, _ = launches[-1].args[:4]  # of the merging kernel: maxima, totals and sums
    return sum(part.nbytes for part in parts)


@pytest.fixture
def sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: MULTIPROCESSORS)
    for kernels in (module, decode_attention, triton_backend):
        monkeypatch.setattr(kernels, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(decode_attention, "num_multiprocessors", lambda device: MULTIPROCESSORS)


LENS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, CONTEXT - 1)), min_size=1, max_size=9)


@settings(max_examples=examples(60))
@given(shape=st.sampled_from(BFLOAT16), lens=LENS)
@example(shape=BFLOAT16[0], lens=[(30, CONTEXT - 30)])
@example(shape=BFLOAT16[0], lens=[(4, 100_000)] * 8)
@pytest.mark.usefixtures("sm_90")
def test_no_step_takes_more_for_its_splits_than_the_bound(shape: Shape, lens: list[tuple[int, int]]) -> None:
    tile = extend_tile("sm_90", shape.head_dim, shape.fp8)
    bound = module.max_part_bytes(torch.device("meta"), CONTEXT, shape.num_kv_heads, shape.head_dim, tile)
    assert part_bytes(shape, *map(list, zip(*lens, strict=True))) <= bound


@pytest.mark.usefixtures("sm_90")
def test_the_bound_is_no_more_than_serving_can_take() -> None:
    """Llama-3.1-8B: 8 query tiles with 31 splits each are below the limit; short contexts have no splits."""
    shape = next(shape for shape in BFLOAT16 if str(shape) == "32x8x128-bfloat16")
    tile, device = extend_tile("sm_90", 128), torch.device("meta")
    bound = module.max_part_bytes(device, CONTEXT, 8, 128, tile)
    taken = part_bytes(shape, [32] * 8, [31 * 2048 - 32] * 8)
    assert 100 << 20 < taken <= bound <= 1.05 * taken
    assert module.max_part_bytes(device, tile.split, 8, 128, tile) == 0


PER_TOKEN = 2 * 2 * 16 * 2
"""Bytes of the KV of a token of CONFIG."""


@pytest.fixture
def pool_tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], int]:
    """A function that gives the size of the KV pool of a server, with recorded steps or without."""
    monkeypatch.setattr(torch, "empty", torch.zeros)

    def of_server(record: bool) -> int:
        use_fake(monkeypatch, FakeAccelerator(memory=Memory(total=1 << 27, available=1 << 26)), attention=None)
        with recorded():
            runner = make_runner(
                CONFIG, dtype="bfloat16", attention_backend="triton", max_running_requests=2, max_total_tokens=None,
                max_prefill_tokens=8, disable_cuda_graph=not record,
            )  # fmt: skip
        return runner.max_total_num_tokens

    return of_server


def test_a_server_keeps_room_for_the_splits_of_a_long_prefix(
    monkeypatch: pytest.MonkeyPatch, pool_tokens: Callable[[bool], int]
) -> None:
    usual = pool_tokens(False)
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: MULTIPROCESSORS)
    # 33 tiles of 16 rows, each with 3 splits of 32 tokens, for 2 KV heads of 64 padded columns.
    parts = 33 * 3 * 2 * 16 * (64 + 2) * 4
    # What decoding keeps anyway: 3 splits of each of 2 requests, for 4 heads of 16 columns.
    decode_parts = 2 * 3 * 4 * (16 + 1) * 4
    assert usual - pool_tokens(False) == pytest.approx((parts - decode_parts) / PER_TOKEN, abs=1)


@pytest.mark.parametrize(("record", "times"), [(False, 1), (True, 2)])
def test_a_server_keeps_room_for_decoding_requests_that_share_a_prefix(
    record: bool, times: int, monkeypatch: pytest.MonkeyPatch, pool_tokens: Callable[[bool], int]
) -> None:
    """Recorded steps keep theirs, so others need as much again."""

    def keeping(num_bytes: int) -> int:
        monkeypatch.setattr(triton_backend.TritonAttentionBackend, "decode_part_bytes", lambda *_: num_bytes)
        return pool_tokens(record)

    assert keeping(0) - keeping(1 << 20) == pytest.approx(times * (1 << 20) / PER_TOKEN, abs=1)


def llama_1b(pool_tokens: int) -> TritonAttentionBackend:
    """The attention of a layer of Llama-3.2-1B, without values."""
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.125, rope=RopeConfig())
    pool = TokenToKVPool(pool_tokens, 64, 1, 8, 64, torch.bfloat16, torch.device("meta"))
    return TritonAttentionBackend([spec], pool)


def decode_part_bytes(backend: TritonAttentionBackend, lens: np.ndarray) -> list[int]:
    """The partial results of each launch of a decode step, in bytes."""
    inputs, nothing = meta(3, len(lens)), meta(0)
    batch = ForwardBatch(
        mode=ForwardMode.DECODE, rows=inputs[0], seq_lens=inputs[1], input_ids=nothing, positions=nothing,
        out_cache_loc=inputs[2], req_to_token=meta(2000, CONTEXT, dtype=torch.int32), logits_indices=None,
        extend_start_loc=None, prefix_lens=None, seq_lens_host=lens, extend_lens_host=None,
    )  # fmt: skip
    with recorded() as launches:
        backend.plan(batch)
        backend.attend(meta(len(lens), 32, 64, dtype=torch.bfloat16), 0, batch)
    merges = [launch.args for launch in launches if launch.kernel.fn.__name__ == "_decode_merge_kernel"]
    return [sum(part.nbytes for part in parts[:2]) for parts in merges]


@pytest.mark.usefixtures("sm_90")
def test_decoding_requests_that_share_a_prefix_take_no_more_than_the_bound() -> None:
    """1,000 requests after 100,000 shared tokens have 391 splits each. Without a division they would take 3 GB."""
    pool_tokens = 400_000
    backend = llama_1b(pool_tokens)
    bound = backend.decode_part_bytes(1024, CONTEXT, pool_tokens)
    parts = decode_part_bytes(backend, np.full(1000, 100_001, np.int32))
    assert sum(parts) == 1000 * 391 * 32 * 65 * 4 and len(parts) > 1
    pool_bytes = 16 * pool_tokens * 2 * 8 * 64 * 2  # of the model's 16 layers
    assert bound / 2 < max(parts) <= bound < 0.01 * pool_bytes


@pytest.mark.usefixtures("sm_90")
@settings(max_examples=examples(30))
@given(lens=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=60), pool_pages=st.integers(1, 6250))
def test_launches_of_decode_attention_have_all_splits_and_no_more_than_the_bound(
    lens: list[int], pool_pages: int
) -> None:
    backend = llama_1b(64 * pool_pages)
    parts = decode_part_bytes(backend, np.array(lens, np.int32))
    assert sum(parts) == sum(-(-length // 256) for length in lens) * 32 * 65 * 4
    assert max(parts) <= backend.decode_part_bytes(len(lens), CONTEXT, 64 * pool_pages)


@pytest.mark.usefixtures("sm_90")
@settings(max_examples=examples(30))
@given(size=st.integers(1, 300), pool_pages=st.integers(1, 6250), context=st.integers(1, CONTEXT))
def test_no_recorded_step_is_divided(size: int, pool_pages: int, context: int) -> None:
    """A recorded launch serves all lengths, so it serves all requests."""
    lens = max_work_lens(size, 64 * pool_pages, context)
    assert len(decode_part_bytes(llama_1b(64 * pool_pages), lens)) == 1
