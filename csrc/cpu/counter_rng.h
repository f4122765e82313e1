// The draws of rows, as model_executor/sampling/counter_rng.py computes them.
#pragma once

#include <cstdint>

namespace tercet {

/// The finaliser of SplitMix64.
inline uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

/// A number in [0, 1) with 53 random bits.
inline double uniform(int64_t seed, int64_t position) {
  const uint64_t bits = mix(mix(seed) + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace tercet
