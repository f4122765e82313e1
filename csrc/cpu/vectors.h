// Vectors of floats: loads, stores, conversions, shuffles, reductions and the exponential function.
//
// `Vec` is ATen's vector class and has the arithmetic. `Floats` is the compiler's vector type of the same size.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace tercet {

using Vec = at::vec::Vectorized<float>;
/// Floats in a vector register.
constexpr int64_t kLanes = Vec::size();
/// Compilers keep arrays of this type in registers, which they do not do with arrays of `Vec`.
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));

/// Columns of a panel: two vectors of sums.
constexpr int64_t kPanel = 2 * kLanes;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline Floats load_floats(const float* from) {
  Floats loaded;
  std::memcpy(&loaded, from, sizeof(loaded));
  return loaded;
}

/// Calls f(0), f(1), ... f(n - 1). The indices are constants. After a loop, GCC may keep an array of sums in memory.
template <int n, typename F>
[[gnu::always_inline]] inline void unrolled(const F& f) {
  [&]<int... kAt>(std::integer_sequence<int, kAt...>) {
    (f(std::integral_constant<int, kAt>()), ...);
  }(std::make_integer_sequence<int, n>());
}

/// A vector of equal floats. The compiler has to keep the addition of zero (-0 becomes 0), but not its subtraction.
inline Floats broadcast_float(float x) { return x - Floats{}; }

inline void store_floats(float* to, Floats floats) { std::memcpy(to, &floats, sizeof(floats)); }

inline Floats to_floats(Vec x) {
  Floats floats;
  static_assert(sizeof(x) == sizeof(floats));
  std::memcpy(&floats, &x, sizeof(floats));
  return floats;
}

inline Vec to_vec(Floats x) {
  Vec vec;
  std::memcpy(static_cast<void*>(&vec), &x, sizeof(vec));
  return vec;
}

/// Selects one number for each of kIndices: number i of a, or number (i - size) of b.
template <int... kIndices, typename V>
inline V shuffle(V a, V b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, kIndices...);
#else  // GCC 11
  using Indices = decltype(a == b);  // a vector of integers as wide as the numbers of V
  return __builtin_shuffle(a, b, Indices{kIndices...});
#endif
}

/// Cuts two vectors into blocks of kBlock numbers and takes a block of each in turn: the even blocks of both, or, with
/// kOdd, the odd ones.
template <int64_t kBlock, bool kOdd, typename V, size_t... kAt>
inline V every_other_block(V a, V b, std::index_sequence<kAt...>) {
  constexpr int64_t kSize = sizeof...(kAt);
  return shuffle<static_cast<int>((kAt / kBlock % 2 ? kSize - kBlock : 0) + kAt + (kOdd ? kBlock : 0))...>(a, b);
}

/// Alternates the numbers of two vectors: a[0], b[0], a[1], b[1] ... in two vectors.
template <typename V, size_t... kAt>
inline std::pair<V, V> interleave(V a, V b, std::index_sequence<kAt...>) {
  constexpr int kSize = sizeof...(kAt);
  return {
      shuffle<static_cast<int>(kAt / 2 + kAt % 2 * kSize)...>(a, b),
      shuffle<static_cast<int>(kSize / 2 + kAt / 2 + kAt % 2 * kSize)...>(a, b)};
}

/// Transposes a square matrix in place. Each level swaps blocks of twice the size: one number, two, four ...
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

/// Reduces each vector to one number. Lane i of the result is the reduction of x[i]. Overwrites x.
template <int64_t kBlock = 1, typename F>
inline Vec reduce_each(Floats (&x)[kLanes], const F& combine) {
  if constexpr (kBlock < kLanes) {
    constexpr auto kAll = std::make_index_sequence<kLanes>();
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; i += 2 * kBlock) {
      const Floats even = every_other_block<kBlock, false>(x[i], x[i + kBlock], kAll);
      const Floats odd = every_other_block<kBlock, true>(x[i], x[i + kBlock], kAll);
      x[i] = to_floats(combine(to_vec(even), to_vec(odd)));
    }
    return reduce_each<2 * kBlock>(x, combine);
  } else {
    return to_vec(x[0]);
  }
}

/// Two vectors of floats: one number for each column of a panel.
struct FloatPair {
  Vec left, right;

