from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor.sampling.counter_rng import uniform

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**31 - 1)


def test_seed_zero_is_the_published_splitmix64_stream() -> None:
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    draws = uniform(np.zeros(3, np.int64), np.arange(3))
    assert draws.tolist() == [(bits >> 11) / 2**53 for bits in expected]


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=20))
def test_an_element_depends_on_its_own_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = np.array(pairs, np.int64).T
    together = uniform(seeds, positions)
    assert ((together >= 0) & (together < 1)).all()
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(len(pairs))]
    assert together.tolist() == alone


def test_streams_of_neighbouring_seeds_and_positions_are_uniform_and_unrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(-150, 150), np.arange(300), indexing="ij")
    draws = uniform(seeds.ravel(), positions.ravel()).reshape(300, 300)
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert np.square(counts - 900).sum() / 900 < 180  # chi-square, 99 degrees: 1 in a million
    for axis in (0, 1):  # neighbours: correlation of 300 numbers has a deviation of 1 / sqrt(300)
        a, b = np.take(draws, range(299), axis).ravel(), np.take(draws, range(1, 300), axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))


def test_no_seed_is_another_seeds_stream_a_few_positions_on() -> None:
    """SplitMix64 adds a constant per position: seeds that differ by it would share a stream, were they not mixed."""
    golden_gamma = 0x9E3779B97F4A7C15 - 2**64
    positions = np.arange(100)
    stream = uniform(np.zeros(100, np.int64), positions)
    other = uniform(np.full(100, golden_gamma), positions)
    assert not set(stream.tolist()) & set(other.tolist())
