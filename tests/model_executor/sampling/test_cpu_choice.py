"""The compiled operation draws the tokens that plain torch does, and what it is given is checked."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import new_row
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.model_executor import cpu_extension
from tercet.model_executor.sampling.cpu_choice import CpuChoice
from tercet.model_executor.sampling.joint_sampling import MAX_VOCAB_SIZE
from tercet.model_executor.sampling.newest_tokens import NewestTokens
from tercet.model_executor.sampling.sampler import Sampler
from tercet.model_executor.sampling.sampling_state import Column, SamplingState
from tercet.model_executor.sampling.token_choice import Block, TokenChoice, TorchChoice

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

CPU = torch.device("cpu")
INF = torch.inf
JUST_BELOW_1 = 1 - 2.0**-53
MARGIN = 1e-6
"""Two exponential functions may differ in the last bit of a float32: tokens this close to a draw are not compared."""


def choose(choice: TokenChoice, state: SamplingState, logits: torch.Tensor, draws: np.ndarray) -> np.ndarray:
    """A token for each line, int64 [n]; line i has the parameters of row i + 1."""
    rows = np.arange(1, len(logits) + 1)
    groups = state.group(rows)
    tokens = np.full(len(rows), -2)
    for group, sample in (
        (groups.open, choice.open),
        (groups.small_top_k, choice.small_top_k),
        (groups.ranked, choice.ranked),
    ):
        if len(group):
            lines, draw = torch.from_numpy(group), torch.from_numpy(draws[group])
            block = Block(logits, lines, torch.from_numpy(rows[group]), draw, state.host[rows[group]])
            tokens[group] = sample(block).numpy()
    return tokens


def state_of(params: list[dict[str, float]], vocab_size: int, top_p_shift: float = 0.0) -> SamplingState:
    state = SamplingState(len(params), vocab_size, CPU)
    for row, given_params in enumerate(params, start=1):
        shifted = dict(given_params)
        if "top_p" in shifted:
            shifted["top_p"] = min(max(shifted["top_p"] + top_p_shift, 1e-12), JUST_BELOW_1)
        state.set_row(new_row(row, **shifted))
    state.flush()
    return state


def assert_tokens_are_torchs(logits: torch.Tensor, params: list[dict[str, float]], draws: np.ndarray) -> float:
    """Of every line whose token does not hang by a thread; the share of those."""
    vocab_size = logits.shape[1]
    tokens = choose(CpuChoice(), state_of(params, vocab_size), logits, draws)
    lowest, highest = (
        choose(
            TorchChoice(state, vocab_size, on_cpu=True), state, logits, (draws + shift).clip(min=0, max=JUST_BELOW_1)
        )
        for shift in (-MARGIN, MARGIN)
        for state in [state_of(params, vocab_size, shift)]
    )
    # With the draw and with top-p, the place in the order only grows.
    settled = lowest == highest
    assert (tokens[settled] == lowest[settled]).all(), (tokens, lowest, settled)
    return float(settled.mean())


def drawn_logits(kind: str, lines: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(lines, vocab_size, generator=generator) * 4
    if kind == "ties":
        return x.round()
    if kind == "flat":
        return x * 0.01
    if kind == "banned":
        x[:, 1:].masked_fill_(torch.rand(lines, vocab_size - 1, generator=generator) < 0.9, -INF)
    if kind == "far":
        x *= 1e4
    return x


PARAMS = st.fixed_dictionaries(
    {"temperature": st.one_of(st.floats(0.05, 3), st.sampled_from([1.0, 1e-3, 1e6, 1e30]))},
    optional={
        "top_k": st.one_of(st.integers(2, 70), st.integers(2, 3000)),
        "top_p": st.one_of(st.floats(0.001, 0.999), st.sampled_from([1e-9, 0.5])),
        "min_p": st.one_of(st.floats(0.001, 1), st.just(1.0)),
    },
)
DRAWS = st.one_of(st.floats(0, JUST_BELOW_1), st.sampled_from([0.0, JUST_BELOW_1]))


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["normal", "ties", "flat", "banned", "far"]),
    # chunks of 64 tokens, and every remainder
    vocab_size=st.one_of(st.integers(1, 200), st.integers(200, 5000), st.sampled_from([64, 128, 1024])),
    requests=st.lists(st.tuples(PARAMS, DRAWS), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_tokens_are_those_of_torch(
    kind: str, vocab_size: int, requests: list[tuple[dict[str, float], float]], seed: int
) -> None:
    logits = drawn_logits(kind, len(requests), vocab_size, seed)
    params, draws = zip(*requests, strict=True)
    assert_tokens_are_torchs(logits, list(params), np.array(draws))


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_tokens_of_a_real_vocabulary_are_those_of_torch(scale: float) -> None:
    kinds = [{}, {"min_p": 0.05}, {"top_k": 50}, {"top_k": 1000}, {"top_k": 9000}, {"top_p": 0.9}]
    kinds += [{"top_k": 50, "top_p": 0.9}, {"top_p": 0.99, "temperature": 2.0}, {"top_p": 0.5, "min_p": 0.1}]
    params = [kind for kind in kinds for _ in range(4)]
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(params), 49152, generator=generator) * scale
    draws = torch.rand(len(params), generator=generator, dtype=torch.float64).numpy()
    assert assert_tokens_are_torchs(logits, params, draws) > 0.7


def sample(
    logits: torch.Tensor,
    draws: list[float],
    lines: list[int] | None = None,
    *,
    temperature: float = 1.0,
    top_k: float = 2**20,
    top_p: float = 1.0,
    max_gap: float = INF,
) -> list[int]:
    """lines: default one for each draw."""
    chosen = torch.arange(len(draws)) if lines is None else torch.tensor(lines)
    of_all = torch.tensor([temperature, top_k, top_p, max_gap], dtype=torch.float64)
    parameters = of_all.unsqueeze(1).expand(-1, len(draws))
    draw = torch.tensor(draws, dtype=torch.float64)
    tokens: list[int] = torch.ops.tercet_cpu.sample(logits, chosen, *parameters, draw).tolist()
    return tokens


@pytest.mark.parametrize("ranked", [{}, {"top_k": 4}, {"top_p": 0.999}, {"max_gap": 0.0}])
def test_a_draw_on_the_edge_belongs_to_the_next_token_that_has_a_chance(ranked: dict[str, float]) -> None:
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]]).expand(4, -1).contiguous()
    assert sample(logits, [0.0, 0.4999, 0.5, JUST_BELOW_1], **ranked) == [1, 1, 3, 3]


def test_mass_that_is_met_exactly_needs_no_further_token() -> None:
    # exp(-24) * 2**34 is 0.65: the weights are 1, 2**34 and 1.
    logits = torch.tensor([[0.0, 24.0, 0.0]])
    assert sample(logits, [JUST_BELOW_1], top_p=1 - 2.0**-33) == [1]
    # One more is wanted: the first of two equal tokens has it, and both are kept.
    one_more = 1 - 1.5 * 2.0**-34
    assert sample(logits, [JUST_BELOW_1], top_p=one_more) == [2]
    assert sample(logits, [JUST_BELOW_1], top_p=one_more, top_k=2) == [0]
    # Too close for float32 to weigh them differently, and yet one is more probable.
    assert sample(torch.tensor([[-(2.0**-30), 0.0]]), [JUST_BELOW_1], top_p=0.5) == [1]


def test_a_draw_that_passes_the_best_token_exactly_takes_the_second() -> None:
    # Weights 2**34, 1 and 1.
    logits = torch.tensor([[-0.2, 24.0, 0.0]])
    draws = [(2**34 + place) / (2**34 + 2) for place in (-0.5, 0.5, 1.5)]
    assert sample(logits, draws, lines=[0, 0, 0], top_p=1 - 2.0**-36) == [1, 2, 0]


def test_a_token_on_the_edge_of_min_p_is_kept() -> None:
    logits = torch.tensor([[0.0, 0.5, -0.001]])
    for max_gap, open_draw, ranked_draw in ((0.502, 2, 0), (0.5, 1, 0), (0.499, 1, 1)):
        assert sample(logits, [JUST_BELOW_1], max_gap=max_gap) == [open_draw]
        assert sample(logits, [JUST_BELOW_1], max_gap=max_gap, top_k=2) == [ranked_draw]


@pytest.mark.parametrize("ranked", [{}, {"top_k": MAX_VOCAB_SIZE - 1}, {"top_p": 0.9}])
def test_the_flattest_distribution_of_the_largest_vocabulary_is_summed_exactly(ranked: dict[str, float]) -> None:
    last = MAX_VOCAB_SIZE - 1 - ("top_k" in ranked)
    tokens = sample(torch.zeros(1, MAX_VOCAB_SIZE), [0.0, 0.5, JUST_BELOW_1], lines=[0, 0, 0], **ranked)
    assert tokens == [0, (last + 1) // 2, last]


def test_lines_in_any_order_beside_any_others() -> None:
    logits = drawn_logits("normal", 5, 3001, 9)
    draws = [0.1, 0.9, 0.5, 0.3, 0.7]
    together = sample(logits, draws, top_p=0.95)
    assert len(set(together)) > 1
    for order in itertools.permutations(range(5), 3):
        assert sample(logits, [draws[i] for i in order], lines=list(order), top_p=0.95) == [together[i] for i in order]


class OperationsOnLogits(TorchDispatchMode):
    """Notes the operations of torch that are given a tensor as wide as the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._vocab_size = vocab_size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if any(tensor.shape[-1:] == (self._vocab_size,) for tensor in tensors):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("edit", [{}, {"frequency_penalty": 1.0}])