  FloatPair operator+(FloatPair other) const { return {left + other.left, right + other.right}; }
  FloatPair operator-(FloatPair other) const { return {left - other.left, right - other.right}; }
  FloatPair operator*(FloatPair other) const { return {left * other.left, right * other.right}; }
  FloatPair operator*(Vec factor) const { return {left * factor, right * factor}; }
};

/// kLanes numbers as floats. ATen's conversion of a vector of bfloat16 also stores it four times.
inline Vec load_wide(const at::BFloat16* from) {
#if defined(__AVX512F__)
  const auto words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
#elif defined(__AVX2__)
  const auto words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
#else
  typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return to_vec(reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16));
#endif
}

#if defined(__AVX512F__) || defined(__F16C__)
/// The same for float16. ATen's conversion also stores the vector.
inline Vec load_wide(const at::Half* from) {
#ifdef __AVX512F__
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}
#endif

/// Loads the first min(count, kPanel) numbers as floats, and zeros after them.
template <typename T>
inline FloatPair load_pair(const T* from, int64_t count = kPanel) {
  if constexpr (std::is_same_v<T, float>) {
    if (count >= kPanel) return {Vec::loadu(from), Vec::loadu(from + kLanes)};
    return {
        Vec::loadu(from, std::min(count, kLanes)), Vec::loadu(from + kLanes, std::max<int64_t>(count - kLanes, 0))};
  } else {
    if constexpr (requires { load_wide(from); })
      if (count >= kPanel) return {load_wide(from), load_wide(from + kLanes)};
    using Chunk = at::vec::Vectorized<T>;
    const Chunk loaded = count >= kPanel ? Chunk::loadu(from) : Chunk::loadu(from, count);
    const auto [left, right] = at::vec::convert_to_float(loaded);
    return {left, right};
  }
}

/// Floats rounded to T, a type of 16 bits.
template <typename T>
[[gnu::always_inline]] inline at::vec::Vectorized<T> round_to(FloatPair x) {
#ifdef __AVX512BF16__
  // ATen's conversion takes 18 instructions. This one also makes zeros of denormals, as the products do.
  if constexpr (std::is_same_v<T, at::BFloat16>)
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x.right, x.left));
#endif
  return at::vec::convert_from_float<T>(x.left, x.right);
}

/// Stores the first min(count, kPanel) floats, rounded to T.
template <typename T>
[[gnu::always_inline]] inline void store_pair(T* to, FloatPair x, int64_t count = kPanel) {
  if constexpr (std::is_same_v<T, float>) {
    x.left.store(to, std::min(count, kLanes));
    if (count > kLanes) x.right.store(to + kLanes, std::min(count, kPanel) - kLanes);
  } else {
    const auto rounded = round_to<T>(x);
    count >= kPanel ? rounded.store(to) : rounded.store(to, count);
  }
}

constexpr float kLog2E = 1.44269504f;

#ifdef CPU_CAPABILITY_AVX512
/// 2^x with a relative error of at most 2e-7; 0 for -inf, NaN for NaN. It multiplies 2^floor(x), by exponent, with
/// 2^(x - floor(x)), by the polynomial of degree 5 that is best on [0, 1) with value 1 at 0.
inline Vec fast_exp2(Vec x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 power = _mm512_set1_ps(0.0018671303f);
  for (const float c : {0.0090170298f, 0.0557999127f, 0.2401644439f, 0.6931512952f, 1.f})
    power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(power, x);
}
#endif

/// 2^x with a relative error of at most 8e-8 from -126 to 127; 0 below -126.5, infinity above 127.5, NaN for NaN.
///
/// With n = x, rounded, it multiplies 2^n, whose exponent is n, with 2^(x - n), by the polynomial of degree 6 that is best
/// on [-1/2, 1/2] with value 1 at 0.
inline Vec accurate_exp2(Vec x) {
  typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  x = at::vec::clamp(x, Vec(-127.f), Vec(128.f));
  // The last bits of this sum are n + 127, the exponent's bits of 2^n: floats of its size are whole numbers.
  constexpr float kWholeNumbers = 0x1.8p23f + 127;
  const Vec sum = x + Vec(kWholeNumbers);
  const Vec rest = x - (sum - Vec(kWholeNumbers));
  const Vec power_of_2 = to_vec(reinterpret_cast<Floats>(reinterpret_cast<Bits>(to_floats(sum)) << 23));
  Vec power(0.00015353353f);
  for (const float c : {0.0013398875f, 0.009618438f, 0.055503324f, 0.24022648f, 0.6931472f, 1.f})
    power = at::vec::fmadd(power, rest, Vec(c));
  return power * power_of_2;
}

