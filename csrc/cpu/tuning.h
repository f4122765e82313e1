// What suits one processor and not another. A calibration may choose it (model_executor/cpu_calibration.py).
#pragma once

#include <cstdint>

#include "vectors.h"

namespace tercet {

/// Whether this build has an instruction that multiplies bfloat16.
#ifdef __AVX512BF16__
constexpr bool kMultipliesBFloat16 = true;
#else
constexpr bool kMultipliesBFloat16 = false;
#endif

/// The settings of this process. They are set before the first operation, and never while one runs.
struct Tuning {
  static constexpr int64_t kMaxChunk = 1024;

  /// Bytes of a block of rows of x. It stays in a core's L2 cache while panels pass by. No bit of a result depends on it.
  int64_t block_bytes = 256 * 1024;
  /// Numbers of a chunk, a multiple of 64 and at most kMaxChunk. A chunk of a panel stays in a core's L1 or L2 cache
  /// while a block of rows passes by. No bit of a result depends on it.
  int64_t chunk = kMaxChunk;
  /// Linear layers of bfloat16 widen their numbers to float and multiply those. On some processors that is faster than
  /// products of bfloat16. Results differ by rounding. Read when an operation is called or recorded.
  bool widens_bfloat16 = !kMultipliesBFloat16;
  /// Panels are prefetched into the L1 cache, not only into L2. A product then waits less, if L1 has room for the next
  /// panel. If it does not, the next panel displaces numbers that the product still reads. No bit of a result depends on it.
  bool prefetches_into_l1 = false;

  static Tuning& get() {
    static Tuning tuning;
    return tuning;
  }
};

}  // namespace tercet
