// Linear layers over weights of 8 or 4 bits. README.md has a picture of the layout.
//
// As in ggml's Q8_0 and Q4_1, each group of 32 weights along k has its own scale; 4-bit groups have a minimum too. Rows
// of x are quantised to 8 bits, also in groups of 32. The products within a group are summed as integers, exactly. The
// groups are summed as floats, one after the other.
#pragma once

#include <limits>

#include "linear.h"
#include "norm.h"
#include "short_products.h"

namespace tercet {

/// Weights along k that share a scale. In some forms, each half of them has a scale of its own.
constexpr int64_t kGroup = 32;

typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef int16_t Shorts __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint8_t Bytes __attribute__((vector_size(kLanes * sizeof(int32_t))));

/// sums[i] += the products of bytes 4 * i to 4 * i + 3 of `panel` (unsigned) and `row` (signed).
inline void add_products(Ints& sums, Ints row, Bytes panel) {
#if defined(__AVX512VNNI__)
  sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)panel, (__m512i)row);
#elif defined(__AVXVNNI__)
  sums = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)panel, (__m256i)row);
#elif defined(__AVX512BW__)
  const auto even = _mm512_and_si512((__m512i)panel, _mm512_set1_epi16(255));
  const auto odd = _mm512_srli_epi16((__m512i)panel, 8);
  const auto row_even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)row, 8), 8);
  const auto row_odd = _mm512_srai_epi16((__m512i)row, 8);
  sums += (Ints)_mm512_madd_epi16(even, row_even) + (Ints)_mm512_madd_epi16(odd, row_odd);
#else
  for (int shift = 0; shift < 32; shift += 8) sums += ((Ints)panel >> shift & 255) * (row << (24 - shift) >> 24);
#endif
}

/// The part of `Dot` that both kinds of weights share. A word is four numbers. `Sums` are of one group.
struct IntegerDot {
  using Row = int8_t;
  using Panel = uint8_t;
  using Words = Bytes;
  using RowWord = Ints;
  using Sums = Ints;
  static constexpr int64_t kPerWord = 4;
  static constexpr int kParts = 1;
  static RowWord broadcast(const int8_t* word, int) {
    int32_t bits;
    std::memcpy(&bits, word, sizeof(bits));
    return Ints{} + bits;
  }
  static void add(Ints& sums, RowWord row, Words panel) { add_products(sums, row, panel); }
  static Ints total(Ints sums) { return sums; }
};

/// What precedes the words of a group: kNumbers numbers of each column.
template <typename Number, int64_t kNumbers>
struct GroupHeader {
  using Header = Number;
  static constexpr int64_t kHeaderBytes = kNumbers * kPanel * static_cast<int64_t>(sizeof(Number));
};

/// Weights of 8 bits. Weight w is stored as the byte w + 128, or, at the odd places of builds with
/// TERCET_ROWS_OF_SHORTS, as w. A group of a panel: scales, float16 [kPanel]; then bytes [kGroup / 4, kPanel, 4].
struct Int8Weights;

#ifdef TERCET_ROWS_OF_SHORTS
constexpr bool kOddBytesAreSigned = true;
#else
constexpr bool kOddBytesAreSigned = false;
#endif

template <>
struct Dot<Int8Weights> : IntegerDot, GroupHeader<at::Half, 1> {
  static constexpr int kBits = 8;
  static constexpr int kOffset = 128;
  static constexpr bool kHasMin = false;
  static constexpr int64_t kWordBytes = 4 * kPanel;
  static void load(const uint8_t* words, int, Bytes& left, Bytes& right) {
    std::memcpy(&left, words, sizeof(left));
    std::memcpy(&right, words + sizeof(left), sizeof(right));
  }
  /// Word first + at of a group. `first` is even, and `at` is 0 or 1.
  static void load_word(const uint8_t* words, int64_t first, int64_t at, Bytes& left, Bytes& right) {
    load(words + (first + at) * kWordBytes, 0, left, right);
  }
  /// The weights that are byte `at` of each word.
  static Ints weights(Bytes words, int at) {
    const auto ints = reinterpret_cast<Ints>(words);
    return kOddBytesAreSigned && at % 2 ? ints << (24 - 8 * at) >> 24 : (ints >> 8 * at & 255) - 128;
  }
  /// The same for word `word` of a group, and one column.
  static int weight(const uint8_t* words, int64_t word, int64_t column, int64_t at) {
    const uint8_t byte = words[word * kWordBytes + column * kPerWord + at];
    return kOddBytesAreSigned && at % 2 ? static_cast<int8_t>(byte) : byte - 128;
  }
#ifdef TERCET_ROWS_OF_SHORTS
  using Row = int16_t;
#endif
};

