// Products of 8-bit weights with rows of 16 bits, for processors with AVX2 that have no instruction for products of bytes.
//
// VPMADDWD multiplies 16 bits and adds two neighbouring products. Let w0 to w3 be a word of a column and x0 to x3 that of
// a row. In memory the column has the bytes w0 + 128, w1, w2 + 128, w3. Read as 16 bits, they are multiplied twice:
//
//   as they are       w0 + 128 + 256 w1 | w2 + 128 + 256 w3   with   x0 | x2
//   shifted by 8      w1                | w3                  with   x1 - 256 x0 | x3 - 256 x2
//
// The sum is x0 w0 + x1 w1 + x2 w2 + x3 w3 + 128 (x0 + x2). The offset of the row corrects the last term. So a single
// shift unpacks a word, where signed or unsigned bytes alone need two instructions.
//
// A group is written in assembly, because the twelve sums and their operands need all 16 registers. GCC 12 keeps some of
// the sums in memory, in a way that changes with each edit.
#pragma once

#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)
/// Rows that weights of 8 bits multiply have 16 bits.
#define TERCET_ROWS_OF_SHORTS

#include <immintrin.h>

#include <cstddef>

#include "vectors.h"

namespace tercet {

/// Most rows of `multiply_shorts`.
constexpr int kMaxShortRows = 6;

/// Stores whole numbers of at most 127 in magnitude, for each word: x0, x2, x1 - 256 x0, x3 - 256 x2.
inline void store_values(int16_t* to, Vec x) {
  typedef int32_t Wide __attribute__((vector_size(kLanes * sizeof(int32_t))));
  typedef int16_t Narrow __attribute__((vector_size(kLanes * sizeof(int16_t))));
  const Narrow narrow = __builtin_convertvector(__builtin_convertvector(to_floats(x), Wide), Narrow);
  const Narrow ordered = shuffle<0, 2, 1, 3, 4, 6, 5, 7>(narrow, narrow);
  const Narrow even = shuffle<8, 8, 0, 2, 8, 8, 4, 6>(narrow, Narrow{});
  const Narrow stored = ordered - 256 * even;
  std::memcpy(to, &stored, sizeof(stored));
}

// f(r, registers of its sums with the left and right columns, its address) for each row r. The addresses are `at` bytes
// after those of rows 0 and 3, which are in the registers `first` and `fourth`.
#define TERCET_SHORT_ROW(f, r, left, right, address) ".if %c[rows] > " #r "\n\t" f(r, left, right, address) ".endif\n\t"
#define TERCET_SHORT_ROWS(f, at, first, fourth)                                          \
  TERCET_SHORT_ROW(f, 0, "%%ymm0", "%%ymm1", at "(%[" first "])")                        \
  TERCET_SHORT_ROW(f, 1, "%%ymm2", "%%ymm3", at "(%[" first "], %[stride])")             \
  TERCET_SHORT_ROW(f, 2, "%%ymm4", "%%ymm5", at "(%[" first "], %[stride], 2)")          \
  TERCET_SHORT_ROW(f, 3, "%%ymm6", "%%ymm7", at "(%[" fourth "])")                       \
  TERCET_SHORT_ROW(f, 4, "%%ymm8", "%%ymm9", at "(%[" fourth "], %[stride])")            \
  TERCET_SHORT_ROW(f, 5, "%%ymm10", "%%ymm11", at "(%[" fourth "], %[stride], 2)")

#define TERCET_SHORT_BEGIN(r, left, right, address) \
  "vpbroadcastd " address ", " left "\n\t"          \
  "vmovdqa " left ", " right "\n\t"

// Half a word of the columns is in ymm12 and ymm13. Both products before both sums: the other order is 2 % slower.
#define TERCET_SHORT_ADD(r, left, right, address)   \
  "vpbroadcastd " address ", %%ymm14\n\t"           \
  "vpmaddwd %%ymm12, %%ymm14, %%ymm15\n\t"          \
  "vpmaddwd %%ymm13, %%ymm14, %%ymm14\n\t"          \
  "vpaddd %%ymm15, " left ", " left "\n\t"          \
  "vpaddd %%ymm14, " right ", " right "\n\t"

// The scales of the columns are in ymm12 and ymm13.
#define TERCET_SHORT_SCALE(r, left, right, address) \
  "vbroadcastss " address ", %%ymm14\n\t"           \
  "vcvtdq2ps " left ", " left "\n\t"                \
  "vcvtdq2ps " right ", " right "\n\t"              \
  "vmulps " left ", %%ymm14, " left "\n\t"           \
  "vmulps " right ", %%ymm14, " right "\n\t"         \
  "vfmadd213ps 64 * " #r "(%[sums]), %%ymm12, " left "\n\t"         \
  "vfmadd213ps 64 * " #r " + 32(%[sums]), %%ymm13, " right "\n\t"   \
  "vmovaps " left ", 64 * " #r "(%[sums])\n\t"      \
  "vmovaps " right ", 64 * " #r " + 32(%[sums])\n\t"

/// sums[r] += scales of the columns * scale of row r * the sum of the products of row r with a group of a panel.
///
/// values: 32 numbers of each row, as `store_values` has them. row_group: scale and offset of row 0. The next row is
/// `stride` bytes after both. group: scales, float16 [16]; then 8 words of 64 bytes.
template <int kRows, typename RowGroup>
inline void multiply_shorts(
    const int16_t* values, const RowGroup* row_group, int64_t stride, const uint8_t* group, Floats (*sums)[2]) {
  static_assert(kRows <= kMaxShortRows && sizeof(Floats) == 32);
  const char *first = reinterpret_cast<const char*>(values), *first_group = reinterpret_cast<const char*>(row_group);
  asm volatile(
      TERCET_SHORT_ROWS(TERCET_SHORT_BEGIN, "%c[offset]", "first_group", "fourth_group")
      ".set tercet_word, 0\n\t"
      ".rept 8\n\t"
      "vmovdqu 64 * tercet_word + 32(%[group]), %%ymm12\n\t"
      "vmovdqu 64 * tercet_word + 64(%[group]), %%ymm13\n\t"
      TERCET_SHORT_ROWS(TERCET_SHORT_ADD, "8 * tercet_word", "first", "fourth")
      "vpsraw $8, %%ymm12, %%ymm12\n\t"
      "vpsraw $8, %%ymm13, %%ymm13\n\t"
      TERCET_SHORT_ROWS(TERCET_SHORT_ADD, "8 * tercet_word + 4", "first", "fourth")
      ".set tercet_word, tercet_word + 1\n\t"
      ".endr\n\t"
      "vcvtph2ps (%[group]), %%ymm12\n\t"
      "vcvtph2ps 16(%[group]), %%ymm13\n\t"
      TERCET_SHORT_ROWS(TERCET_SHORT_SCALE, "%c[scale]", "first_group", "fourth_group")
      :
      : [rows] "i"(kRows), [first] "r"(first), [fourth] "r"(first + 3 * stride), [first_group] "r"(first_group),
        [fourth_group] "r"(first_group + 3 * stride), [stride] "r"(stride), [group] "r"(group), [sums] "r"(sums),
        [scale] "i"(offsetof(RowGroup, scale)), [offset] "i"(offsetof(RowGroup, offset))
      : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12",
        "ymm13", "ymm14", "ymm15", "memory");
}

#undef TERCET_SHORT_ROW
#undef TERCET_SHORT_ROWS
#undef TERCET_SHORT_BEGIN
#undef TERCET_SHORT_ADD
#undef TERCET_SHORT_SCALE

}  // namespace tercet
#endif
