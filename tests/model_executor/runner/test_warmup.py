"""The memory that a GPU server keeps free for steps which its warm-up steps do not show."""

from __future__ import annotations

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

from tercet.model_executor.device.memory import Memory
from tercet.model_executor.kernels import extend_attention as module
from tercet.model_executor.kernels.tuning import extend_tile
from tercet.srt.model_files.model_config import ModelConfig

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
    monkeypatch.setattr(module, "arch_of", lambda device: "sm_90")


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


def test_a_server_keeps_room_for_the_splits_of_a_long_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)

    def pool_tokens(multiprocessors: int) -> int:
        use_fake(monkeypatch, FakeAccelerator(memory=Memory(total=1 << 27, available=1 << 26)), attention=None)
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: multiprocessors)
        with recorded():
            runner = make_runner(
                CONFIG, dtype="bfloat16", attention_backend="triton", max_running_requests=2, max_total_tokens=None,
                max_prefill_tokens=8, disable_cuda_graph=True,
            )  # fmt: skip
        return runner.max_total_num_tokens

    # 33 tiles of 16 rows, each with 3 splits of 32 tokens, for 2 KV heads of 64 padded columns.
    parts = 33 * 3 * 2 * 16 * (64 + 2) * 4
    per_token = 2 * 2 * 16 * 2
    assert pool_tokens(1) - pool_tokens(MULTIPROCESSORS) == pytest.approx(parts / per_token, abs=1)