def test_torch_touches_logits_only_to_edit_them(edit: dict[str, float]) -> None:
    """Its own threads for work on so many numbers would take the cores from those of the next step."""
    kinds = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]
    sampler = Sampler(len(kinds), 997, CPU)
    for row, params in enumerate(kinds, start=1):
        sampler.set_row(new_row(row, **params, **edit))
    rows, seq_lens = np.arange(1, 6, dtype=np.int32), np.full(5, 4, np.int32)
    with OperationsOnLogits(997) as seen:
        sampler.sample(torch.randn(5, 997), rows, seq_lens)
    names = ("argmax", "sample") if edit else ("choose_tokens",)
    ours = {f"tercet_cpu.{name}.default" for name in names}
    free_in_float32 = {"aten.detach.default", "aten.to.dtype"}
    assert ours <= seen.names
    assert (seen.names <= ours | free_in_float32) == (not edit), seen.names


KINDS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3, "min_p": 0.1},
    {"top_k": 5},
    {"top_k": 300, "temperature": 2.0},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.8, "min_p": 1.0},
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(-(2**63), 2**63 - 1), st.integers(1, 2**31 - 1)),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from(["", "ties", "flat", "banned"]),
    st.integers(0, 2**31),
)
def test_a_batch_without_edits_is_chosen_by_one_operation_as_by_several(
    lines: list[tuple[dict[str, float], int, int]], kind: str, seed: int
) -> None:
    logits = drawn_logits(kind, len(lines), 997, seed)
    logits[seed % (2 * len(lines)) :: 2 * len(lines)] = INF - INF
    rows = np.random.default_rng(seed).permutation(np.arange(1, 12, dtype=np.int32))[: len(lines)]
    seq_lens = np.array([seq_len for _, _, seq_len in lines], np.int32)
    chosen = []
    for has_edits in (False, True):
        sampler = Sampler(12, 997, CPU)
        for row, (params, row_seed, _) in zip(rows.tolist(), lines, strict=True):
            sampler.set_row(new_row(row, row_seed, **params))
        if has_edits:
            sampler.set_row(new_row(12, logit_bias={"1": 1.0}))  # a row outside the batch
            sampler._edits.any_needed = lambda *_: True  # type: ignore[method-assign]
        newest = NewestTokens(torch.full((13,), -5), torch.from_numpy(rows.astype(np.int64)))
        tokens = sampler.sample(logits, rows, seq_lens, newest=newest)
        chosen.append((tokens.tolist(), newest.tokens.tolist()))
    assert chosen[0] == chosen[1]
    assert [chosen[0][1][row] for row in rows] == [max(token, 0) for token in chosen[0][0]]


