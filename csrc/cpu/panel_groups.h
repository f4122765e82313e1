// Weights of fewer than 16 bits, as files store them: where the groups of a panel are, and their scales. README.md has a
// picture of the layouts.
#pragma once

#include "quantized.h"

namespace tercet {

/// Numbers along k that share the factors of their scales, in the K types of GGUF.
constexpr int64_t kSuperBlock = 256;

/// Words of a group that loops read in one turn.
constexpr int64_t kWordsAtOnce = 2;

/// Weights of 6 bits. Weight w is stored as w + 32. A pair of words has three vectors: the lower 4 bits of both
/// words, each laid out as a word of `Int4Weights`, then the upper 2 bits. A byte of the latter has the bits of
/// four weights: of the first word, left and right column, and of the second word.
struct SixBits {
  static constexpr int kBits = 6;
  static constexpr int64_t kPerWord = IntegerDot::kPerWord, kWordBytes = 3 * kPanel;
  static constexpr int kOffset = 32;

  /// Word `at` of the pair that begins with word `first`.
  static void load_word(const uint8_t* words, int64_t first, int64_t at, Bytes& left, Bytes& right) {
    const uint8_t* pair = words + first * kWordBytes;
    Bytes low, high;
    std::memcpy(&low, pair + at * sizeof(low), sizeof(low));
    std::memcpy(&high, pair + 2 * sizeof(low), sizeof(high));
    // As 16 bits, because processors do not shift bytes. The masks remove what comes from a neighbour.
    const Shorts upper = reinterpret_cast<Shorts>(high) >> static_cast<int16_t>(4 * at);
    left = (low & 15) | reinterpret_cast<Bytes>((upper & 0x0303) << 4);
    right = (low >> 4) | reinterpret_cast<Bytes>((upper & 0x0c0c) << 2);
  }
  /// The weights that are byte `at` of each word.
  static Ints weights(Bytes words, int at) { return (reinterpret_cast<Ints>(words) >> 8 * at & 255) - kOffset; }
  /// The same for one column of word `word` of a group.
  static int weight(const uint8_t* words, int64_t word, int64_t column, int64_t at) {
    const uint8_t* pair = words + word / 2 * (2 * kWordBytes);
    const int64_t byte = column % kLanes * kPerWord + at, side = column / kLanes;
    const int low = pair[word % 2 * sizeof(Bytes) + byte] >> 4 * side & 15;
    return (low | (pair[2 * sizeof(Bytes) + byte] >> (4 * (word % 2) + 2 * side) & 3) << 4) - kOffset;
  }
};

/// Weights of 8 bits, with a scale and a minimum for each half of a group, which are floats. All types that
/// ggml_types.py converts have this form. A group has the words of `Int8Weights`. Its header has the scales of the
/// first half, those of the other half, then the minima in the same order.
struct MixedWeights;

template <>
struct Dot<MixedWeights> : Dot<Int8Weights>, GroupHeader<float, 4> {
  using GroupHeader<float, 4>::Header, GroupHeader<float, 4>::kHeaderBytes;
  static constexpr bool kHasMin = true;
};

/// Weights as in GGUF's Q4_K: 4 bits, with a scale and a minimum for each group.
struct Q4KWeights;
/// Weights as in GGUF's Q6_K and Q3_K: 6 bits, with a scale for each half of a group.
struct Q6KWeights;
/// Weights of any K type of GGUF: 6 bits, with a scale and a minimum for each half of a group.
struct MixedKWeights;

template <>
struct Dot<Q4KWeights> : Dot<Int4Weights> {};

template <>
struct Dot<Q6KWeights> : SixBits {
  static constexpr bool kHasMin = false;
};

template <>
struct Dot<MixedKWeights> : SixBits {
  static constexpr bool kHasMin = true;
};

/// Weights as in MXFP4, the format of GPT-OSS's experts: numbers of 4 bits (e2m1), with a scale for each group. The scales
/// are half of the file's, because twice a number is an integer. A group of a panel: scales, float16 [kPanel], then the
/// words of `Int4Weights`.
struct E2m1Weights;

template <>
struct Dot<E2m1Weights> : Dot<Int4Weights>, GroupHeader<at::Half, 1> {
  using GroupHeader<at::Half, 1>::Header, GroupHeader<at::Half, 1>::kHeaderBytes;
  static constexpr bool kHasMin = false;
  /// Twice the numbers.
  static constexpr int kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