/// Weights of 4 bits. Weight (minimum + scale * q) is stored as q, half a byte. A group of a panel: scales, then
/// minima, float16 [kPanel] each; then bytes [kGroup / 4, kLanes, 4]. The lower halves of the bytes are the first
/// kLanes columns, the upper halves the other kLanes.
struct Int4Weights;

template <>
struct Dot<Int4Weights> : IntegerDot, GroupHeader<at::Half, 2> {
  static constexpr int kBits = 4;
  static constexpr bool kHasMin = true;
  static constexpr int64_t kWordBytes = 2 * kPanel;
  static void load(const uint8_t* words, int, Bytes& left, Bytes& right) {
    Bytes both;
    std::memcpy(&both, words, sizeof(both));
    left = both & 15;
    right = both >> 4;
  }
  static void load_word(const uint8_t* words, int64_t first, int64_t at, Bytes& left, Bytes& right) {
    load(words + (first + at) * kWordBytes, 0, left, right);
  }
  static Ints weights(Bytes words, int at) { return reinterpret_cast<Ints>(words) >> 8 * at & 255; }
  static int weight(const uint8_t* words, int64_t word, int64_t column, int64_t at) {
    return words[word * kWordBytes + column % kLanes * kPerWord + at] >> (column < kLanes ? 0 : 4) & 15;
  }
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  // 16 bits hold the sums of a group: 8 words of pairs of products, each at most 15 * 127.
  using Sums = Shorts;
  static_assert(kGroup / kPerWord * 2 * 15 * 127 <= std::numeric_limits<int16_t>::max());
  static void add(Shorts& sums, Ints row, Bytes panel) {
#ifdef __AVX512BW__
    sums += (Shorts)_mm512_maddubs_epi16((__m512i)panel, (__m512i)row);
#else
    sums += (Shorts)_mm256_maddubs_epi16((__m256i)panel, (__m256i)row);
#endif
  }
  static Ints total(Shorts sums) {
#ifdef __AVX512BW__
    return (Ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#else
    return (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
  }
#endif
};

/// What belongs to a group of a quantised row.
struct RowGroup {
  float scale;
  float sum;       // the sum of scale * values; a 4-bit group's minimum is multiplied with it
  int32_t offset;  // -128 * the sum of the values that multiply 8-bit weights stored as w + 128: corrects these products
};

/// Rows of x, quantised: x is about scale * values, with a scale for each group. The values have 8 bits, in memory also 16.
template <typename Value>
struct QuantizedRows {
  uint8_t* rows;
  int64_t k;

  static int64_t row_bytes(int64_t k) { return k * sizeof(Value) + k / kGroup * sizeof(RowGroup); }
  Value* values(int64_t row) const { return reinterpret_cast<Value*>(rows + row * row_bytes(k)); }
  RowGroup* groups(int64_t row) const { return reinterpret_cast<RowGroup*>(values(row) + k); }
};

/// Stores whole numbers of at most 127 in magnitude.
inline void store_values(int8_t* to, Vec x) {
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  const Narrow narrow = __builtin_convertvector(__builtin_convertvector(to_floats(x), Ints), Narrow);
  std::memcpy(to, &narrow, sizeof(narrow));
}

/// Rounds `count` neighbouring groups of x to the nearest multiples of a 127th of their largest magnitude. At most kLanes
/// groups, because a reduction of a whole vector takes as long as that of kLanes vectors to one number each.
template <typename T, typename Value>
inline void quantize_groups(const T* x, int64_t count, Value* values, RowGroup* groups) {
  constexpr int64_t kPairs = kGroup / kPanel;
  const auto larger = [](Vec a, Vec b) { return at::vec::clamp_min(a, b); };
  const auto add = [](Vec a, Vec b) { return a + b; };
  Floats parts[kLanes];
  for (int64_t i = count; i < kLanes; ++i) parts[i] = Floats{};
  for (int64_t i = 0; i < count; ++i) {
    Vec largest(0.f);
    for (int64_t p = 0; p < kPairs; ++p) {
      const FloatPair pair = load_pair(x + i * kGroup + p * kPanel);
      largest = larger(larger(largest, pair.left.abs()), pair.right.abs());
    }
    parts[i] = to_floats(largest);
  }
  const Vec largest = reduce_each(parts, larger);
  float inverses[kLanes];
  Vec::blendv(Vec(0.f), Vec(127.f) / largest, largest > Vec(1e-30f)).store(inverses);
  // The sums of the values that multiply weights stored as w + 128. With rows of bytes, these are all values.
  constexpr bool kSomeHaveOffsets = kOddBytesAreSigned && std::is_same_v<Value, int16_t>;
  [[maybe_unused]] Floats offset_parts[kSomeHaveOffsets ? kLanes : 1] = {};
  for (int64_t i = 0; i < count; ++i) {
    const Vec inverse(inverses[i]);
    Vec sum(0.f);
    for (int64_t p = 0; p < kPairs; ++p) {
      const FloatPair pair = load_pair(x + i * kGroup + p * kPanel);
      const FloatPair rounded{(pair.left * inverse).round(), (pair.right * inverse).round()};
      store_values(values + i * kGroup + p * kPanel, rounded.left);
      store_values(values + i * kGroup + p * kPanel + kLanes, rounded.right);
      sum = sum + (rounded.left + rounded.right);
    }
    parts[i] = to_floats(sum);
    if constexpr (kSomeHaveOffsets) offset_parts[i] = to_floats(Vec::blend<0b01010101>(Vec(0.f), sum));
  }
  for (int64_t i = count; i < kLanes; ++i) parts[i] = Floats{};  // the other reduction overwrote them
  const Vec sum = reduce_each(parts, add), is_number = sum == sum;  // NaN if x has a NaN or an infinity
  Vec offset_sum = sum;
  if constexpr (kSomeHaveOffsets) offset_sum = reduce_each(offset_parts, add);
  const Vec scale = Vec::blendv(sum, largest / Vec(127.f), is_number);
  const Ints offset = -128 * __builtin_convertvector(to_floats(Vec::blendv(Vec(0.f), offset_sum, is_number)), Ints);
  float scales[kLanes], sums[kLanes];
  int32_t offsets[kLanes];
  scale.store(scales);
  (scale * sum).store(sums);
  std::memcpy(offsets, &offset, sizeof(offsets));
  for (int64_t i = 0; i < count; ++i) {
    groups[i] = {scales[i], sums[i], offsets[i]};
    asm volatile("");  // else GCC vectorises this loop, with scatters, which take longer
  }
}

/// x: [rows, k], k a multiple of kGroup.
template <typename T, typename Value>
void quantize_rows(const T* x, int64_t rows, const QuantizedRows<Value>& to) {
  const int64_t groups = to.k / kGroup, parts = ceil_div(groups, kLanes);
  for_each_row_block(rows, to.k, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = groups * part / parts, count = groups * (part + 1) / parts - begin;
        quantize_groups(x + row * to.k + begin * kGroup, count, to.values(row) + begin * kGroup, to.groups(row) + begin);
      }
    }
  });
}

