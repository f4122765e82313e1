"""Kernels have the same bits however the programs of a launch take turns, and whatever was in the memory they take.

Programs of `fused_decode` count their partial results, and the last one of a request merges them. Those of
`choose_tokens` add to histograms and gather tokens. The programs of the other kernels do not notice each other.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import Case, build, run_decode, run_extend
from fused_cases import make_step, same_bits
from interleaved_programs import interleaved_programs
from lora_layers import draw_layer
from sampling_cases import Rows
from triton.runtime import interpreter
from triton_interpreter import examples, used_memory

from tercet.model_executor.kernels import logit_edits, sampling
from tercet.model_executor.kernels.argmax import argmax
from tercet.model_executor.kernels.fp8_linear import fp8_linear
from tercet.model_executor.kernels.sampling_layout import Column
from tercet.model_executor.kernels.skinny_linear import skinny_linear_sum
from tercet.model_executor.kernels.token_logprobs import token_logprobs
from tercet.model_executor.kernels.tuning import DecodeTile, ExtendTile

Tensors = tuple[torch.Tensor, ...]

CASE = Case(
    seed=3, dtype=torch.bfloat16, fp8=False, num_kv_heads=1, group=3, head_dim=16, page_size=4, lens=(70, 1, 16),
    extend_lens=(4, 1, 16), window=None, soft_cap=None, sm_scale=0.125,
)  # fmt: skip
WINDOWED = dataclasses.replace(CASE, window=20, fp8=True)
DECODE = DecodeTile(split=16, block_n=16, num_warps=1, num_stages=1, programs=100)
EXTEND = ExtendTile(16, 16, 1, 1, 32)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def extend(case: Case, *, by_unit: bool) -> torch.Tensor:
    p = build(case)
    lens = p.extend_start_loc.diff()
    return run_extend(p, EXTEND, DECODE, p.q_extend, p.rows, lens, p.prefix_lens, by_unit=by_unit)


def fused(case: Case) -> Tensors:
    return make_step(case, DECODE, norm=True).fused(list(range(len(case.lens))))


def sampled(seed: int, num_rows: int, num_candidates: int) -> Tensors:
    """Rows with top-k, of 8 chunks."""
    rows = Rows(seed, num_rows, 2000, "random")
    rows.table[:, Column.GREEDY] = 0
    rows.table[:, Column.TOP_K] = 300
    rows.table[:, Column.TEMPERATURE] = 4
    with mock.patch.object(sampling, "CHUNK", 256), mock.patch.object(logit_edits, "CHUNK", 256):
        return rows.chosen(num_candidates=num_candidates)


def logprobs() -> torch.Tensor:
    return token_logprobs(drawn(2, 9000), torch.tensor([1, 0, 1]), torch.tensor([[5, 8999]] * 3))


def fp8() -> torch.Tensor:
    return fp8_linear(drawn(5, 140), drawn(70, 140).to(torch.float8_e4m3fn), drawn(1, 70).abs())


def skinny() -> Tensors:
    residual = drawn(3, 40)
    return residual, *skinny_linear_sum(drawn(3, 130), drawn(40, 130), None, residual, drawn(40))


def lora(num_rows: int) -> torch.Tensor:
    return draw_layer(1, num_rows, 90, (40, 20), 16, 3, torch.float32).run()


KERNELS: dict[str, Callable[[], Tensors]] = {
    "decode": lambda: (run_decode(build(WINDOWED), DECODE),),
    "extend, splits in turn": lambda: (extend(CASE, by_unit=False),),
    "extend, splits as units": lambda: (extend(WINDOWED, by_unit=True),),
    "decode in one kernel": lambda: fused(CASE),
    "decode in one kernel, window": lambda: fused(WINDOWED),
    "sampling, gathered": lambda: sampled(1, 2, 4096),
    "sampling, too many to gather": lambda: sampled(2, 1, 64),
    "argmax": lambda: (argmax(drawn(2, 9000)),),
    "logprobs": lambda: (logprobs(),),
    "fp8 linear": lambda: (fp8(),),
    "skinny linear": skinny,
    "lora, few rows": lambda: (lora(20),),
    "lora, many rows": lambda: (lora(50),),
}


@pytest.mark.parametrize("name", KERNELS)
def test_bits_are_those_of_programs_in_turn(name: str) -> None:
    expected = KERNELS[name]()
    for seed in range(examples(2)):
        with interleaved_programs(seed), used_memory(seed):
            found = KERNELS[name]()
        for some, others in zip(found, expected, strict=True):
            assert same_bits(some, others)


@pytest.mark.parametrize("case", [CASE, WINDOWED], ids=["", "window"])
def test_records_without_a_unit_change_no_bit(case: Case) -> None:
    """A recorded step has records for the longest requests. What is in those that it does not need is left over."""
    step, everyone = make_step(case, DECODE, norm=True), [0, 1, 2]
    apart, fused = run_decode(step.problem, DECODE), step.fused(everyone)
    for seed in range(3):
        with interleaved_programs(seed), used_memory(seed):
            assert same_bits(run_decode(step.problem, DECODE, room=40), apart)
            assert all(map(same_bits, step.fused(everyone, room=40), fused))


def test_launches_of_other_batches_leave_the_counts_as_they_should_be() -> None:
    """All layers and steps use the same counts. A batch has the first ones, and the others are not touched."""
    step = make_step(CASE, DECODE, norm=False)
    everyone = step.fused([0, 1, 2])[0]
    counts = torch.zeros(5, dtype=torch.int32)
    for seed, pick in zip((0, 2, 4), ([0, 1, 2], [0], [2, 0]), strict=True):
        used = len(pick) * CASE.num_kv_heads
        counts[used:] = 777
        with interleaved_programs(seed):
            assert same_bits(step.fused(pick, counts)[0], everyone[pick])
        counts[used:] = 0


@triton.jit
def _count_kernel(count_ptr, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(count_ptr, 1)
    else:
        tl.store(count_ptr, tl.load(count_ptr) + 1)


def counted(seed: int, *, atomic: bool) -> int:
    """The count of 6 programs."""
    count = torch.zeros(1, dtype=torch.int32)
    with interleaved_programs(seed):
        _count_kernel[(2, 3)](count, ATOMIC=atomic)
    return int(count)


def test_a_lost_update_is_seen() -> None:
    assert {counted(seed, atomic=True) for seed in range(5)} == {6}
    assert min(counted(seed, atomic=False) for seed in range(5)) < 6


def test_an_error_of_one_program_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_atomic_rmw", fail)
    before = threading.active_count()
    with pytest.raises(interpreter.InterpreterError, match="broken"):
        counted(0, atomic=True)
    assert threading.active_count() == before