def test_what_does_not_fit_a_batch_is_refused() -> None:
    params = torch.tensor([[1.0, 7.0, 1.0, INF, 1.0, 0.0, 0.0, 0.0]] * 3, dtype=torch.float64)

    def choose_tokens(rows: list[int], num_lines: int = 2, params: torch.Tensor = params) -> torch.Tensor:
        numbers = torch.tensor(rows), torch.ones(len(rows), dtype=torch.int64)
        seeds = torch.zeros(3, dtype=torch.int64)
        found: torch.Tensor = torch.ops.tercet_cpu.choose_tokens(
            torch.zeros(num_lines, 7), *numbers, params, seeds, None
        )
        return found

    assert len(choose_tokens([1, 2])) == 2
    for wrong in (3, -1):
        with pytest.raises(RuntimeError, match="rows must be rows of params"):
            choose_tokens([1, wrong])
    with pytest.raises(RuntimeError, match="logits must have shape"):
        choose_tokens([1, 2], num_lines=3)
    with pytest.raises(RuntimeError, match="params must have shape"):
        choose_tokens([1, 2], params=params[:, :7].contiguous())
    for column in (Column.TEMPERATURE, Column.TOP_K, Column.TOP_P):
        changed = params.clone()
        changed[2, column] = 0
        with pytest.raises(RuntimeError, match="must be positive"):
            choose_tokens([1, 2], params=changed)


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(2, 7)
    assert sample(logits, [0.5], lines=[1]) == [3]
    for lines in ([2], [-1]):
        with pytest.raises(RuntimeError, match="lines must be in"):
            sample(logits, [0.5], lines=lines)
    for wrong in ({"top_k": 0}, {"max_gap": -1.0}, {"top_p": 0.0}, {"top_p": INF - INF}, {"max_gap": INF - INF}):
        with pytest.raises(RuntimeError, match="must be positive"):
            sample(logits, [0.5], **wrong)
    for temperature in (0.0, 1e-50, 1e40, INF, INF - INF):
        with pytest.raises(RuntimeError, match="temperature a finite float32"):
            sample(logits, [0.5], temperature=temperature)
    assert sample(logits, [0.5], top_k=INF) == sample(logits, [0.5], top_k=1e300) == [3]
    with pytest.raises(RuntimeError, match="no token to choose"):
        sample(logits[:, :0].contiguous(), [0.5])
    for draw in (1.0, -0.1, INF - INF):
        with pytest.raises(RuntimeError, match="draw must be in"):
            sample(logits, [draw])
    with pytest.raises(RuntimeError, match="must have shape"):
        sample(logits, [0.5], lines=[0, 1])
    with pytest.raises(RuntimeError, match="logits must"):
        sample(logits.double(), [0.5])