/// Bytes of a group of a panel: a header and words.
template <typename D>
constexpr int64_t kBytesOfGroup = D::kHeaderBytes + kGroup / D::kPerWord * D::kWordBytes;

/// The panels of a packed weight [n, k]: uint8 [panels, k / kGroup, kBytes].
template <int64_t kBytes>
struct PanelsOfGroups {
  static constexpr int64_t kGroupBytes = kBytes;

  const uint8_t* panels;
  /// [panels, kPanel] or nullptr
  const float* bias;
  int64_t k;

  static int64_t panel_bytes(int64_t numbers) { return numbers / kGroup * kBytes; }
  int64_t panel_distance() const { return panel_bytes(k); }
};

/// A packed weight for quantised rows, with groups as `Dot<Weights>` says.
template <typename Weights>
struct QuantizedPacked : PanelsOfGroups<kBytesOfGroup<Dot<Weights>>> {
  using D = Dot<Weights>;
  using Rows = QuantizedRows<typename D::Row>;
  using Panels = PanelsOfGroups<kBytesOfGroup<D>>;
  using Panels::k, Panels::kGroupBytes, Panels::panel_bytes, Panels::panels;
  static constexpr int64_t kMultiple = kGroup;
  /// The sums of integers must fit into the registers. Those of floats, used once a group, may be in memory.
  static constexpr int64_t kMaxRows = 6;
  static constexpr int64_t kWholeRows = kMaxRows;
  static constexpr int64_t kFewRows = 0;  // the sums of several panels do not fit into the registers
  static constexpr bool kPrefetchesParts = false;

