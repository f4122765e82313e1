// Softmax over some of the keys, and how two such results are merged (online softmax, arXiv 1805.02867).
#pragma once

#include <algorithm>
#include <limits>

#include "attention_plan.h"

namespace tercet {

/// m before any key is seen. It is less than any score, and finite: 2^(kNoScore - kNoScore) is 1, not NaN.
constexpr float kNoScore = -1e30f;
/// The score of a key that a query does not see. Its weight is exactly zero.
constexpr float kMasked = -std::numeric_limits<float>::infinity();

/// The largest sum of a row's weights for one tile. A larger sum raises m. That happens seldom after the first tile, so most
/// tiles need no search for their largest score.
constexpr float kMaxTileSum = 4096;

/// The result of query rows over some keys. A score is q k' times the scale and log2(e), so weights are powers of two. For
/// each row: m is the largest score of the tile that last raised it, l is the sum of 2^(score - m), acc the sum of
/// 2^(score - m) * value.
struct Partial {
  float* m;    // [rows]
  float* l;    // [rows]
  float* acc;  // [rows, width of values]
};

/// The largest score of each of `count` rows, for keys in kPanels panels. Rows of scores are kTile numbers apart. Lane i has
/// that of row i. `count` is at most kLanes.
template <int kPanels>
inline Vec largest_scores(const float* scores, int64_t count) {
  Floats row_vectors[kLanes];
  for (int64_t r = 0; r < count; ++r) {
    Vec largest = Vec::loadu(scores + r * kTile);
    unrolled<2 * kPanels - 1>([&](auto i) {
      largest = at::vec::clamp_min(Vec::loadu(scores + r * kTile + (i + 1) * kLanes), largest);
    });
    row_vectors[r] = to_floats(largest);
  }
  std::fill(row_vectors + count, row_vectors + kLanes, Floats{});
  return reduce_each(row_vectors, [](Vec a, Vec b) { return at::vec::clamp_min(a, b); });
}

/// weights [count, kTile] = 2^(scale * score - m), for the same rows of scores. Returns the sum of each row.
template <int kPanels, typename C>
inline Vec write_weights(const float* scores, int64_t count, float scale, const float* m, C* weights) {
  Floats row_vectors[kLanes];
  for (int64_t r = 0; r < count; ++r) {
    const Vec m_of_row(m[r]);
    Vec sum(0.f);
    unrolled<kPanels>([&](auto i) {
      const auto weight = [&](int64_t at) {
        return exp2_for<C>(at::vec::fmsub(Vec::loadu(scores + r * kTile + at), Vec(scale), m_of_row));
      };
      const FloatPair pair{weight(i * kPanel), weight(i * kPanel + kLanes)};
      sum = sum + (pair.left + pair.right);
      store_pair(weights + r * kTile + i * kPanel, pair);
    });
    row_vectors[r] = to_floats(sum);
  }
  std::fill(row_vectors + count, row_vectors + kLanes, Floats{});
  return reduce_each(row_vectors, [](Vec a, Vec b) { return a + b; });
}

/// acc [width] *= factor
inline void scale_row(float* acc, int64_t width, float factor) {
  for (int64_t d = 0; d < width; d += kLanes) store_floats(acc + d, load_floats(acc + d) * factor);
}

/// Merges the result over other keys into `into`. m and l of both must have room for whole vectors of rows.
inline void merge(Partial into, Partial from, int64_t rows, int64_t width) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    const Vec into_m = Vec::loadu(into.m + first), from_m = Vec::loadu(from.m + first);
    const Vec m = at::vec::maximum(into_m, from_m), a = accurate_exp2(into_m - m), b = accurate_exp2(from_m - m);
    m.store(into.m + first);
    (Vec::loadu(into.l + first) * a + Vec::loadu(from.l + first) * b).store(into.l + first);
    float into_factors[kLanes], from_factors[kLanes];
    a.store(into_factors);
    b.store(from_factors);
    for (int64_t r = first; r < std::min(rows, first + kLanes); ++r)
      for (int64_t d = r * width; d < (r + 1) * width; d += kLanes)
        store_floats(
            into.acc + d,
            load_floats(into.acc + d) * into_factors[r - first] + load_floats(from.acc + d) * from_factors[r - first]);
  }
}

}  // namespace tercet
