// Products of a group of 8-bit weights with rows of 16 bits, for processors with AVX2 that have no instruction for products
// of bytes. VPMADDWD multiplies 16 bits.
//
// It is written in assembly because the twelve sums and their operands need all 16 registers. GCC 12 keeps some of the sums
// in memory, in a way that changes with each edit.
#pragma once

#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)
/// Rows that weights of 8 bits multiply have 16 bits.
#define TERCET_ROWS_OF_SHORTS

#include <immintrin.h>

#include "vectors.h"

namespace tercet {

/// Most rows of `multiply_shorts`.
constexpr int kMaxShortRows = 6;

// Multiplies one part of a word of row r, which is at `address`, with the part of 16 columns in ymm12 and ymm13.
#define TERCET_SHORT_ROW(r, address)                        \
  ".if %c[rows] > " #r "\n\t"                               \
  "vpbroadcastd " address ", %%ymm14\n\t"                   \
  "vpmaddwd %%ymm12, %%ymm14, %%ymm15\n\t"                  \
  "vpaddd %%ymm15, %[left" #r "], %[left" #r "]\n\t"        \
  "vpmaddwd %%ymm13, %%ymm14, %%ymm15\n\t"                  \
  "vpaddd %%ymm15, %[right" #r "], %[right" #r "]\n\t"      \
  ".endif\n\t"
#define TERCET_SHORT_ROWS(at)                               \
  TERCET_SHORT_ROW(0, at "(%[first])")                      \
  TERCET_SHORT_ROW(1, at "(%[first], %[stride])")           \
  TERCET_SHORT_ROW(2, at "(%[first], %[stride], 2)")        \
  TERCET_SHORT_ROW(3, at "(%[fourth])")                     \
  TERCET_SHORT_ROW(4, at "(%[fourth], %[stride])")          \
  TERCET_SHORT_ROW(5, at "(%[fourth], %[stride], 2)")
#define TERCET_SHORT_SUMS(r) [left##r] "+x"(sums[r][0]), [right##r] "+x"(sums[r][1])

/// Adds the products of kRows rows with the 8 words of a group of a panel to `products`.
///
/// rows: 32 numbers each, `stride` bytes apart. A word of a row has the order 0, 2, 1, 3. words: 64 bytes each, with 4
/// unsigned numbers of each column.
template <int kRows, typename Ints>
inline void multiply_shorts(const int16_t* rows, int64_t stride, const uint8_t* words, Ints (&products)[kRows][2]) {
  static_assert(kRows <= kMaxShortRows && sizeof(Ints) == sizeof(__m256i));
  Ints sums[kMaxShortRows][2] = {};
  unrolled<2 * kRows>([&](auto i) { sums[i / 2][i % 2] = products[i / 2][i % 2]; });
  const auto* fourth = reinterpret_cast<const int16_t*>(reinterpret_cast<const char*>(rows) + 3 * stride);
  alignas(32) static constexpr uint16_t kLowBytes[] = {255, 255, 255, 255, 255, 255, 255, 255,
                                                       255, 255, 255, 255, 255, 255, 255, 255};
  asm(".set tercet_word, 0\n\t"
      ".rept 8\n\t"
      // numbers 0 and 2 of each column
      "vmovdqa %[low_bytes], %%ymm15\n\t"
      "vpand 64 * tercet_word(%[words]), %%ymm15, %%ymm12\n\t"
      "vpand 64 * tercet_word + 32(%[words]), %%ymm15, %%ymm13\n\t"
      TERCET_SHORT_ROWS("8 * tercet_word")
      // numbers 1 and 3
      "vmovdqu 64 * tercet_word(%[words]), %%ymm12\n\t"
      "vmovdqu 64 * tercet_word + 32(%[words]), %%ymm13\n\t"
      "vpsrlw $8, %%ymm12, %%ymm12\n\t"
      "vpsrlw $8, %%ymm13, %%ymm13\n\t"
      TERCET_SHORT_ROWS("8 * tercet_word + 4")
      ".set tercet_word, tercet_word + 1\n\t"
      ".endr"
      : TERCET_SHORT_SUMS(0), TERCET_SHORT_SUMS(1), TERCET_SHORT_SUMS(2), TERCET_SHORT_SUMS(3), TERCET_SHORT_SUMS(4),
        TERCET_SHORT_SUMS(5)
      : [rows] "i"(kRows), [first] "r"(rows), [fourth] "r"(fourth), [stride] "r"(stride), [words] "r"(words),
        [low_bytes] "m"(kLowBytes)
      : "ymm12", "ymm13", "ymm14", "ymm15", "memory");
  unrolled<2 * kRows>([&](auto i) { products[i / 2][i % 2] = sums[i / 2][i % 2]; });
}

#undef TERCET_SHORT_ROW
#undef TERCET_SHORT_ROWS
#undef TERCET_SHORT_SUMS

}  // namespace tercet
#endif
