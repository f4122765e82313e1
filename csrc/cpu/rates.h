// The processor's highest rates of multiplication: what benchmarks compare linear layers with.
//
// Each rate is that of one instruction, or of the few that replace it, as the linear layers use them. The operands stay
// in registers, and the sums do not depend on each other. So nothing but the instruction limits the rate.
#pragma once

#include <ATen/core/Dict.h>

#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "graph.h"
#include "op_checks.h"
#include "quantized.h"

namespace tercet {

/// The compiler must assume that x changes here. It emits no instruction.
template <typename T>
inline void change(T& x) {
#if defined(__x86_64__) || defined(__i386__)
  asm volatile("" : "+v"(x));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x));
#else
  asm volatile("" : "+m"(x));
#endif
}

/// What is measured has a name, a type of sums, operands, the number of operations of one `add`, and `add`.
struct AnyRate {
  /// Independent sums: enough for two instructions a cycle that take six cycles each. AVX2 has 16 registers.
  static constexpr int kChains = kLanes == 8 ? 12 : 16;
};

struct FloatRate : AnyRate {
#if defined(__aarch64__)
  static constexpr const char* kName = "FMLA";
#else
  static constexpr const char* kName = "FMA";
#endif
  using Sum = Floats;
  static constexpr int64_t kOps = 2 * kLanes;
  Floats row = Floats{} + 0.75f, panel = Floats{} + 1.5f;
  void add(Sum& sum) {
    change(row);  // else the product is computed once, before the loop
    sum += row * panel;
  }
};

#ifdef __AVX512BF16__
struct BFloat16Rate : AnyRate {
  static constexpr const char* kName = "VDPBF16PS";
  using Sum = Floats;
  static constexpr int64_t kOps = 4 * kLanes;
  __m512i row = _mm512_set1_epi32(0x3f403f40), panel = _mm512_set1_epi32(0x3fc03fc0);  // 0.75 and 1.5
  void add(Sum& sum) { Dot<at::BFloat16>::add(sum, row, panel); }
};
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
struct ByteRate : AnyRate {
  static constexpr const char* kName = "VPDPBUSD";
  using Sum = Ints;
  static constexpr int64_t kOps = 8 * kLanes;
  Ints row = Ints{} + 0x65'9b'65'9b;  // bytes 101 and -101: the sums stay 0
  Bytes panel = Bytes{} + 11;
  void add(Sum& sum) { add_products(sum, row, panel); }
};
#elif defined(__AVX2__)
/// Products of bytes, summed in 16 bits over a group, as for weights of 4 bits.
struct ByteRate {
  static constexpr const char* kName = "VPMADDUBSW + VPADDW";
  static constexpr int kChains = 4;  // enough for two additions of a group, which each take a cycle or two
  using Sum = Ints;
  static constexpr int kWords = kGroup / Dot<Int4Weights>::kPerWord;
  static constexpr int64_t kOps = kWords * 8 * kLanes;
  Ints row = Ints{} + 0x65'9b'65'9b;  // bytes 101 and -101: the sums stay 0
  Bytes panel = Bytes{} + 11;
  void add(Sum& sum) {
    Shorts products = {};
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) {
      change(row);
      Dot<Int4Weights>::add(products, row, panel);
    }
    sum += Dot<Int4Weights>::total(products);
  }
};

/// Products of 16 bits, as for weights of 8 bits.
struct ShortRate : AnyRate {
  static constexpr const char* kName = "VPMADDWD + VPADDD";
  using Sum = Ints;
  static constexpr int64_t kOps = 4 * kLanes;
  Shorts row = (Shorts)(Ints{} + 0x0065'ff9b), panel = Shorts{} + 11;
  void add(Sum& sum) {
    change(row);
#ifdef __AVX512BW__
    sum += (Ints)_mm512_madd_epi16((__m512i)row, (__m512i)panel);
#else
    sum += (Ints)_mm256_madd_epi16((__m256i)row, (__m256i)panel);
#endif
  }
};
#else
/// Products of 32 bits, which a build without intrinsics has.
struct ByteRate : AnyRate {
#if defined(__aarch64__)
  static constexpr const char* kName = "MLA";
#else
  static constexpr const char* kName = "integer multiply-add";
#endif
  typedef uint32_t Sum __attribute__((vector_size(kLanes * sizeof(uint32_t))));  // overflow is defined
  static constexpr int64_t kOps = 2 * kLanes;
  Sum row = Sum{} + 101, panel = Sum{} + 11;
  void add(Sum& sum) {
    change(row);
    sum += row * panel;
  }
};
#endif

/// Adds to each of the sums `steps` times. Without inner loops: with them, GCC keeps sums of integers in memory. A
/// function of its own, whose instructions a test counts.
template <typename R, size_t... kAt>
[[gnu::noinline]] void run_chains(int64_t steps, std::index_sequence<kAt...>) {
  R rate;
  change(rate.row);
  change(rate.panel);
  typename R::Sum sums[sizeof...(kAt)] = {};
  (change(sums[kAt]), ...);  // else the compiler knows that all sums are equal, and computes one
  for (int64_t step = 0; step < steps; ++step) (rate.add(sums[kAt]), ...);
  (change(sums[kAt]), ...);
}

/// The most operations per second of all threads together, over jobs of a few milliseconds in `seconds`. Other processes
/// can only lower the rate of a job.
template <typename R>
double ops_per_s(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const int64_t threads = ThreadPool::get().num_threads();
  const auto begin = Clock::now();
  double best = 0;
  int64_t steps = 1 << 12;
  do {
    const auto start = Clock::now();
    ThreadPool::get().run(threads, [&](int64_t) { run_chains<R>(steps, std::make_index_sequence<R::kChains>()); });
    const double took = since(start);
    if (took > 0) best = std::max(best, static_cast<double>(threads * steps * R::kChains * R::kOps) / took);
    if (took < 2e-3) steps *= 2;
  } while (since(begin) < seconds || best == 0);
  return best;
}

/// Operations per second by instruction, for the instructions of this build that multiply numbers of this type. A
/// multiplication and an addition are two operations. Int4 stands for weights of 4 bits, whose products with 8 bits can
/// be summed in 16 bits. Empty for types that no linear layer multiplies.
inline c10::Dict<std::string, double> instruction_rates_op(at::ScalarType type, double seconds) {
  check_not_recording("a measurement");
  TORCH_CHECK(seconds > 0 && std::isfinite(seconds), "seconds must be positive and finite, got ", seconds);
  c10::Dict<std::string, double> rates;
  const auto measure = [&]<typename R>(R) { rates.insert(R::kName, ops_per_s<R>(seconds)); };
  if (type == at::kFloat || type == at::kBFloat16) measure(FloatRate());  // bfloat16 may be widened
#ifdef __AVX512BF16__
  if (type == at::kBFloat16) measure(BFloat16Rate());
#endif
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  if (type == at::kChar) measure(ShortRate());
#else
  if (type == at::kChar) measure(ByteRate());
#endif
  if (type == at::ScalarType::Int4) measure(ByteRate());
  return rates;
}

}  // namespace tercet