  static Ints weights(Bytes words, int at) {
    const Ints codes = Dot<Int4Weights>::weights(words, at);
#ifdef __AVX512F__
    return (Ints)_mm512_permutexvar_epi32((__m512i)codes, _mm512_loadu_si512(kDoubled));
#else
    // Two bits of exponent and one of mantissa. Without an exponent, the mantissa has no leading bit.
    const Ints magnitudes = codes & 7, signs = -(codes >> 3);
    const Ints doubled = ((2 + (magnitudes & 1)) << (magnitudes >> 1) >> 1) + (magnitudes == 0);
    return (doubled ^ signs) - signs;
#endif
  }
  static int weight(const uint8_t* words, int64_t word, int64_t column, int64_t at) {
    return kDoubled[Dot<Int4Weights>::weight(words, word, column, at)];
  }
};

/// The groups of a panel. Each has a header of scales, then of minima, and its words.
///
/// `FactoredGroups` has the same public members. `part`: 0, or with two scales 1 for the other half of a group.
template <typename Weights>
class PanelGroups {
  using D = Dot<Weights>;
  using Header = typename D::Header;

 public:
  static constexpr int64_t kScales = D::kHeaderBytes / (kPanel * static_cast<int64_t>(sizeof(Header))) / (1 + D::kHasMin);
  /// Bytes of a group, with all columns of the panel.
  static constexpr int64_t kBytes = kBytesOfGroup<D>;
  /// k is a multiple of this.
  static constexpr int64_t kMultiple = kGroup;

  PanelGroups(const uint8_t* panel, int64_t /*k*/) : groups_(panel) {}

  const uint8_t* words(int64_t group) const { return groups_ + group * kBytes + D::kHeaderBytes; }
  FloatPair scales(int64_t group, int64_t part) const { return load_pair(header(group) + part * kPanel); }
  FloatPair minima(int64_t group, int64_t part) const { return load_pair(header(group) + (kScales + part) * kPanel); }
  /// The same for one column.
  float scale(int64_t group, int64_t part, int64_t column) const { return header(group)[part * kPanel + column]; }
  float minimum(int64_t group, int64_t part, int64_t column) const {
    return header(group)[(kScales + part) * kPanel + column];
  }

 private:
  const Header* header(int64_t group) const { return reinterpret_cast<const Header*>(groups_ + group * kBytes); }

  const uint8_t* groups_;
};

/// The same for scales and minima that are whole numbers of 8 bits times a float16 factor. The groups of a super-block
/// share one factor for scales and one for minima. The factors of a panel precede its groups.
template <typename Weights, int64_t kScalesOfGroup>
class FactoredGroups {
  using D = Dot<Weights>;
  static constexpr int64_t kKinds = D::kHasMin ? 2 : 1;
  static constexpr int64_t kFactorBytes = kKinds * kPanel * static_cast<int64_t>(sizeof(at::Half));
  static constexpr int64_t kHeaderBytes = kKinds * kScalesOfGroup * kPanel;
  static constexpr int64_t kGroupBytes = kHeaderBytes + kGroup / D::kPerWord * D::kWordBytes;
  static constexpr int64_t kGroupsOfBlock = kSuperBlock / kGroup;

 public:
  static constexpr int64_t kScales = kScalesOfGroup;
  /// Bytes of a group, with its share of the factors.
  static constexpr int64_t kBytes = kGroupBytes + kFactorBytes / kGroupsOfBlock;
  static constexpr int64_t kMultiple = kSuperBlock;

  FactoredGroups(const uint8_t* panel, int64_t k)
      : factors_(reinterpret_cast<const at::Half*>(panel)), groups_(panel + k / kSuperBlock * kFactorBytes) {}

