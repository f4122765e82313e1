// Linear layers over quantised weights for rows of bfloat16. x is not quantised: the float that a weight stands for is
// rounded to the nearest bfloat16. So a row's sums have the bits that the dequantised weight in bfloat16 gives, and
// memory holds 4 to 8 bits of each weight.
#pragma once

#include <array>

#include "panel_groups.h"

namespace tercet {

#ifdef __AVX512BF16__
/// A packed weight for rows of bfloat16.
template <typename Weights>
struct RoundedPacked : StoredPanels<Weights> {
  using D = Dot<Weights>;
  using Groups = PanelGroups<Weights>;
  using Product = Dot<at::BFloat16>;
  static constexpr int64_t kMaxRows = tercet::kMaxRows;
  static constexpr int64_t kWholeRows = kMaxRows;
  static constexpr int64_t kFewRows = 0;  // several panels at once would need more registers
  static constexpr bool kPrefetchesParts = false;
  static constexpr int64_t kPerWord = Product::kPerWord;

  using StoredPanels<Weights>::k;

  /// A panel. is_kept: the first piece of rows unpacks a chunk of it, and the others read this from the cache.
  struct Opened {
    Groups groups;
    bool is_kept;
    bool is_unpacked = false;
  };

  int64_t row_bytes() const { return k * sizeof(at::BFloat16); }

  Opened open(int64_t panel, Chunk, int64_t rows, Prefetch) const { return {this->groups(panel), rows > kMaxRows}; }

  template <int kRows>
  void multiply(
      const at::BFloat16* x, int64_t first, Chunk chunk, Opened& opened, RowSums* sums, Prefetch prefetch) const {
    x += first * k + chunk.begin;
    at::BFloat16* unpacked = chunk_of_numbers();
    if (opened.is_unpacked) {
      multiply_chunk<Product, kRows>(x, k, unpacked, chunk.size(), sums, chunk.begin == 0, prefetch);
    } else {
      unpack_and_multiply<kRows>(x, chunk, opened, unpacked, sums, prefetch);
      opened.is_unpacked = opened.is_kept;
    }
  }

 private:
  static_assert(D::kPerWord == 2 * kPerWord);

  /// Memory of this thread for a chunk of a panel, the same for every number of rows.
  static at::BFloat16* chunk_of_numbers() {
    alignas(64) static thread_local at::BFloat16 numbers[Tuning::kMaxChunk * kPanel];
    return numbers;
  }

  /// What turns the values of a group, or of one of its parts, into weights, of the left and of the right columns.
  struct Scales {
    Floats scales[2], minima[2] = {};

    Scales(const Groups& groups, int64_t group, int64_t part) {
      const FloatPair scale = groups.scales(group, part);
      scales[0] = to_floats(scale.left);
      scales[1] = to_floats(scale.right);
      if constexpr (!D::kHasMin) return;
      const FloatPair minimum = groups.minima(group, part);
      minima[0] = to_floats(minimum.left);
      minima[1] = to_floats(minimum.right);
    }
  };

  /// Calls f(first, at, scales) for each four numbers of a column of a group: those of word first + at.
  template <typename F>
  [[gnu::always_inline]] static void for_each_four(const Groups& groups, int64_t group, const F& f) {
    constexpr int64_t kFoursOfPart = kGroup / D::kPerWord / Groups::kScales;
    for (int64_t part = 0; part < Groups::kScales; ++part) {
      const Scales scales(groups, group, part);
      for (int64_t first = part * kFoursOfPart; first < (part + 1) * kFoursOfPart; first += kWordsAtOnce)
#pragma GCC unroll 2
        for (int64_t at = 0; at < kWordsAtOnce; ++at) f(first, at, scales);
    }
  }

