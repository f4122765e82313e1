// Products of small matrices, a 32-bit word at a time: a word is one float, two bfloat16 or (quantized.h) four integers.
//
// `Dot<T>` says what a word holds and how a vector of sums grows by the products of one word of a row, broadcast, with a
// vector of words of a panel. Everything that multiplies matrices is written once over it: linear layers over panels
// of weights, attention over panels of keys and values.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace tercet {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
/// As many floats as a register holds. A plain vector type: compilers keep arrays of it in registers.
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));

/// Columns of a panel: two vectors of sums.
constexpr int64_t kPanel = 2 * kLanes;
/// Rows that share one pass over a panel: as many as there are registers for their sums, beside two vectors of the
/// panel and one of the row.
constexpr int64_t kMaxRows = kLanes == 16 ? 12 : 6;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline Floats load_floats(const float* from) {
  Floats loaded;
  std::memcpy(&loaded, from, sizeof(loaded));
  return loaded;
}

inline void store_floats(float* to, Floats floats) { std::memcpy(to, &floats, sizeof(floats)); }

inline Floats floats_of(Vec x) {
  Floats floats;
  static_assert(sizeof(x) == sizeof(floats));
  std::memcpy(&floats, &x, sizeof(floats));
  return floats;
}

inline Vec vec_of(Floats x) {
  Vec vec;
  std::memcpy(static_cast<void*>(&vec), &x, sizeof(vec));
  return vec;
}

template <typename T>
struct Dot;

template <>
struct Dot<float> {
  using Row = float;
  using Panel = float;
  using Words = Floats;
  using Sums = Floats;
  static constexpr int64_t kPerWord = 1;
  static void load(const float* words, Words& left, Words& right) {
    left = load_floats(words);
    right = load_floats(words + kLanes);
  }
  static Words broadcast(const float* word) { return Floats{} + *word; }
  static void add(Floats& sums, Words row, Words panel) { sums += row * panel; }
};

#ifdef __AVX512BF16__
template <>
struct Dot<at::BFloat16> {
  using Row = at::BFloat16;
  using Panel = at::BFloat16;
  using Words = __m512i;
  using Sums = Floats;
  static constexpr int64_t kPerWord = 2;
  static void load(const at::BFloat16* words, Words& left, Words& right) {
    left = _mm512_loadu_si512(words);
    right = _mm512_loadu_si512(words + kLanes * kPerWord);
  }
  static Words broadcast(const at::BFloat16* word) {
    int bits;
    std::memcpy(&bits, word, sizeof(bits));
    return _mm512_set1_epi32(bits);
  }
  static void add(Floats& sums, Words row, Words panel) {
    sums = _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(row), reinterpret_cast<__m512bh>(panel));
  }
};
#endif

/// Has a line brought from memory into the second level of cache: the first is full of what is worked on, and fetching
/// into that made decode attention slower, not faster.
inline void fetch_line(const void* at) { __builtin_prefetch(at, 0, 2); }

/// Brings what is needed next, some bytes with every word that is multiplied: at most two lines.
struct Fetch {
  const char* next;
  int64_t bytes;

  void operator()() {
    fetch_line(next);
    fetch_line(next + 64);
    next += bytes;
  }
};

struct FetchNothing {
  void operator()() {}
};

/// sums[r] += row r of `a` times a panel. a: kRows rows of `words` words, a_stride numbers apart; panel: `words` rows
/// of kPanel words, panel_stride numbers apart. A row's sums grow in the order of its words, whatever is beside it.
template <typename T, int kRows, typename Meanwhile = FetchNothing, typename D = Dot<T>>
inline void multiply_panel(
    const typename D::Row* a,
    int64_t a_stride,
    const typename D::Panel* panel,
    int64_t panel_stride,
    int64_t words,
    typename D::Sums (&sums)[kRows][2],
    Meanwhile&& meanwhile = {}) {
  for (int64_t k = 0; k < words; ++k) {
    meanwhile();
    typename D::Words left, right;
    D::load(panel + k * panel_stride, left, right);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto word = D::broadcast(a + r * a_stride + k * D::kPerWord);
      D::add(sums[r][0], word, left);
      D::add(sums[r][1], word, right);
    }
  }
}

/// Calls f(first row, std::integral_constant<int, rows>) for pieces of [0, total) of at most kMost, as even as they
/// come: the compiler knows how many rows are in registers.
template <int64_t kMost = kMaxRows, typename F>
inline void in_pieces(int64_t total, const F& f) {
  const int64_t pieces = ceil_div(total, kMost);
  for (int64_t i = 0, begin = 0, end; i < pieces; ++i, begin = end) {
    end = total * (i + 1) / pieces;
    switch (end - begin) {
#define TERCET_PIECE(n)                                                            \
  case n:                                                                          \
    if constexpr (n <= kMost) f(begin, std::integral_constant<int, n>());          \
    break;
      TERCET_PIECE(1) TERCET_PIECE(2) TERCET_PIECE(3) TERCET_PIECE(4) TERCET_PIECE(5) TERCET_PIECE(6)
      TERCET_PIECE(7) TERCET_PIECE(8) TERCET_PIECE(9) TERCET_PIECE(10) TERCET_PIECE(11) TERCET_PIECE(12)
#undef TERCET_PIECE
    }
  }
}

