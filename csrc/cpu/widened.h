// Linear layers over quantised weights that are multiplied as floats. x is not quantised: every weight is widened to the
// float that it stands for. So a row's sums have the bits that the dequantised weight gives, and memory holds 4 to 8
// bits of each weight.
#pragma once

#include "panel_groups.h"

namespace tercet {

/// Widens a group of a panel. Calls f(i, left, right) with the floats of all columns for number i of the group.
template <typename Weights, typename F>
inline void widen_group(const PanelGroups<Weights>& groups, int64_t group, Prefetcher& prefetcher, const F& f) {
  using D = Dot<Weights>;
  constexpr int64_t kScales = PanelGroups<Weights>::kScales, kWordsOfPart = kGroup / D::kPerWord / kScales;
  const auto widen = [](Ints numbers, Vec scale, Vec minimum) {
    Floats floats = __builtin_convertvector(numbers, Floats) * to_floats(scale);
    // Where the minimum is not zero, the product is exact, so it does not matter whether the addition is fused with it.
    if constexpr (D::kHasMin) floats += to_floats(minimum);
    return floats;
  };
  const uint8_t* words = groups.words(group);
  Prefetcher prefetch_words = prefetcher;  // in registers
  for (int64_t part = 0; part < kScales; ++part) {
    const FloatPair scales = groups.scales(group, part);
    FloatPair minima{Vec(0.f), Vec(0.f)};
    if constexpr (D::kHasMin) minima = groups.minima(group, part);
    for (int64_t first = part * kWordsOfPart; first < (part + 1) * kWordsOfPart; first += kWordsAtOnce) {
      prefetch_words(kWordsAtOnce);
#pragma GCC unroll 2
      for (int64_t word = 0; word < kWordsAtOnce; ++word) {
        Bytes left, right;
        D::load_word(words, first, word, left, right);
#pragma GCC unroll 4
        for (int at = 0; at < D::kPerWord; ++at)
          f(D::kPerWord * (first + word) + at,
            widen(D::weights(left, at), scales.left, minima.left),
            widen(D::weights(right, at), scales.right, minima.right));
      }
    }
  }
  prefetcher = prefetch_words;
}

/// A packed weight for rows of float.
template <typename Weights>
struct WidenedPacked : StoredPanels<Weights> {
  using D = Dot<Weights>;
  using Groups = PanelGroups<Weights>;
  static constexpr int64_t kMaxRows = tercet::kMaxRows;
  static constexpr int64_t kWholeRows = 2 * kMaxRows / 3;
  static constexpr int64_t kFewRows = 0;  // the sums of several panels do not fit into the registers
  static constexpr bool kPrefetchesParts = false;

  using StoredPanels<Weights>::k;

  /// A panel, and a chunk of it widened to float, or nullptr.
  struct Opened {
    Groups groups;
    const float* floats;
  };

  int64_t row_bytes() const { return k * sizeof(float); }
  static constexpr int64_t kPerWord = D::kPerWord;

  Opened open(int64_t panel, Chunk chunk, int64_t rows, Prefetch prefetch) const {
    const Groups groups = this->groups(panel);
    if (rows <= kWholeRows) return {groups, nullptr};
    float* floats = chunk_of_floats();
    Prefetcher prefetcher = prefetch.start();
    for (int64_t g = 0; g < chunk.size() / kGroup; ++g) {
      float* to = floats + g * kGroup * kPanel;
      widen_group(groups, chunk.begin / kGroup + g, prefetcher, [=](int64_t i, Floats left, Floats right) {
        store_floats(to + i * kPanel, left);
        store_floats(to + i * kPanel + kLanes, right);
      });
    }
    return {groups, floats};
  }

  template <int kRows>
  void multiply(const float* x, int64_t first, Chunk chunk, Opened opened, RowSums* sums, Prefetch prefetch) const {
    x += first * k + chunk.begin;
    if (opened.floats) {
      multiply_chunk<Dot<float>, kRows>(x, k, opened.floats, chunk.size(), sums, chunk.begin == 0, NoPrefetch());
      return;
    }
    if (chunk.begin == 0) begin_sums<kRows>(sums);
    Prefetcher prefetcher = prefetch.start();
    // The parts are those of `multiply_chunk`.
    constexpr int64_t kGroups = kProductsOfSum / kGroup;
    static_assert(kGroups * kGroup == kProductsOfSum);
    for (int64_t first_group = chunk.begin / kGroup; first_group < chunk.end / kGroup; first_group += kGroups) {
      Floats part[kRows][2] = {};
      const int64_t end = std::min(first_group + kGroups, chunk.end / kGroup);
      for (int64_t g = first_group; g < end; ++g, x += kGroup)
        widen_group(opened.groups, g, prefetcher, [&](int64_t i, Floats left, Floats right) {
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const Floats number = broadcast_float(x[r * k + i]);
            part[r][0] += number * left;
            part[r][1] += number * right;
          }
        });
      add_part<true>(sums, part);
    }
  }
};

}  // namespace tercet
