"""Latent attention on a GPU, with the tiles that serving uses: against float64, and bit by bit against itself."""

from __future__ import annotations

import pytest
import torch
from attention_cases import assert_close
from latent_cases import (
    LatentCase,
    LatentProblem,
    build_latent,
    expected_latent,
    run_latent_decode,
    run_latent_extend,
)

from tercet.model_executor.kernels.tuning import (
    DecodeTile,
    ExtendTile,
    arch_of,
    latent_decode_tile,
    latent_extend_tile,
)

pytestmark = pytest.mark.gpu
LENS, NEW = (1, 17, 300, 513, 2500, 700), (1, 17, 44, 100, 700, 1)
CASES = {
    "deepseek-v2-lite": LatentCase(0, torch.bfloat16, 16, 512, 64, 64, LENS, NEW, 192**-0.5),
    "deepseek-v2-lite, pages of 1": LatentCase(1, torch.bfloat16, 16, 512, 64, 1, LENS, NEW, 192**-0.5),
    "deepseek-v3": LatentCase(2, torch.bfloat16, 128, 512, 64, 64, LENS, NEW, 192**-0.5),
    "float16, 20 heads": LatentCase(3, torch.float16, 20, 512, 64, 64, LENS, NEW),
    "small": LatentCase(4, torch.bfloat16, 5, 24, 8, 16, LENS, NEW),
}


@pytest.fixture(params=CASES, scope="module")
def problem(request: pytest.FixtureRequest) -> LatentProblem:
    return build_latent(CASES[request.param], "cuda")


def tiles(p: LatentProblem) -> tuple[DecodeTile, ExtendTile]:
    arch, page_size = arch_of(torch.device("cuda")), p.case.page_size
    return latent_decode_tile(arch, p.case.num_heads, page_size), latent_extend_tile(arch, page_size)


def extend(p: LatentProblem, pick: list[int], *, by_unit: bool = False) -> list[torch.Tensor]:
    """Requests `pick` in that order: the output of each."""
    decode, tile = tiles(p)
    queries, new = p.q_extend.split(p.case.extend_lens), p.extend_lens[pick]
    out = run_latent_extend(
        p, tile, decode, torch.cat([queries[i] for i in pick]), p.rows[pick], new, p.seq_lens[pick] - new,
        by_unit=by_unit,
    )  # fmt: skip
    return list(out.split(new.tolist()))


def test_decode_agrees_with_float64(problem: LatentProblem) -> None:
    assert_close(run_latent_decode(problem, tiles(problem)[0]), expected_latent(problem, decode=True))


def test_extend_agrees_with_float64(problem: LatentProblem) -> None:
    assert_close(torch.cat(extend(problem, list(range(len(LENS))))), expected_latent(problem, decode=False))


def test_a_request_does_not_depend_on_the_batch(problem: LatentProblem) -> None:
    tile, everyone = tiles(problem)[0], list(range(len(LENS)))
    decoded, extended = run_latent_decode(problem, tile), extend(problem, everyone)
    for pick in ([4], [3, 5, 1], [2, 4, 1, 0, 5, 3]):
        assert torch.equal(run_latent_decode(problem, tile, pick), decoded[pick])
        for i, out in zip(pick, extend(problem, pick), strict=True):
            assert torch.equal(out, extended[i])


def test_splits_as_units_have_the_bits_of_splits_in_turn(problem: LatentProblem) -> None:
    everyone = list(range(len(LENS)))
    assert all(map(torch.equal, extend(problem, everyone, by_unit=True), extend(problem, everyone)))


def test_a_token_does_not_depend_on_the_chunk(problem: LatentProblem) -> None:
    at, length, new = 4, LENS[4], NEW[4]
    whole, (decode, tile) = extend(problem, [at])[0], tiles(problem)
    q = problem.q_extend.split(NEW)[at]
    done, parts = 0, []
    for size in (2, 129, new - 131):
        prefix = torch.tensor([length - new + done], device=q.device)
        own, sizes = q[done : done + size], torch.full_like(prefix, size)
        parts.append(run_latent_extend(problem, tile, decode, own, problem.rows[[at]], sizes, prefix))
        done += size
    assert torch.equal(torch.cat(parts), whole)
