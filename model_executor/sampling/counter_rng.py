"""A counter-based random number generator: the draw at a position is a hash of (seed, position).

It has no state. So a request's draws do not depend on its batch or its row, and a retraction does not change them. The
hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). The seed is
mixed first, so that neighbouring seeds give unrelated streams.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_FLOAT64_BITS = 53


def uniform(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Draw uniform numbers in [0, 1), with 53 bits each. Element i depends only on (seeds[i], positions[i]).

    Args:
        seeds: int64 [n], any value
        positions: int64 [n], not negative
    """
    start = _mix(seeds.astype(np.uint64))
    bits = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(64 - _FLOAT64_BITS)).astype(np.float64) * 2.0**-_FLOAT64_BITS


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64, in arithmetic modulo 2**64."""
    z = (z ^ (z >> np.uint64(30))) * _MULTIPLIER_1
    z = (z ^ (z >> np.uint64(27))) * _MULTIPLIER_2
    return z ^ (z >> np.uint64(31))
