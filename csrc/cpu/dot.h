// Products of a few rows with a panel, one 32-bit word at a time. README.md explains words and panels.
//
// `Dot<T>` describes a word of type T: how many numbers it holds, and how a vector of sums adds the products of one
// word of a row with a vector of words of a panel, in one part or several. `multiply_panel` is the loop around it. Every
// matrix product of this folder is this loop: linear layers multiply panels of weights, attention multiplies panels of
// keys and values.
#pragma once

#include "tuning.h"
#include "vectors.h"

namespace tercet {

/// Rows that share one pass over a panel. Their sums fill the registers, beside two vectors of the panel and one of the
/// row.
constexpr int64_t kMaxRows = kLanes == 16 ? 12 : 6;

/// `T` is the type of the panel, `X` that of the rows.
template <typename T, typename X = T>
struct Dot;

template <>
struct Dot<float> {
  using Row = float;
  using Panel = float;
  using Words = Floats;
  using Sums = Floats;
  static constexpr int64_t kPerWord = 1;
  static constexpr int kParts = 1;
  /// The words of kLanes columns.
  static Words load_side(const float* words, int) { return load_floats(words); }
  static void load(const float* words, int, Words& left, Words& right) {
    left = load_floats(words);
    right = load_floats(words + kLanes);
  }
  static Words broadcast(const float* word, int) { return broadcast_float(*word); }
  static void add(Floats& sums, Words row, Words panel) { sums += row * panel; }
};

/// A panel of bfloat16 whose numbers are widened to float in registers: the first of each word by a shift, then the
/// second by a mask. The products are exact, and memory holds half as many bytes as with float. With rows of float,
/// a row's sums have the bits that a panel of float with the same numbers gives.
template <typename X>
struct WidenedDot {
  using Row = X;
  using Panel = at::BFloat16;
  using Words = Floats;
  using Sums = Floats;
  static constexpr int64_t kPerWord = 2;
  static constexpr int kParts = 2;
  static Words load_side(const at::BFloat16* words, int part) {
    Bits bits;
    std::memcpy(&bits, words, sizeof(bits));
    return widen(bits, part);
  }
  static void load(const at::BFloat16* words, int part, Words& left, Words& right) {
    left = load_side(words, part);
    right = load_side(words + kLanes * kPerWord, part);
  }
  static Words broadcast(const float* word, int part) { return broadcast_float(word[part]); }
  static Words broadcast(const at::BFloat16* word, int part) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof(bits));
    return widen(Bits{} + bits, part);
  }
  static void add(Floats& sums, Words row, Words panel) { sums += row * panel; }

 private:
  typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  static Floats widen(Bits bits, int part) {
    return reinterpret_cast<Floats>(part == 0 ? bits << 16 : bits & 0xffff0000);
  }
};

template <>
struct Dot<at::BFloat16, float> : WidenedDot<float> {};

#ifdef __AVX512BF16__
template <>
struct Dot<at::BFloat16> {
  using Row = at::BFloat16;
  using Panel = at::BFloat16;
  using Words = __m512i;
  using Sums = Floats;
  static constexpr int64_t kPerWord = 2;
  static constexpr int kParts = 1;
  static void load(const at::BFloat16* words, int, Words& left, Words& right) {
    left = _mm512_loadu_si512(words);
    right = _mm512_loadu_si512(words + kLanes * kPerWord);
  }
  static Words broadcast(const at::BFloat16* word, int) {
    int bits;
    std::memcpy(&bits, word, sizeof(bits));
    return _mm512_set1_epi32(bits);
  }
  static void add(Floats& sums, Words row, Words panel) {
    sums = _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(row), reinterpret_cast<__m512bh>(panel));
  }
};
#else
/// A processor without products of bfloat16.
template <>
struct Dot<at::BFloat16> : WidenedDot<at::BFloat16> {};
#endif

/// Prefetches a cache line into L1.
inline void prefetch_line(const void* at) { __builtin_prefetch(at, 0, 3); }

/// Prefetches a cache line into L2.
inline void prefetch_line_into_l2(const void* at) { __builtin_prefetch(at, 0, 2); }

/// Prefetches a cache line that will be written. Without this, a store waits until the line comes from memory or from
/// the cache of another core.
inline void prefetch_to_write(const void* at) {
#ifdef __x86_64__
  // GCC takes this instruction only for some processors. The others ignore it.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 1);
#endif
}

/// The same for all lines of `count` numbers.
template <typename T>
inline void prefetch_to_write(const T* numbers, int64_t count) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < count; i += kLine) prefetch_to_write(static_cast<const void*>(numbers + i));
}

/// Prefetches so many bytes with every word that `multiply_panel` multiplies. Each line is prefetched once, into the cache
/// that `Tuning` names.
class Prefetcher {
 public:
  Prefetcher(const char* from, int64_t bytes_per_word)
      : line_(from), end_(from), bytes_per_word_(bytes_per_word), into_l1_(Tuning::get().prefetches_into_l1) {}

  /// Is called before a part of the words.
  void begin_part(int64_t /*words*/) {}

  /// Is called before so many words.
  void operator()(int64_t words) {
    end_ += words * bytes_per_word_;
    for (; line_ < end_; line_ += 64) into_l1_ ? prefetch_line(line_) : prefetch_line_into_l2(line_);
  }

 private:
  const char *line_, *end_;
  int64_t bytes_per_word_;
  bool into_l1_;
};

/// Prefetches all bytes of a part before its words. So the loop over the words has fewer instructions.
class PartPrefetcher {
 public:
  explicit PartPrefetcher(Prefetcher prefetcher) : prefetcher_(prefetcher) {}

  void begin_part(int64_t words) { prefetcher_(words); }
  void operator()(int64_t /*words*/) {}