  const uint8_t* words(int64_t group) const { return header(group) + kHeaderBytes; }
  FloatPair scales(int64_t group, int64_t part) const { return numbers(group, part, 0); }
  FloatPair minima(int64_t group, int64_t part) const { return numbers(group, part, 1); }
  float scale(int64_t group, int64_t part, int64_t column) const { return number(group, part, 0, column); }
  float minimum(int64_t group, int64_t part, int64_t column) const { return number(group, part, 1, column); }

 private:
  const uint8_t* header(int64_t group) const { return groups_ + group * kGroupBytes; }
  /// kind: 0 for scales, 1 for minima
  const at::Half* factors(int64_t group, int64_t kind) const {
    return factors_ + (group / kGroupsOfBlock * kKinds + kind) * kPanel;
  }
  const int8_t* integers(int64_t group, int64_t part, int64_t kind) const {
    return reinterpret_cast<const int8_t*>(header(group)) + (kind * kScales + part) * kPanel;
  }
  FloatPair numbers(int64_t group, int64_t part, int64_t kind) const {
    const int8_t* from = integers(group, part, kind);
    return FloatPair{to_vec(widened(from)), to_vec(widened(from + kLanes))} * load_pair(factors(group, kind));
  }
  float number(int64_t group, int64_t part, int64_t kind, int64_t column) const {
    return integers(group, part, kind)[column] * static_cast<float>(factors(group, kind)[column]);
  }
  static Floats widened(const int8_t* from) {
#if defined(__AVX512F__)  // GCC converts from 8 to 32 bits one number at a time
    const auto ints = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
    const auto ints = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    typedef int8_t Narrow __attribute__((vector_size(kLanes)));
    Narrow narrow;
    std::memcpy(&narrow, from, sizeof(narrow));
    const auto ints = __builtin_convertvector(narrow, Ints);
#endif
    return __builtin_convertvector(ints, Floats);
  }

  const at::Half* factors_;
  const uint8_t* groups_;
};

template <>
class PanelGroups<Q4KWeights> : public FactoredGroups<Q4KWeights, 1> {
  using FactoredGroups::FactoredGroups;
};

template <>
class PanelGroups<Q6KWeights> : public FactoredGroups<Q6KWeights, 2> {
  using FactoredGroups::FactoredGroups;
};

template <>
class PanelGroups<MixedKWeights> : public FactoredGroups<MixedKWeights, 2> {
  using FactoredGroups::FactoredGroups;
};

/// A packed weight whose numbers are converted.
template <typename Weights>
struct StoredPanels : PanelsOfGroups<PanelGroups<Weights>::kBytes> {
  using Groups = PanelGroups<Weights>;
  static constexpr int64_t kMultiple = Groups::kMultiple;

  Groups groups(int64_t panel) const { return {this->panels + panel * this->panel_distance(), this->k}; }
};

/// As `unpack_rows` of linear.h, for weights of fewer bits.
template <typename Weights, typename T>
void unpack_rows(const int64_t* ids, int64_t count, const StoredPanels<Weights>& weight, T* out) {
  using D = Dot<Weights>;
  using Groups = PanelGroups<Weights>;
  constexpr int64_t kWordsOfPart = kGroup / D::kPerWord / Groups::kScales;
  for_each_row_block(count, weight.k, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const int64_t column = ids[i] % kPanel;
      const Groups groups = weight.groups(ids[i] / kPanel);
      T* to = out + i * weight.k;
      for (int64_t group = 0; group < weight.k / kGroup; ++group) {
        const uint8_t* words = groups.words(group);
        for (int64_t part = 0; part < Groups::kScales; ++part) {
          const float scale = groups.scale(group, part, column);
          for (int64_t word = part * kWordsOfPart; word < (part + 1) * kWordsOfPart; ++word)
            for (int64_t at = 0; at < D::kPerWord; ++at) {
              float number = D::weight(words, word, column, at) * scale;
              // The product is exact, as in rounded.h.
              if constexpr (D::kHasMin) number += groups.minimum(group, part, column);
              *to++ = static_cast<T>(number);
            }
        }
      }
    }
  });
}

}  // namespace tercet