/// exp(x) with a relative error of at most 8e-8 from -87.3 to 88.3; 0 below -87.7, infinity above 88.4, NaN for NaN. In
/// attention it takes a third of the time of ATen's `exp`, which is a function of another library.
///
/// With n = x / ln 2, rounded, it multiplies 2^n, whose exponent is n, with exp(x - n ln 2), by the polynomial of degree
/// 6 that is best on [-ln 2 / 2, ln 2 / 2] with value and slope 1 at 0.
[[gnu::always_inline]] inline Vec accurate_exp(Vec x) {
  typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  x = at::vec::clamp(x, Vec(-88.f), Vec(89.f));
  // The last bits of this sum are n + 127, the exponent's bits of 2^n: floats of its size are whole numbers.
  constexpr float kWholeNumbers = 0x1.8p23f + 127;
  const Vec sum = at::vec::fmadd(x, Vec(kLog2E), Vec(kWholeNumbers));
  const Vec n = sum - Vec(kWholeNumbers);
  const Vec power_of_2 = to_vec(reinterpret_cast<Floats>(reinterpret_cast<Bits>(to_floats(sum)) << 23));
  Vec rest = at::vec::fmadd(n, Vec(-0.693359375f), x);
  rest = at::vec::fmadd(n, Vec(2.12194440e-4f), rest);
  Vec power(0.0013814599f);
  for (const float c : {0.008368717f, 0.04166839f, 0.16666521f, 0.49999994f, 1.f, 1.f})
    power = at::vec::fmadd(power, rest, Vec(c));
  return power * power_of_2;
}

/// tanh(x) with a relative error of at most 4e-7; NaN for NaN. It is x times a quotient of two polynomials of x^2, which
/// is the best of its degree on [-9, 9]. Beyond that, the result is 1 or -1, except for the last bit.
inline Vec accurate_tanh(Vec x) {
  x = at::vec::clamp(x, Vec(-9.f), Vec(9.f));
  const Vec square = x * x;
  Vec above(1.3355097e-08f), below(7.7767459e-07f);
  for (const float c : {2.0609426e-05f, 0.0034956101f, 0.13381045f, 1.f}) above = at::vec::fmadd(above, square, Vec(c));
  for (const float c : {0.00032856702f, 0.025877068f, 0.4671436f, 1.f}) below = at::vec::fmadd(below, square, Vec(c));
  return at::vec::clamp(x * above / below, Vec(-1.f), Vec(1.f));
}

/// 2^x for a result that is rounded to T. The error is smaller than that rounding.
template <typename T>
inline Vec exp2_for(Vec x) {
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (!std::is_same_v<T, float>) return fast_exp2(x);
#endif
  return accurate_exp2(x);
}

/// The same for exp(x).
template <typename T>
inline Vec exp_for(Vec x) {
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (!std::is_same_v<T, float>) return fast_exp2(x * Vec(kLog2E));
#endif
  return accurate_exp(x);
}

/// Whether all numbers of two vectors are less than a limit. NaN is not.
inline bool all_less(Vec a, Vec b, float limit) {
#ifdef CPU_CAPABILITY_AVX512
  const __m512 limits = _mm512_set1_ps(limit);
  return (_mm512_cmp_ps_mask(a, limits, _CMP_LT_OQ) & _mm512_cmp_ps_mask(b, limits, _CMP_LT_OQ)) == 0xFFFF;
#else
  return ((a < Vec(limit)) & (b < Vec(limit))).zero_mask() == 0;
#endif
}

/// Whether no number of `a` is greater than that of `b`. NaN is not greater.
inline bool all_at_most(Vec a, Vec b) {
#ifdef CPU_CAPABILITY_AVX512
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) == 0;
#else
  return (a > b).zero_mask() == (1 << kLanes) - 1;
#endif
}

inline float sum_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, x);
}

inline float max_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, x);
}

}  // namespace tercet
