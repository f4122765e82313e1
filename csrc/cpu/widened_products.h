// Products of rows of float with a panel of bfloat16 on processors with AVX2: the loop of `WidenedDot` in assembly.
//
// The twelve sums of six rows and their operands need all 16 registers. GCC 12 keeps some of the sums in memory, in a way
// that changes with each edit. A product takes half a cycle, so each instruction more costs time, most of all where two
// hardware threads share a core.
#pragma once

#if defined(__AVX2__) && !defined(__AVX512F__) && defined(__x86_64__)
#define TERCET_WIDENS_IN_ASSEMBLY

#include <ATen/ATen.h>

#include "vectors.h"

namespace tercet {

/// Rows and words of `add_widened_products`. The compiler's code for fewer rows is as fast.
constexpr int kMinWidenedRows = 4, kMaxWidenedRows = 6;
constexpr int64_t kWidenedWords = 2;

// f(r, registers of its sums with the left and right columns, its address) for each row r. The addresses are `at` bytes
// after those of rows 0 and 3, which are in the registers `first` and `fourth`.
#define TERCET_WIDENED_ROW(f, r, left, right, address) ".if %c[rows] > " #r "\n\t" f(r, left, right, address) ".endif\n\t"
#define TERCET_WIDENED_ROWS(f, at)                                             \
  TERCET_WIDENED_ROW(f, 0, "%%ymm0", "%%ymm1", at "(%[first])")                \
  TERCET_WIDENED_ROW(f, 1, "%%ymm2", "%%ymm3", at "(%[first], %[stride])")     \
  TERCET_WIDENED_ROW(f, 2, "%%ymm4", "%%ymm5", at "(%[first], %[stride], 2)")  \
  TERCET_WIDENED_ROW(f, 3, "%%ymm6", "%%ymm7", at "(%[fourth])")               \
  TERCET_WIDENED_ROW(f, 4, "%%ymm8", "%%ymm9", at "(%[fourth], %[stride])")    \
  TERCET_WIDENED_ROW(f, 5, "%%ymm10", "%%ymm11", at "(%[fourth], %[stride], 2)")

#define TERCET_WIDENED_BEGIN(r, left, right, address) \
  "vxorps " left ", " left ", " left "\n\t"           \
  "vxorps " right ", " right ", " right "\n\t"

// A number of each column is in ymm12 and ymm13.
#define TERCET_WIDENED_ADD(r, left, right, address) \
  "vbroadcastss " address ", %%ymm14\n\t"           \
  "vfmadd231ps %%ymm12, %%ymm14, " left "\n\t"      \
  "vfmadd231ps %%ymm13, %%ymm14, " right "\n\t"

#define TERCET_WIDENED_END(r, left, right, address)            \
  "vaddps 64 * " #r "(%[sums]), " left ", " left "\n\t"        \
  "vaddps 64 * " #r " + 32(%[sums]), " right ", " right "\n\t" \
  "vmovaps " left ", 64 * " #r "(%[sums])\n\t"                 \
  "vmovaps " right ", 64 * " #r " + 32(%[sums])\n\t"

// Word i: the first number of each column, by a shift, then the second, by the mask in ymm15.
#define TERCET_WIDENED_WORD(i)                             \
  "vmovdqu 64 * " #i "(%[panel]), %%ymm12\n\t"             \
  "vmovdqu 64 * " #i " + 32(%[panel]), %%ymm13\n\t"        \
  "vpslld $16, %%ymm12, %%ymm12\n\t"                       \
  "vpslld $16, %%ymm13, %%ymm13\n\t"                       \
  TERCET_WIDENED_ROWS(TERCET_WIDENED_ADD, "8 * " #i)       \
  "vpand 64 * " #i "(%[panel]), %%ymm15, %%ymm12\n\t"      \
  "vpand 64 * " #i " + 32(%[panel]), %%ymm15, %%ymm13\n\t" \
  TERCET_WIDENED_ROWS(TERCET_WIDENED_ADD, "8 * " #i " + 4")

/// sums[r] += the products of row r of x with the columns of a panel, which are added up from zero first.
///
/// x: kRows rows of 2 * words floats, x_stride floats apart. panel: `words` rows of kPanel words of two numbers. `words` is
/// a positive multiple of kWidenedWords.
template <int kRows>
inline void add_widened_products(
    const float* x, int64_t x_stride, const at::BFloat16* panel, int64_t words, Floats (*sums)[2]) {
  static_assert(kRows <= kMaxWidenedRows && kWidenedWords == 2 && sizeof(Floats) == 32);
  const int64_t stride = x_stride * sizeof(float);
  const char *first = reinterpret_cast<const char*>(x), *fourth = first + 3 * stride;
  asm volatile(
      TERCET_WIDENED_ROWS(TERCET_WIDENED_BEGIN, "")
      "vpcmpeqd %%ymm15, %%ymm15, %%ymm15\n\t"
      "vpslld $16, %%ymm15, %%ymm15\n\t"
      "1:\n\t"
      TERCET_WIDENED_WORD(0)
      TERCET_WIDENED_WORD(1)
      "add $16, %[first]\n\t"
      "add $16, %[fourth]\n\t"
      "add $128, %[panel]\n\t"
      "sub $2, %[words]\n\t"
      "jnz 1b\n\t"
      TERCET_WIDENED_ROWS(TERCET_WIDENED_END, "")
      : [first] "+r"(first), [fourth] "+r"(fourth), [panel] "+r"(panel), [words] "+r"(words)
      : [rows] "i"(kRows), [stride] "r"(stride), [sums] "r"(sums)
      : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12",
        "ymm13", "ymm14", "ymm15", "memory", "cc");
}

#undef TERCET_WIDENED_ROW
#undef TERCET_WIDENED_ROWS
#undef TERCET_WIDENED_BEGIN
#undef TERCET_WIDENED_ADD
#undef TERCET_WIDENED_END
#undef TERCET_WIDENED_WORD

}  // namespace tercet
#endif
