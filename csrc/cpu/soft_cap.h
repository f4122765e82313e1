// Soft caps of scores and logits: cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118).
#pragma once

#include <c10/util/Exception.h>

#include <optional>

#include "norm.h"

namespace tercet {

/// The cap of logits. Every number has the same bits at each place, so that the largest logit and the logits agree.
struct SoftCap {
  float cap;

  Vec operator()(Vec x) const { return Vec(cap) * accurate_tanh(x * Vec(1.f / cap)); }
};

/// The cap that an operation was given, if any.
inline std::optional<SoftCap> cap_of(std::optional<double> cap) {
  if (!cap) return {};
  TORCH_CHECK(*cap > 0, "a soft cap must be positive, got ", *cap);
  return SoftCap{static_cast<float>(*cap)};
}

/// Caps logits [rows, n] in place.
inline void cap_logits(float* logits, SoftCap cap, int64_t rows, int64_t n) {
  for_each_row_block(rows, n, [&](int64_t first, int64_t end) {
    const int64_t stop = end * n;
    for (int64_t i = first * n; i < stop; i += kPanel) {
      const FloatPair x = load_pair(logits + i, stop - i);
      store_pair(logits + i, FloatPair{cap(x.left), cap(x.right)}, stop - i);
    }
  });
}

/// scores [rows, stride] = tanh(scores * scale), for the first `count` of each row, a multiple of kLanes
inline void cap_scores(float* scores, float scale, int64_t rows, int64_t count, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row)
    for (float* x = scores + row * stride, *end = x + count; x < end; x += kLanes)
      accurate_tanh(Vec::loadu(x) * Vec(scale)).store(x);
}

}  // namespace tercet