  int64_t row_bytes() const { return Rows::row_bytes(k); }
  static constexpr int64_t kPerWord = D::kPerWord;

  const uint8_t* open(int64_t panel, Chunk chunk, int64_t, Prefetch) const {
    return panels + panel_bytes(panel * k + chunk.begin);
  }

  template <int kRows>
  void multiply(
      const Rows& x, int64_t first, Chunk chunk, const uint8_t* weights, RowSums* sums, Prefetch prefetch) const {
    if (chunk.begin == 0) begin_sums<kRows>(sums);
    const int64_t groups = chunk.size() / kGroup, stride = row_bytes();
    const auto* values = x.values(first) + chunk.begin;
    const RowGroup* row_groups = x.groups(first) + chunk.begin / kGroup;
#ifdef TERCET_ROWS_OF_SHORTS
    if constexpr (std::is_same_v<typename D::Row, int16_t>) {
      Prefetcher prefetcher = prefetch.start();
      for (int64_t g = 0; g < groups; ++g, weights += kGroupBytes) {
        prefetcher(kGroup / kPerWord);
        multiply_shorts<kRows>(values + g * kGroup, row_groups + g, stride, weights, sums);
      }
    } else
#endif
      multiply_bytes<kRows>(values, row_groups, stride, groups, weights, sums, prefetch);
  }

 private:
  /// The same with rows of bytes. values, first_groups: those of the first row. The next row is `stride` bytes later.
  template <int kRows>
  void multiply_bytes(
      const int8_t* values,
      const RowGroup* first_groups,
      int64_t stride,
      int64_t groups,
      const uint8_t* weights,
      RowSums* row_sums,
      Prefetch prefetch) const {
    Prefetcher prefetcher = prefetch.start();
    Floats sums[kRows][2];
    unrolled<2 * kRows>([&](auto i) { sums[i / 2][i % 2] = row_sums[i / 2][i % 2]; });
    // One address and a stride: the addresses of all rows would not fit into the registers.
    const char* row_group = reinterpret_cast<const char*>(first_groups);
    const auto group_of = [&](int64_t r) -> const RowGroup& {
      return *reinterpret_cast<const RowGroup*>(row_group + r * stride);
    };
    for (int64_t g = 0; g < groups; ++g, weights += kGroupBytes, values += kGroup, row_group += sizeof(RowGroup)) {
      prefetcher(kGroup / kPerWord);  // once a group, so that GCC unrolls the words
      const auto* header = reinterpret_cast<const at::Half*>(weights);
      typename D::Sums products[kRows][2] = {};
      if constexpr (D::kHasMin) {
        const FloatPair minima = load_pair(header + kPanel);
        unrolled<kRows>([&](auto r) {
          sums[r][0] += to_floats(minima.left) * group_of(r).sum;
          sums[r][1] += to_floats(minima.right) * group_of(r).sum;
        });
      } else {
        unrolled<kRows>([&](auto r) { products[r][0] = products[r][1] = Ints{} + group_of(r).offset; });
      }
      multiply_panel<D, kRows>(values, stride, weights + D::kHeaderBytes, D::kWordBytes, kGroup / kPerWord, products);
      const FloatPair scales = load_pair(header);
      // The scale of the row first: with the other order, Zen 5 is further from the limit that README.md names.
      const auto add_scaled = [&](int64_t r, int side, Vec scale) __attribute__((always_inline)) {
        const auto total = __builtin_convertvector(D::total(products[r][side]), Floats);
        sums[r][side] += to_floats(scale) * (group_of(r).scale * total);
      };
      unrolled<kRows>([&](auto r) {
        add_scaled(r, 0, scales.left);
        add_scaled(r, 1, scales.right);
      });
    }
    // For a loop, GCC copies the sums on the stack first.
    unrolled<2 * kRows>([&](auto i) { row_sums[i / 2][i % 2] = sums[i / 2][i % 2]; });
  }
};

}  // namespace tercet
