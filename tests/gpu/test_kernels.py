"""The kernels on a GPU, with the tiles that serving uses: against float64 twins, and bit by bit against themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import (
    TOLERANCE,
    Case,
    Problem,
    assert_close,
    build,
    expected_decode,
    expected_extend,
    run_decode,
    run_extend,
)
from decoded_pairs import assert_pairs_are_decoded
from fused_cases import make_step, same_bits

from tercet.model_executor.kernels.activation import act_and_mul, act_and_mul_ref
from tercet.model_executor.kernels.argmax import argmax, argmax_ref
from tercet.model_executor.kernels.decode_start import decode_start, decode_start_ref
from tercet.model_executor.kernels.fp8_linear import fp8_linear, fp8_linear_ref, quantize_rows, quantize_rows_ref
from tercet.model_executor.kernels.fused_decode import can_fuse_decode
from tercet.model_executor.kernels.logit_edits import EditTables
from tercet.model_executor.kernels.primitives import KV_FP8_SOFT, kv_format
from tercet.model_executor.kernels.rmsnorm import add_rmsnorm, qk_rmsnorm, rmsnorm, rmsnorm_ref
from tercet.model_executor.kernels.rotary import rotary, rotary_ref
from tercet.model_executor.kernels.sampling import choose_tokens
from tercet.model_executor.kernels.sampling_layout import Column, Field
from tercet.model_executor.kernels.sampling_ref import choose_tokens_ref
from tercet.model_executor.kernels.skinny_linear import (
    Norm,
    skinny_linear,
    skinny_linear_ref,
    skinny_linear_sum,
    skinny_linear_sum_ref,
)
from tercet.model_executor.kernels.store_kv import store_kv, store_kv_ref
from tercet.model_executor.kernels.tuning import DecodeTile, ExtendTile, arch_of, decode_tile, extend_tile
from tercet.model_executor.layers.fp8_weight import quantize_fp8

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LENS, NEW = (1, 17, 300, 513, 2049, 700), (1, 17, 44, 200, 1000, 1)


def case(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, **options) -> Case:
    plain = Case(
        seed=head_dim, dtype=dtype, fp8=False, num_kv_heads=kv_heads, group=heads // kv_heads, head_dim=head_dim,
        page_size=16, lens=LENS, extend_lens=NEW, window=None, soft_cap=None, sm_scale=head_dim**-0.5,
    )  # fmt: skip
    return dataclasses.replace(plain, **options)


CASES = {
    "llama-8b": case(BF16, 32, 8, 128),
    "llama-1b": case(BF16, 32, 8, 64),
    "qwen3-0.6b": case(BF16, 16, 8, 128, page_size=1),
    "llama-8b-pages": case(BF16, 32, 8, 128, page_size=64),
    "llama-1b-pages": case(BF16, 32, 8, 64, page_size=64),
    "float16-pages-window": case(F16, 40, 8, 128, page_size=128, window=257),
    "96-pages-cap": case(BF16, 8, 8, 96, page_size=64, soft_cap=30.0),
    "qwen3-14b-window": case(BF16, 40, 8, 128, window=257),
    "gpt-oss": case(BF16, 64, 8, 64, page_size=64, has_sinks=True),
    "gpt-oss-window": case(BF16, 64, 8, 64, page_size=64, window=128, has_sinks=True),
    "smollm2": case(BF16, 9, 3, 64),
    "many-heads": case(BF16, 71, 1, 64),
    "80": case(F16, 8, 8, 80),
    "96-cap": case(BF16, 8, 8, 96, soft_cap=30.0),
    "192": case(BF16, 8, 2, 192),
    "256-cap-window": case(BF16, 8, 4, 256, soft_cap=50.0, window=100),
    "fp32": case(F32, 9, 3, 64),
    "fp32-128-window-cap": case(F32, 8, 2, 128, window=300, soft_cap=20.0),
    "fp8": case(BF16, 32, 8, 128, fp8=True),
    "fp8-80": case(BF16, 8, 8, 80, fp8=True),
    "fp8-96-window-cap": case(BF16, 40, 8, 96, fp8=True, window=257, soft_cap=30.0),
    "fp8-256": case(BF16, 8, 4, 256, fp8=True),
    "fp8-many-heads": case(BF16, 71, 1, 64, fp8=True),
    "fp8-64": case(F16, 9, 3, 64, fp8=True, window=700),
}


@pytest.fixture(params=CASES, scope="module")
def problem(request: pytest.FixtureRequest) -> Problem:
    return build(CASES[request.param], DEVICE)


def tiles(p: Problem) -> tuple[DecodeTile, ExtendTile]:
    return tiles_of(p.case)


def tiles_of(c: Case) -> tuple[DecodeTile, ExtendTile]:
    arch, fp32 = arch_of(torch.device(DEVICE)), c.dtype == F32
    extend = extend_tile(arch, c.head_dim, c.fp8, fp32=fp32, page_size=c.page_size)
    return decode_tile(arch, c.head_dim, fp32=fp32, fp8=c.fp8, page_size=c.page_size), extend


def extend(p: Problem, pick: list[int]) -> list[torch.Tensor]:
    """Requests `pick` in that order: the output of each."""
    new = [p.case.extend_lens[i] for i in pick]
    queries = p.q_extend.split(p.case.extend_lens)
    decode, tile = tiles(p)
    out = run_extend(
        p, tile, decode, torch.cat([queries[i] for i in pick]), p.rows[pick], p.extend_start_loc.diff()[pick],
        p.prefix_lens[pick],
    )  # fmt: skip
    return list(out.split(new))


def test_decode_agrees_with_the_float64_twin(problem: Problem) -> None:
    assert_close(run_decode(problem, tiles(problem)[0]), expected_decode(problem))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_decode_in_one_kernel_has_the_bits_of_three(name: str, norm: bool) -> None:
    case, everyone = CASES[name], list(range(len(LENS)))
    if not can_fuse_decode(case.num_heads, case.num_kv_heads, case.head_dim, case.dtype):
        return
    step = make_step(case, tiles_of(case)[0], norm=norm, device=DEVICE)
    wanted = step.apart()
    for _ in range(20):  # programs come in any order
        assert all(map(same_bits, step.fused(everyone), wanted))
    for pick in ([4], [5, 3, 0]):
        assert same_bits(step.fused(pick)[0], wanted[0][pick])


def test_all_pairs_of_fp8_bytes_are_decoded() -> None:
    for form in (KV_FP8_SOFT.value, kv_format(torch.float8_e4m3fn, arch_of(torch.device(DEVICE)))):
        assert_pairs_are_decoded(form, DEVICE)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.page_size % 64 == 0])
def test_one_look_up_for_a_tile_changes_no_bits(name: str) -> None:
    """Both kernels of decode attention, with a paged tile, and with a look-up for each slot."""
    tile = tiles_of(CASES[name])[0]
    if not tile.paged:
        return
    paged, plain = (
        make_step(CASES[name], dataclasses.replace(tile, paged=paged), norm=False, device=DEVICE)
        for paged in (True, False)
    )
    everyone = list(range(len(LENS)))
    for mine, wanted in ((paged.fused(everyone), plain.fused(everyone)), (paged.apart(), plain.apart())):
        assert all(map(same_bits, mine, wanted))


def test_extend_agrees_with_the_float64_twin(problem: Problem) -> None:
    assert_close(torch.cat(extend(problem, list(range(len(LENS))))), expected_extend(problem))


def test_a_decoding_request_does_not_depend_on_the_batch(problem: Problem) -> None:
    tile = tiles(problem)[0]
    everyone = run_decode(problem, tile)
    for pick in ([4], [5, 3, 0], [2, 4, 1, 0, 5, 3]):
        assert torch.equal(run_decode(problem, tile, pick), everyone[pick])


def test_an_extending_request_does_not_depend_on_the_batch(problem: Problem) -> None:
    everyone = extend(problem, list(range(len(LENS))))
    for pick in ([4], [3, 5, 1], [5, 4, 3, 2, 1, 0]):
        for i, out in zip(pick, extend(problem, pick), strict=True):
            assert torch.equal(out, everyone[i])


def test_a_token_does_not_depend_on_the_chunk(problem: Problem) -> None:
    at, length, new = 4, LENS[4], NEW[4]
    whole = extend(problem, [at])[0]
    q = problem.q_extend.split(NEW)[at]
    decode, tile = tiles(problem)
    done, parts = 0, []
    for size in (2, 129, 500, new - 631):
        prefix = torch.tensor([length - new + done], device=q.device)
        parts.append(
            run_extend(
                problem, tile, decode, q[done : done + size], problem.rows[[at]], torch.full_like(prefix, size), prefix
            )
        )
        done += size
    assert torch.equal(torch.cat(parts), whole)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_rows(dtype: torch.dtype) -> None:
    g = torch.Generator(DEVICE).manual_seed(0)
    for width in (576, 4096, 5120):
        x, residual, weight = (
            torch.randn(*shape, generator=g, device=DEVICE).to(dtype) for shape in ((33, width), (33, width), (width,))
        )
        before = residual.double()
        out = rmsnorm(x, weight, 1e-5, residual)
        assert relative_error(residual, before + x.double()) < TOLERANCE[dtype]
        assert relative_error(out, rmsnorm_ref(residual.double(), weight.double(), 1e-5)) < TOLERANCE[dtype]
        before = residual.double()
        add_rmsnorm(x, weight, 1e-5, residual)
        wanted = rmsnorm_ref(x.double(), weight.double(), 1e-5)
        assert relative_error(residual, before + wanted) < TOLERANCE[dtype]
        qkv = torch.cat((x, x[:, :320], x[:, :320]), 1)
        qk_rmsnorm(qkv, weight, weight[:320], 1e-5)
        q, k, v = qkv.split((width, 320, 320), 1)
        of_keys = rmsnorm_ref(x[:, :320].double(), weight[:320].double(), 1e-5)
        assert relative_error(q, wanted) < TOLERANCE[dtype] and relative_error(k, of_keys) < TOLERANCE[dtype]
        assert torch.equal(v, x[:, :320])
        gate_up = torch.randn(33, 2 * width, generator=g, device=DEVICE).to(dtype)
        for activation in ("silu", "gelu_tanh"):
            expected = act_and_mul_ref(gate_up.double(), activation)
            assert relative_error(act_and_mul(gate_up, activation), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("fp8", [False, True])
def test_rotary_and_store(fp8: bool) -> None:
    g = torch.Generator(DEVICE).manual_seed(1)
    heads, kv_heads, dim, tokens = 32, 8, 128, 50
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=g, device=DEVICE).to(BF16)
    angles = torch.rand(tokens, dim // 2, generator=g, device=DEVICE) * 1000
    cos, sin = angles.cos(), angles.sin()
    weights = [torch.randn(dim, generator=g, device=DEVICE).to(BF16) for _ in range(2)]
    slots = torch.randperm(99, generator=g, device=DEVICE)[:tokens] + 1
    pools = [torch.zeros(100, kv_heads, dim, device=DEVICE).to(torch.float8_e4m3fn if fp8 else BF16) for _ in range(4)]
    scales = {"k_scale": 0.03, "v_scale": 0.02} if fp8 else {}
    fused, apart, reference = qkv.clone(), qkv.clone(), qkv.double()
    norm = {"q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6}
    rotary(fused, heads, kv_heads, cos, sin, k_buffer=pools[0], v_buffer=pools[1], slots=slots, **scales, **norm)
    rotary(apart, heads, kv_heads, cos, sin, **norm)
    store_kv(apart[:, heads : heads + kv_heads], apart[:, heads + kv_heads :], pools[2], pools[3], slots, **scales)
    wide = norm | {"q_weight": weights[0].double(), "k_weight": weights[1].double()}
    rotary_ref(reference, heads, kv_heads, cos.double(), sin.double(), **wide)
    assert torch.equal(fused[:, :heads], apart[:, :heads])
    assert relative_error(apart, reference) < TOLERANCE[BF16]
    for a, b in zip(pools[:2], pools[2:], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    wanted = [torch.zeros_like(pools[0]) for _ in range(2)]
    store_kv_ref(apart[:, heads : heads + kv_heads], apart[:, heads + kv_heads :], *wanted, slots, **scales)
    for a, b in zip(pools[2:], wanted, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("hidden", "dtype"), [(576, F32), (4096, BF16), (16384, F16)], ids=str)
def test_the_start_of_a_decode_step(hidden: int, dtype: torch.dtype) -> None:
    g = torch.Generator(DEVICE).manual_seed(4)
    batch, num_rows, context = 37, 60, 300
    rows = torch.randperm(num_rows, generator=g, device=DEVICE)[:batch]
    lens, slots = (torch.randint(1, context + 1, (batch,), generator=g, device=DEVICE) for _ in range(2))
    inputs = torch.stack((rows, lens, slots))
    newest = torch.randint(0, 500, (num_rows,), generator=g, device=DEVICE)
    tables = [torch.zeros((num_rows, context), dtype=torch.int32, device=DEVICE) for _ in range(2)]
    embedding = torch.randn((500, hidden), generator=g, device=DEVICE).to(dtype)
    angles = torch.randn((context, 2, 64), generator=g, device=DEVICE)
    mine = decode_start(*inputs, newest, tables[0], embedding, angles)
    wanted = decode_start_ref(*inputs, newest, tables[1], embedding, angles)
    for a, b in zip((*mine, tables[0]), (*wanted, tables[1]), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("vocab", [300, 49152, 151936])
def test_choosing_tokens(vocab: int) -> None:
    g = torch.Generator(DEVICE).manual_seed(2)
    n = 24
    x = torch.randn(n, vocab, generator=g, device=DEVICE) * torch.linspace(0.1, 5, n, device=DEVICE)[:, None]
    x[: n // 2] = x[: n // 2].bfloat16().float()  # equal logits
    assert torch.equal(argmax(x), argmax_ref(x)) and torch.equal(argmax(x.bfloat16()), argmax_ref(x.bfloat16()))
    rows = torch.randperm(n, generator=g, device=DEVICE)
    newest = [torch.full((n + 1,), 7, device=DEVICE) for _ in range(2)]
    assert torch.equal(argmax(x, newest[0], rows), argmax_ref(x, newest[1], rows))
    assert torch.equal(*newest)

    table = torch.rand((n, len(Column)), generator=g, device=DEVICE, dtype=torch.float64) * 1.5 + 0.1
    off = torch.rand((n, 4), generator=g, device=DEVICE) < 0.4
    top_k = torch.randint(1, min(vocab, 5000), (n,), generator=g, device=DEVICE).double()
    table[:, Column.TOP_K] = torch.where(off[:, 0], vocab, top_k)
    table[:, Column.TOP_P] = torch.where(off[:, 1], 1.0, table[:, Column.TOP_P] / 1.6)
    table[:, Column.MAX_GAP] = torch.where(off[:, 2], torch.inf, table[:, Column.MAX_GAP] * 5)
    table[:, Column.GREEDY] = 0
    plan = torch.full((n, len(Field)), -1, dtype=torch.int64, device=DEVICE)
    plan[:, Field.ROW] = torch.arange(n)
    plan[:, Field.DRAW] = torch.rand(n, generator=g, device=DEVICE, dtype=torch.float64).view(torch.int64)
    plan[:, Field.COUNTS] = torch.where(off[:, 3], -1, torch.arange(n, device=DEVICE))
    plan[:, Field.EDITED] = plan[:, Field.COUNTS]
    plan[:, Field.STOPS_START] = plan[:, Field.STOPS_END] = 0
    counts = torch.randint(0, 4, (n, vocab), generator=g, device=DEVICE).int()
    none = torch.empty((0, 0), device=DEVICE)
    edits = EditTables(counts, none, none.long(), none.int())

    def chosen(lines: slice) -> tuple[torch.Tensor, torch.Tensor]:
        own = edits._replace(counts=counts.clone())
        tokens = choose_tokens(x[lines], table, plan[lines], own, num_edited=n, any_sampled=True, any_ranked=True)
        return tokens, own.counts

    tokens, counted = chosen(slice(None))
    expected = edits._replace(counts=counts.clone())
    # Another exp moves a boundary between two tokens by a millionth: hardly ever across a draw.
    assert int((tokens != choose_tokens_ref(x, table, plan, expected)).sum()) <= 1
    assert int((counted != expected.counts).sum()) <= 2
    assert torch.equal(torch.cat([chosen(slice(i, i + 1))[0] for i in range(n)]), tokens)
    assert all(torch.equal(chosen(slice(None))[0], tokens) for _ in range(20)), "programs come in any order"


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("num_in", "num_out", "gated"), [(2048, 3072, False), (4096, 14336, True), (576, 100, True)])
def test_small_linear_layers(num_in: int, num_out: int, gated: bool, dtype: torch.dtype) -> None:
    g = torch.Generator(DEVICE).manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

    x, weight, norm = draw(8, num_in), draw(2 * num_out if gated else num_out, num_in), Norm(draw(num_in), 1e-5)
    out = skinny_linear(x, weight, norm=norm, gated=gated)
    wide = Norm(norm.weight.double(), norm.eps)
    expected = skinny_linear_ref(x.double(), weight.double(), norm=wide, gated=gated)
    assert relative_error(out, expected) < 3 * TOLERANCE[dtype]
    for rows in (slice(0, 1), slice(3, 4), slice(2, 8)):
        assert torch.equal(skinny_linear(x[rows], weight, norm=norm, gated=gated), out[rows])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("num_in", "num_out"), [(2048, 2048), (14336, 4096), (576, 100)])
def test_small_linear_layers_before_a_norm(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    g = torch.Generator(DEVICE).manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

    x, weight, before, norm = draw(8, num_in), draw(num_out, num_in), draw(8, num_out), Norm(draw(num_out), 1e-5)
    wide = before.double()
    expected = skinny_linear_sum_ref(x.double(), weight.double(), None, wide, norm.weight.double())
    for _ in range(20):  # programs come in any order
        residual = before.clone()
        scaled = skinny_linear_sum(x, weight, None, residual, norm.weight)
        assert relative_error(residual, wide) < 3 * TOLERANCE[dtype]
        assert relative_error(scaled.x, expected.x) < 3 * TOLERANCE[dtype]
        assert relative_error(scaled.squares.sum(0), expected.squares[0]) < 3 * TOLERANCE[dtype]
    after = draw(48, num_out)
    whole = skinny_linear(scaled, after, norm=norm)
    apart = skinny_linear_ref(residual.double(), after.double(), norm=Norm(norm.weight.double(), norm.eps))
    assert relative_error(whole, apart) < 3 * TOLERANCE[dtype]
    for rows in (slice(0, 1), slice(3, 4), slice(2, 8)):
        some = before[rows].clone()
        prepared = skinny_linear_sum(x[rows], weight, None, some, norm.weight)
        assert torch.equal(some, residual[rows])
        assert torch.equal(skinny_linear(prepared, after, norm=norm), whole[rows])


@pytest.mark.parametrize("form", ["fp8", "fp8_block"])
@pytest.mark.parametrize(("num_in", "num_out"), [(2048, 3072), (4096, 14336), (576, 100)])
def test_fp8_linear_layers(num_in: int, num_out: int, form: str) -> None:
    g = torch.Generator(DEVICE).manual_seed(3)
    x = torch.randn(300, num_in, generator=g, device=DEVICE).to(BF16)
    weight = quantize_fp8(torch.randn(num_out, num_in, generator=g, device=DEVICE), form)
    rounded, expected = quantize_rows(x), quantize_rows_ref(x)
    assert torch.equal(rounded.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(rounded.scales, expected.scales)
    out = fp8_linear(x, *weight)
    # Matrix units add products of fp8 with fewer bits than fp32 has.
    assert relative_error(out, fp8_linear_ref(x.double(), *weight)) < 3 * TOLERANCE[BF16]
    for rows in (slice(0, 1), slice(7, 8), slice(3, 67), slice(299, 300), slice(100, 229)):
        assert torch.equal(fp8_linear(x[rows], *weight), out[rows]), rows
