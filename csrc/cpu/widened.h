// Linear layers over quantised weights that are multiplied as floats. x is not quantised: every weight is widened to the
// float that it stands for. So a row's sums have the bits that the dequantised weight gives, and memory holds 4 or 8
// bits of each weight.
#pragma once

#include <vector>

#include "quantized.h"

namespace tercet {

/// Widens a group of a panel to floats [kGroup, kPanel].
template <typename Weights, typename P>
inline void widen_group(const uint8_t* group, float* to, P& prefetch) {
  using D = Dot<Weights>;
  constexpr int kZero = D::kHasMin ? 0 : 128;
  const auto* header = reinterpret_cast<const at::Half*>(group);
  const FloatPair scales = load_pair(header);
  FloatPair minima{Vec(0.f), Vec(0.f)};
  if constexpr (D::kHasMin) minima = load_pair(header + kPanel);
  const auto store = [](Ints numbers, Vec scale, Vec minimum, float* to) {
    Floats floats = __builtin_convertvector(numbers - kZero, Floats) * to_floats(scale);
    // The product is exact, so it does not matter whether the addition is fused with it.
    if constexpr (D::kHasMin) floats += to_floats(minimum);
    store_floats(to, floats);
  };
  const uint8_t* words = group + D::kHeaderBytes;
  for (int64_t word = 0; word < kGroup / D::kPerWord; ++word, words += D::kWordBytes) {
    prefetch();
    Bytes left, right;
    D::load(words, 0, left, right);
#pragma GCC unroll 4
    for (int shift = 0; shift < 32; shift += 8, to += kPanel) {
      store(reinterpret_cast<Ints>(left) >> shift & 255, scales.left, minima.left, to);
      store(reinterpret_cast<Ints>(right) >> shift & 255, scales.right, minima.right, to + kLanes);
    }
  }
}

/// A packed weight as in `QuantizedPacked`, for rows of float.
template <typename Weights>
struct WidenedPacked {
  using D = Dot<Weights>;
  static constexpr int64_t kGroupBytes = QuantizedPacked<Weights>::kGroupBytes;
  static constexpr int64_t kMaxRows = tercet::kMaxRows;

  const uint8_t* panels;
  const float* bias;
  int64_t k;

  /// A panel, and the same widened to floats [k, kPanel], or nullptr.
  struct Opened {
    const uint8_t* groups;
    const float* floats;
  };

  int64_t row_bytes() const { return k * sizeof(float); }
  int64_t panel_bytes() const { return k / kGroup * kGroupBytes; }
  int64_t words() const { return k / D::kPerWord; }

  /// If rows need several pieces, widens the panel once for all of them, into memory of this thread.
  Opened open(int64_t panel, int64_t rows) const {
    const uint8_t* groups = panels + panel * panel_bytes();
    if (rows <= kMaxRows) return {groups, nullptr};
    static thread_local std::vector<float> floats;
    if (static_cast<int64_t>(floats.size()) < k * kPanel) floats.resize(k * kPanel);
    NoPrefetch none;
    for (int64_t g = 0; g < k / kGroup; ++g)
      widen_group<Weights>(groups + g * kGroupBytes, floats.data() + g * kGroup * kPanel, none);
    return {groups, floats.data()};
  }

  template <int kRows>
  void multiply(const float* x, int64_t first, Opened panel, Floats (&sums)[kRows][2], Prefetch prefetch) const {
    using Float = Dot<float>;
    x += first * k;
    if (panel.floats) {
      multiply_panel<Float, kRows>(x, k, panel.floats, kPanel, k, sums);
      return;
    }
    alignas(64) float floats[kGroup * kPanel];
    for (int64_t g = 0; g < k / kGroup; ++g) {
      widen_group<Weights>(panel.groups + g * kGroupBytes, floats, prefetch);
      multiply_panel<Float, kRows>(x + g * kGroup, k, floats, kPanel, kGroup, sums);
    }
  }
};

}  // namespace tercet