/// One number for each of kIndices: element i of a, or element i - size of b.
template <int... kIndices, typename V>
inline V shuffle(V a, V b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, kIndices...);
#else  // GCC 11
  using Indices = decltype(a == b);  // a vector of integers as wide as the numbers of V
  return __builtin_shuffle(a, b, Indices{kIndices...});
#endif
}

/// Of two vectors, blocks of kBlock numbers in turn: the even ones of both, or (kOdd) the odd ones.
template <int64_t kBlock, bool kOdd, typename V, size_t... kAt>
inline V every_other_block(V a, V b, std::index_sequence<kAt...>) {
  constexpr int64_t kSize = sizeof...(kAt);
  return shuffle<static_cast<int>((kAt / kBlock % 2 ? kSize - kBlock : 0) + kAt + (kOdd ? kBlock : 0))...>(a, b);
}

/// Rows become columns. Blocks of two sizes are swapped in place: of one number, of two, of four ...
template <int64_t kBlock = 1>
inline void transpose(Floats (&x)[kLanes]) {
  if constexpr (kBlock < kLanes) {
    constexpr auto kAll = std::make_index_sequence<kLanes>();
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) {
      if (i & kBlock) continue;
      const Floats a = x[i], b = x[i + kBlock];
      x[i] = every_other_block<kBlock, false>(a, b, kAll);
      x[i + kBlock] = every_other_block<kBlock, true>(a, b, kAll);
    }
    transpose<2 * kBlock>(x);
  }
}

/// What each of these vectors' lanes come to, all in one vector: lane i is that of x[i].
template <int64_t kBlock = 1, typename F>
inline Vec in_lanes(Floats (&x)[kLanes], const F& combine) {
  if constexpr (kBlock < kLanes) {
    constexpr auto kAll = std::make_index_sequence<kLanes>();
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; i += 2 * kBlock) {
      const Floats even = every_other_block<kBlock, false>(x[i], x[i + kBlock], kAll);
      const Floats odd = every_other_block<kBlock, true>(x[i], x[i + kBlock], kAll);
      x[i] = floats_of(combine(vec_of(even), vec_of(odd)));
    }
    return in_lanes<2 * kBlock>(x, combine);
  } else {
    return vec_of(x[0]);
  }
}

/// Two vectors of floats, as many as a panel has columns.
struct FloatPair {
  Vec left, right;

  FloatPair operator+(FloatPair other) const { return {left + other.left, right + other.right}; }
  FloatPair operator-(FloatPair other) const { return {left - other.left, right - other.right}; }
  FloatPair operator*(FloatPair other) const { return {left * other.left, right * other.right}; }
  FloatPair operator*(Vec factor) const { return {left * factor, right * factor}; }
};

/// The first `count` numbers at `from`, as floats, zeros beyond; count <= kPanel.
template <typename T>
inline FloatPair load_pair(const T* from, int64_t count = kPanel) {
  if constexpr (std::is_same_v<T, float>) {
    if (count >= kPanel) return {Vec::loadu(from), Vec::loadu(from + kLanes)};
    return {
        Vec::loadu(from, std::min(count, kLanes)), Vec::loadu(from + kLanes, std::max<int64_t>(count - kLanes, 0))};
  } else {
    using Chunk = at::vec::Vectorized<T>;
    const auto [left, right] = at::vec::convert_to_float(count >= kPanel ? Chunk::loadu(from) : Chunk::loadu(from, count));
    return {left, right};
  }
}

/// The first `count` floats of a pair, rounded to T; count <= kPanel.
template <typename T>
inline void store_pair(T* to, FloatPair x, int64_t count = kPanel) {
  if constexpr (std::is_same_v<T, float>) {
    x.left.store(to, std::min(count, kLanes));
    if (count > kLanes) x.right.store(to + kLanes, std::min(count, kPanel) - kLanes);
  } else if (count >= kPanel) {
    at::vec::convert_from_float<T>(x.left, x.right).store(to);
  } else {
    at::vec::convert_from_float<T>(x.left, x.right).store(to, count);
  }
}

#ifdef CPU_CAPABILITY_AVX512
/// exp(x), off by (2e-7 + 1e-7 |x|) of it at most: t = x log2(e), 2^floor(t) by exponent, 2^(t - floor(t)) by the
/// polynomial of degree 5 that is best on [0, 1) with 1 at 0. Half of the instructions of `exp_u20`; 0 for -inf, NaN for
/// NaN.
inline Vec short_exp(Vec x) {
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 power = _mm512_set1_ps(0.0018671303f);
  for (const float c : {0.0090170298f, 0.0557999127f, 0.2401644439f, 0.6931512952f, 1.f})
    power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(power, t);
}
#endif

/// exp(x) for a result that is rounded to T: off by less than that rounding is.
template <typename T>
inline Vec exp_for(Vec x) {
  if constexpr (std::is_same_v<T, float>)
    return x.exp();
  else
#ifdef CPU_CAPABILITY_AVX512
    return short_exp(x);
#else
    return x.exp_u20();
#endif
}

inline float sum_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, x);
}

inline float max_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, x);
}

}  // namespace tercet