 private:
  Prefetcher prefetcher_;
};

/// What a product prefetches. It is small enough to be passed in registers. A `Prefetcher` as an argument was written to
/// memory in parts and read as a whole, and such a read waits until all writes before it have ended.
struct Prefetch {
  const char* from;
  int64_t bytes_per_word;

  Prefetcher start() const { return {from, bytes_per_word}; }
};

/// What a product prefetches part by part, because the bytes of a part are few.
struct PrefetchOfParts : Prefetch {
  PartPrefetcher start() const { return PartPrefetcher(Prefetch::start()); }
};

struct NoPrefetch {
  NoPrefetch start() const { return *this; }
  void begin_part(int64_t) {}
  void operator()(int64_t) {}
};

/// Addresses in kRows rows, which are `stride` numbers apart. With more than six rows, three rows share a pointer: twelve
/// rows need four pointers and three offsets. With an offset for each row, GCC kept some of them in vector registers and
/// moved them with every word. That took 8 % of the time of a product on Zen 4.
template <typename T, int kRows>
class RowPointers {
 public:
  RowPointers(const T* rows, int64_t stride) : stride_(stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) {
      const T* pointer = rows + i * kRowsPerPointer * stride;
      asm("" : "+r"(pointer));  // so that GCC does not compute it from the first one
      pointers_[i] = pointer;
    }
  }

  const T* at(int row, int64_t number) const {
    return pointers_[row / kRowsPerPointer] + (row % kRowsPerPointer * stride_ + number);
  }

 private:
  static constexpr int kRowsPerPointer = kRows > 6 ? 3 : kRows, kPointers = ceil_div(kRows, kRowsPerPointer);
  const T* pointers_[kPointers];
  int64_t stride_;
};

/// Adds the products of one word of kRows rows with kPanels panels to `sums`. The arguments are those of `multiply_panel`.
template <typename D, int kRows, int kPanels>
[[gnu::always_inline]] inline void multiply_word(
    const RowPointers<typename D::Row, kRows>& rows,
    int64_t k,
    const typename D::Panel* panel,
    int64_t panel_stride,
    int64_t panel_distance,
    typename D::Sums (&sums)[kRows * kPanels][2]) {
#pragma GCC unroll 2
  for (int part = 0; part < D::kParts; ++part) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      typename D::Words left, right;
      D::load(panel + p * panel_distance + k * panel_stride, part, left, right);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const auto word = D::broadcast(rows.at(r, k * D::kPerWord), part);
        D::add(sums[r * kPanels + p][0], word, left);
        D::add(sums[r * kPanels + p][1], word, right);
      }
    }
  }
}

/// Adds the products of kRows rows with kPanels panels to `sums`: first those of row 0 with each panel.
///
/// a: rows of D::kPerWord * words numbers, a_stride numbers apart. panel: `words` rows of kPanel words, panel_stride
/// numbers apart; the next panel is panel_distance numbers later. A row's sums with a panel grow in the order of its
/// words, whatever the other rows and panels are. prefetch(n) is called before n words.
template <typename D, int kRows, int kPanels = 1, typename P = NoPrefetch>
inline void multiply_panel(
    const typename D::Row* a,
    int64_t a_stride,
    const typename D::Panel* panel,
    int64_t panel_stride,
    int64_t words,
    typename D::Sums (&sums)[kRows * kPanels][2],
    P&& prefetch = P(),
    int64_t panel_distance = 0) {
  // With AVX2 a product of floats takes half a cycle, so the instructions of the loop itself count, most of all where two
  // hardware threads share a core. Two words of the other types do not fit into the registers.
  constexpr int64_t kWords = kLanes == 8 && std::is_same_v<D, Dot<float>> ? 2 : 1;
  auto prefetch_words = prefetch;  // in registers
  const RowPointers<typename D::Row, kRows> rows(a, a_stride);
  int64_t k = 0;
  for (; k + kWords <= words; k += kWords) {
    prefetch_words(kWords);
#pragma GCC unroll 2
    for (int i = 0; i < kWords; ++i)
      multiply_word<D, kRows, kPanels>(rows, k + i, panel, panel_stride, panel_distance, sums);
  }
  if constexpr (kWords > 1)
    if (k < words) multiply_word<D, kRows, kPanels>(rows, k, panel, panel_stride, panel_distance, sums);
  prefetch = prefetch_words;
}

/// Divides [0, total) into the fewest pieces of at most kMax rows, of nearly equal size, and calls
/// f(first row, std::integral_constant<int, rows>) for each. The compiler knows the number of rows of each piece, so it
/// keeps their sums in registers. The larger pieces are first: the processor then predicts the jump to their code.
template <int64_t kMax = kMaxRows, typename F>
inline void for_each_piece(int64_t total, const F& f) {
  if (total == 0) return;
  const int64_t pieces = ceil_div(total, kMax), rows = total / pieces, larger = total % pieces;
  for (int64_t i = 0, begin = 0, end; i < pieces; ++i, begin = end) {
    end = begin + rows + (i < larger);
    switch (end - begin) {
#define TERCET_PIECE(n)                                                           \
  case n:                                                                         \
    if constexpr (n <= kMax) f(begin, std::integral_constant<int, n>());          \
    break;
      TERCET_PIECE(1) TERCET_PIECE(2) TERCET_PIECE(3) TERCET_PIECE(4) TERCET_PIECE(5) TERCET_PIECE(6)
      TERCET_PIECE(7) TERCET_PIECE(8) TERCET_PIECE(9) TERCET_PIECE(10) TERCET_PIECE(11) TERCET_PIECE(12)
#undef TERCET_PIECE
    }
  }
}

}  // namespace tercet
