"""Attention of prompts for Hopper GPUs (--hopper-prefill): its kernel, and the runner with it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_cases import Case, Problem, assert_close, build, expected_extend, poisoned
from gpu_runners import LLAMA, make_runner, play
from runner_driver import RunnerDriver, relative_error

from tercet.model_executor.kernels.hopper_extend import hopper_extend_attention
from tercet.model_executor.kernels.tuning import HOPPER_TILE
from tercet.model_executor.kernels.work_map import query_split_map, query_tile_map

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]
DEVICE = "cuda"
LENS, NEW = (2, 17, 300, 2049, 4500, 700), (2, 17, 44, 2049, 1000, 513)
HEADS = {
    "llama-8b": (8, 4, 128, 64),
    "llama-8b, pages of 128": (8, 4, 128, 128),
    "llama-8b, pages of 256": (8, 4, 128, 256),
    "llama-1b": (8, 4, 64, 64),
    "qwen2-7b": (4, 7, 128, 64),
    "smollm2": (3, 3, 64, 64),
    "one head each": (16, 1, 128, 64),
    "many heads": (1, 71, 64, 128),
}
"""KV heads, query heads for each, components of a head, and the page size."""


@pytest.fixture(params=HEADS, scope="module")
def problem(request: pytest.FixtureRequest) -> Problem:
    num_kv_heads, group, head_dim, page_size = HEADS[request.param]
    case = Case(
        seed=head_dim, dtype=torch.bfloat16, fp8=False, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim,
        page_size=page_size, lens=LENS, extend_lens=NEW, window=None, soft_cap=None, sm_scale=head_dim**-0.5,
    )  # fmt: skip
    return build(case, DEVICE)


def run(
    p: Problem, q: torch.Tensor, rows: torch.Tensor, new: torch.Tensor, prefix: torch.Tensor, *, by_unit: bool = False
) -> torch.Tensor:
    """by_unit: each split of the KV is a work unit."""
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0))
    block_m, split, group = HOPPER_TILE.block_m, HOPPER_TILE.split, p.case.group
    if by_unit:
        units = -(-new * group // block_m) * -(-(prefix + new) // split)
        work = query_split_map(starts, prefix + new, group, block_m, split, int(units.sum()))
    else:
        work = query_tile_map(starts, group, block_m, len(q))
    out = poisoned(q)
    hopper_extend_attention(
        q, p.k_buffer, p.v_buffer, p.req_to_token, rows, starts, prefix, work, out, sm_scale=p.case.sm_scale,
        page_size=p.case.page_size,
    )  # fmt: skip
    return out


def everyone(p: Problem, *, by_unit: bool = False) -> torch.Tensor:
    return run(p, p.q_extend, p.rows, p.extend_start_loc.diff(), p.prefix_lens, by_unit=by_unit)


def test_it_agrees_with_the_float64_twin(problem: Problem) -> None:
    assert_close(everyone(problem), expected_extend(problem))


def test_splits_as_units_have_the_same_bits(problem: Problem) -> None:
    assert torch.equal(everyone(problem, by_unit=True), everyone(problem))


def test_a_request_does_not_depend_on_the_batch(problem: Problem) -> None:
    p, outs, queries = problem, everyone(problem).split(NEW), problem.q_extend.split(NEW)
    for pick in ([4], [5, 3, 0], [2, 4, 1, 0, 5, 3]):
        some = run(
            p, torch.cat([queries[i] for i in pick]), p.rows[pick], p.extend_start_loc.diff()[pick], p.prefix_lens[pick]
        )
        for i, out in zip(pick, some.split([NEW[i] for i in pick]), strict=True):
            assert torch.equal(out, outs[i])


def test_a_token_does_not_depend_on_the_chunk(problem: Problem) -> None:
    p, request = problem, 4
    whole, queries = everyone(p).split(NEW)[request], p.q_extend.split(NEW)[request]
    for first, last in ((0, 2), (0, 300), (300, 700), (700, 1000)):
        new = torch.tensor([last - first], device=DEVICE)
        part = run(p, queries[first:last], p.rows[[request]], new, p.prefix_lens[[request]] + first)
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("page_size", [64, 128])
def test_a_runner_computes_almost_the_same_logits(page_size: int) -> None:
    ids = np.random.default_rng(3).integers(0, LLAMA.vocab_size, 700)
    hopper, plain = (
        RunnerDriver(make_runner(LLAMA, hopper_prefill=flag, page_size=page_size)).logits_along(1, ids, [200, 1, 450])
        for flag in (True, False)
    )
    assert hopper.keys() == plain.keys() and len(plain) > 40
    errors = [relative_error(hopper[position], logits) for position, logits in plain.items()]
    assert 0 < max(errors) < 3e-2, "the order of sums differs"


def test_graphs_change_no_token() -> None:
    config = dataclasses.replace(LLAMA, head_dim=128)
    drivers = [
        RunnerDriver(make_runner(config, hopper_prefill=True, disable_cuda_graph=disabled))
        for disabled in (False, True)
    ]
    tokens = [play(driver) for driver in drivers]
    assert tokens[0] == tokens[1]
