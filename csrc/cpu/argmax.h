// The most probable token of each row.
#pragma once

#include <limits>

#include "dot.h"
#include "thread_pool.h"

namespace tercet {

/// The first largest of n logits; -1 if one is NaN, or all are -inf.
inline int64_t argmax(const float* x, int64_t n) {
  // The first pass finds the largest logit, the second its index. The second reads from the cache, which costs less than
  // keeping indices in the first.
  Vec best(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) best = at::vec::maximum(best, Vec::loadu(x + i));
  float largest = max_of(best);  // NaN if any logit is
  for (; i < n; ++i) largest = x[i] > largest || std::isnan(x[i]) ? x[i] : largest;
  if (!(largest > -std::numeric_limits<float>::infinity())) return -1;
  i = 0;
  while (i + kLanes <= n && (Vec::loadu(x + i) == Vec(largest)).zero_mask() == (1LL << kLanes) - 1) i += kLanes;
  while (x[i] != largest) ++i;
  return i;
}

/// The same for each row of logits [rows, n].
inline void argmax(const float* logits, int64_t rows, int64_t n, int64_t* tokens) {
  ThreadPool::get().run(rows, [&](int64_t row) { tokens[row] = argmax(logits + row * n, n); });
}

}  // namespace tercet
