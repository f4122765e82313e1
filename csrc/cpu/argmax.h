// The most probable token.
#pragma once

#include <limits>

#include "dot.h"
#include "pool.h"

namespace tercet {

/// The first of the largest logits of each row, -1 where one is NaN or all are -inf. logits: [rows, n]
inline void argmax(const float* logits, int64_t rows, int64_t n, int64_t* tokens) {
  Pool::get().run(rows, [&](int64_t row) {
    const float* x = logits + row * n;
    // Two passes over what the second finds in the cache: comparing is cheaper than carrying indices along.
    Vec best(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) best = at::vec::maximum(best, Vec::loadu(x + i));
    float most = max_of(best);  // NaN if any was
    for (; i < n; ++i) most = x[i] > most || std::isnan(x[i]) ? x[i] : most;
    tokens[row] = -1;
    if (!(most > -std::numeric_limits<float>::infinity())) return;
    i = 0;
    while (i + kLanes <= n && (Vec::loadu(x + i) == Vec(most)).zero_mask() == (1LL << kLanes) - 1) i += kLanes;
    while (x[i] != most) ++i;
    tokens[row] = i;
  });
}

}  // namespace tercet
