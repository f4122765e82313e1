"""The tokens drawn are those of the joint distribution: exactly against the reference, and by chi-square."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_reference import kept_tokens, near_a_threshold, new_row, possible_tokens, probabilities

from tercet.model_executor.sampling import block_sampling
from tercet.model_executor.sampling.counter_rng import uniform
from tercet.model_executor.sampling.sampler import Sampler
from tercet.srt.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("each_cpu_choice")

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 5),
        "top_k": st.sampled_from([-1, 2, 3, 7, 20, 10**9]),
        "top_p": st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1)),
    }
)
# A coarse grid: plenty of ties, and differences that float32 does not blur.
LOGITS = st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=70)


@pytest.fixture(params=["as it is", "small widths and blocks"])
def any_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, and a top-p search that starts with few tokens: with a small vocabulary too."""
    if request.param != "as it is":
        monkeypatch.setattr(block_sampling, "BLOCK_ELEMENTS", 200)
        monkeypatch.setattr("tercet.model_executor.sampling.token_choice.CPU_WIDTHS", (2, 9))


def draw_many(logits: np.ndarray, seeds: np.ndarray, position: int = 5, **params: float) -> np.ndarray:
    """One token for each seed, all from the same logits: int64 [len(seeds)]."""
    n = len(seeds)
    sampler = Sampler(n, len(logits), "cpu")
    for i, seed in enumerate(seeds):
        sampler.set_row(new_row(i + 1, int(seed), **params))
    batch = torch.tensor(logits, dtype=torch.float32).expand(n, -1)
    rows = np.arange(1, n + 1, dtype=np.int32)
    return sampler.sample(batch, rows, np.full(n, position, np.int32)).numpy()


@pytest.mark.usefixtures("any_path")
@given(logits=LOGITS, params=PARAMS, first_seed=st.integers(-(2**63), 2**63 - 65))
def test_every_draw_is_the_reference_inverse_cdf(
    logits: list[float], params: dict[str, float], first_seed: int
) -> None:
    x, sampling = np.array(logits), SamplingParams(**params)
    assume(not near_a_threshold(x, sampling))
    seeds = first_seed + np.arange(64)
    draws = uniform(seeds, np.full(64, 5))
    tokens = draw_many(x, seeds, **params)
    for token, possible in zip(tokens, possible_tokens(x, sampling, draws), strict=True):
        assert int(token) in possible


@pytest.mark.parametrize("vocab_size", [4097, 9001])
@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 30.0},  # nearly flat: the search ends with the whole vocabulary
        {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
        {"top_k": 2000, "temperature": 3.0},
        {"min_p": 0.05},
        {},
    ],
)
def test_large_vocabularies(vocab_size: int, params: dict[str, float]) -> None:
    x = np.random.default_rng(7).normal(0, 3, vocab_size).astype(np.float32).astype(np.float64)
    sampling = SamplingParams(**params)
    seeds = np.arange(16)
    tokens = draw_many(x, seeds, position=99, **params)
    draws = uniform(seeds, np.full(16, 99))
    for token, possible in zip(tokens, possible_tokens(x, sampling, draws), strict=True):
        assert int(token) in possible


def test_each_threshold_is_taken_on_the_full_distribution() -> None:
    p = np.array([0.4, 0.25, 0.15, 0.12, 0.08])
    # Applied one after another, top-k would renormalise to .5, .31, .19 and top-p keep only two of the three.
    joint = draw_many(np.log(p), np.arange(400), top_k=3, top_p=0.66)
    assert set(joint) == {0, 1, 2}
    # min_p is relative to the best token of all, and leaves the mass that top-p is measured in alone.
    assert set(draw_many(np.log(p), np.arange(400), min_p=0.35, top_p=0.7)) == {0, 1, 2}
    assert set(draw_many(np.log(p), np.arange(400), min_p=0.35, top_p=0.6)) == {0, 1}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, {1, 3, 4}),  # of equal tokens, the first by id
        ({"top_p": 0.01}, {1, 3, 4, 6}),  # equal tokens have nothing strictly more probable: all or none
        ({"top_k": 2, "top_p": 0.01}, {1, 3}),
        ({"min_p": 1.0}, {1, 3, 4, 6}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 6}),
        ({"top_p": 0.999}, {0, 1, 2, 3, 4, 5, 6}),
    ],
)
def test_ties(params: dict[str, float], kept: set[int]) -> None:
    logits = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert set(draw_many(logits, np.arange(300), **params)) == kept


@pytest.mark.parametrize("params", [{"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 2, "top_p": 1e-300}])
def test_the_most_probable_token_always_stays(params: dict[str, float]) -> None:
    logits = np.random.default_rng(0).permutation(np.linspace(-1, 1, 37))
    assert set(draw_many(logits, np.arange(50), **params)) == {int(logits.argmax())}


@pytest.mark.parametrize(("temperature", "drawn"), [(1e-6, {1}), (1e20, {1, 2, 5}), (1e300, {1, 2, 3, 5})])
@pytest.mark.parametrize("top_k", [-1, 5])
def test_extreme_temperatures(temperature: float, drawn: set[int], top_k: int) -> None:
    logits = np.array([-np.inf, 3.0, 2.0, -1e30, -np.inf, 2.5])
    assert set(draw_many(logits, np.arange(200), temperature=temperature, top_k=top_k)) == drawn


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 2.0},
        {"temperature": 0.7, "top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 15, "top_p": 0.85, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_chi_square(params: dict[str, float], along: str) -> None:
    n, vocab_size = 20_000, 50
    x = np.random.default_rng(3).normal(0, 1.5, vocab_size).astype(np.float32)
    sampler = Sampler(n if along == "seeds" else 1, vocab_size, "cpu")
    if along == "seeds":
        for row in range(1, n + 1):
            sampler.set_row(new_row(row, row, **params))
        rows, positions = np.arange(1, n + 1, dtype=np.int32), np.full(n, 17, np.int32)
    else:
        sampler.set_row(new_row(1, 12345, **params))
        rows, positions = np.ones(n, np.int32), np.arange(n, dtype=np.int32)
    tokens = sampler.sample(torch.from_numpy(x).expand(n, -1), rows, positions).numpy()

    sampling, logits = SamplingParams(**params), x.astype(np.float64)
    kept = kept_tokens(logits, sampling)
    expected = probabilities(logits, sampling.temperature)[kept]
    expected *= n / expected.sum()
    observed = np.bincount(tokens, minlength=vocab_size)
    assert observed.sum() == observed[kept].sum() == n
    statistic = (np.square(observed[kept] - expected) / expected).sum()
    assert statistic < chi_square_bound(len(kept) - 1)


def chi_square_bound(degrees: int, sigmas: float = 4.0) -> float:
    """Quantile of the chi-square distribution (Wilson and Hilferty, 1931), at 3 in 100,000 for 4 sigmas."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + sigmas * spread**0.5) ** 3