  /// Unpacks a group while the one before is multiplied. Most instructions of unpacking run on other units than the
  /// products. A word that was unpacked just before its products would wait behind the products before it.
  template <int kRows>
  void unpack_and_multiply(
      const at::BFloat16* x,
      Chunk chunk,
      const Opened& opened,
      at::BFloat16* unpacked,
      RowSums* sums,
      Prefetch prefetch) const {
    const RowPointers<at::BFloat16, kRows> rows(x, k);
    Floats part[kRows][2];
    // As in compact.h. With a function for both, GCC keeps the sums in memory, and 8 rows take three times as long.
    if (chunk.begin == 0)
      unrolled<2 * kRows>([&](auto i) { part[i / 2][i % 2] = Floats{}; });
    else
      unrolled<2 * kRows>([&](auto i) { part[i / 2][i % 2] = sums[i / 2][i % 2]; });
    Prefetcher prefetcher = prefetch.start();
    const Groups packed = opened.groups;
    const int64_t first = chunk.begin / kGroup, groups = chunk.size() / kGroup;
    // Without other pieces of rows, two groups take turns in the L1 cache.
    const auto place = [=](int64_t g) { return unpacked + (opened.is_kept ? g : g & 1) * (kGroup * kPanel); };
    const auto multiply_group = [&](int64_t g, auto has_next) __attribute__((always_inline)) {
      const at::BFloat16* from = place(g);
      at::BFloat16* to = place(g + 1);
      const int64_t next = first + g + has_next;
      const uint8_t* next_words = packed.words(next);
      const auto multiply_four = [&](int64_t first_four, int64_t at_four, const Scales& scales)
                                     __attribute__((always_inline)) {
        prefetcher(2);
        if constexpr (has_next) unpack_four(next_words, first_four, at_four, scales, to);
#pragma GCC unroll 2
        for (int word = 0; word < 2; ++word) {
          const int64_t at = D::kPerWord * (first_four + at_four) + kPerWord * word;
          __m512i left, right;
          Product::load(from + at * kPanel, 0, left, right);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const auto numbers = Product::broadcast(rows.at(r, g * kGroup + at), 0);
            Product::add(part[r][0], numbers, left);
            Product::add(part[r][1], numbers, right);
          }
        }
      };
      for_each_four(packed, next, multiply_four);
    };
    const uint8_t* words = packed.words(first);
    for_each_four(packed, first, [&](int64_t first_four, int64_t at_four, const Scales& scales) {
      unpack_four(words, first_four, at_four, scales, place(0));
    });
    for (int64_t g = 0; g < groups - 1; ++g) multiply_group(g, std::true_type());
    multiply_group(groups - 1, std::false_type());
    add_part<false>(sums, part);
  }

  /// Unpacks four numbers of all columns, two words: `to` is the panel of the group as bfloat16.
  [[gnu::always_inline]] static void unpack_four(
      const uint8_t* words, int64_t first, int64_t at_first, const Scales& scales, at::BFloat16* to) {
    Bytes sides[2] = {};
    if constexpr (D::kBits > 4) D::load_word(words, first, at_first, sides[0], sides[1]);
    words += (first + at_first) * D::kWordBytes;
    to += D::kPerWord * (first + at_first) * kPanel;
#pragma GCC unroll 2
    for (int at = 0; at < D::kPerWord; at += kPerWord)
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side)
        _mm512_store_si512(
            to + (at + side) * kPanel,
            unpack_word(words, sides[side], at, side, scales.scales[side], scales.minima[side]));
  }

  /// Numbers `at` and at + 1 of a word of four, of the left or of the right columns. `bytes`: this word of this side, if
  /// a weight has more than 4 bits.
  [[gnu::always_inline]] static __m512i unpack_word(
      const uint8_t* words, Bytes bytes, int at, int side, Floats scales, Floats minima) {
    Floats numbers[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      if constexpr (D::kBits == 4)
        numbers[i] = values_of_4_bits(words, 8 * (at + i) + 4 * side);
      else if constexpr (D::kBits == 6)
        numbers[i] = values_of_6_bits(bytes, 8 * (at + i));
      else
        numbers[i] = values_of_8_bits(bytes, 8 * (at + i));
      numbers[i] *= scales;
      // Where the minimum is not zero, the product is exact, so it does not matter whether the addition is fused with it.
      if constexpr (D::kHasMin) numbers[i] += minima;
    }
    // First 16 numbers, then their 16 neighbours.
    const auto rounded = _mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
    alignas(64) static constexpr std::array<uint16_t, kPanel> kNeighbours = [] {
      std::array<uint16_t, kPanel> places{};
      for (int i = 0; i < kPanel; ++i) places[i] = i / 2 + i % 2 * kLanes;
      return places;
    }();
    return _mm512_permutexvar_epi16(_mm512_load_si512(kNeighbours.data()), (__m512i)rounded);
  }

  /// The bits `place` to place + 3 of each word.
  [[gnu::always_inline]] static Floats values_of_4_bits(const uint8_t* words, int place) {
    const __m512 values = std::is_same_v<Weights, E2m1Weights>
        ? _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
        : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // The lowest 4 bits of each word are an index. With a mask and a conversion, it would be an instruction more.
    return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), place), values);
  }

  /// The byte at bit `place` of each word, which is stored as weight + kOffset.
  [[gnu::always_inline]] static Floats values_of_6_bits(Bytes bytes, int place) {
    // The byte becomes the lowest bits of a float whose lowest bit stands for 1. This is faster than the conversion of
    // `values_of_8_bits`, but needs more registers. With 8 bits and 12 rows, it is slower.
    constexpr float kBase = 1 << 23;
    const __m512i base = _mm512_castps_si512(_mm512_set1_ps(kBase)), shifted = _mm512_srli_epi32((__m512i)bytes, place);
    const __m512i bits = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(255), base, 0xEA);  // shifted & 255 | base
    return (Floats)_mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(kBase + D::kOffset));
  }

  /// As `values_of_6_bits`, for weights of 8 bits.
  [[gnu::always_inline]] static Floats values_of_8_bits(Bytes bytes, int place) {
    static_assert(!kOddBytesAreSigned);
    const __m512i bits = (__m512i)(bytes - static_cast<uint8_t>(D::kOffset));
    return (Floats)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bits, 24 - place), 24));
  }
};
#endif

}  // namespace tercet
