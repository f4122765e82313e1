// What the assembly of short_products.h and byte_products.h shares: the rows of a piece, and the scales of a group.
//
// A group is written in assembly, because the twelve sums and their operands need 16 registers. GCC 12 keeps some of the
// sums in memory, in a way that changes with each edit. Registers 0 to 11 are the sums, two for each row. Registers 12
// and 13 belong to the columns, 14 and 15 are for intermediate values.
//
// The operands of each asm statement: group, the address of the group; sums, that of the sums of floats; first_group and
// fourth_group, the addresses of what belongs to the group of rows 0 and 3; stride, the bytes from row to row; and
// TERCET_ASSEMBLY_CONSTANTS.
#pragma once

#if defined(__AVX2__) && (!defined(__AVX512BW__) || defined(__AVX512VNNI__))

#include <immintrin.h>

#include <cstddef>

#include "vectors.h"

namespace tercet {

/// Most rows of a product in assembly.
constexpr int kMaxAssemblyRows = 6;

}  // namespace tercet

#ifdef __AVX512F__
#define TERCET_REGISTER(n) "%%zmm" #n
#define TERCET_VECTOR_BYTES "64"
#else
#define TERCET_REGISTER(n) "%%ymm" #n
#define TERCET_VECTOR_BYTES "32"
#endif

// f(r, registers of its sums with the left and right columns, its sums of floats, its address) for each row r. The
// addresses are `at` bytes after those of rows 0 and 3, which are in the registers `first` and `fourth`.
#define TERCET_ROW(f, r, left, right, float_left, float_right, address)                                             \
  ".if %c[rows] > " #r "\n\t"                                                                                       \
  f(TERCET_REGISTER(left), TERCET_REGISTER(right), TERCET_FLOATS(r, float_left), TERCET_FLOATS(r, float_right), address) \
  ".endif\n\t"
#define TERCET_ROWS(f, at, first, fourth)                                      \
  TERCET_ROW(f, 0, 0, 1, 16, 17, at "(%[" first "])")                          \
  TERCET_ROW(f, 1, 2, 3, 18, 19, at "(%[" first "], %[stride])")               \
  TERCET_ROW(f, 2, 4, 5, 20, 21, at "(%[" first "], %[stride], 2)")            \
  TERCET_ROW(f, 3, 6, 7, 22, 23, at "(%[" fourth "])")                         \
  TERCET_ROW(f, 4, 8, 9, 24, 25, at "(%[" fourth "], %[stride])")              \
  TERCET_ROW(f, 5, 10, 11, 26, 27, at "(%[" fourth "], %[stride], 2)")

// Sums of floats are in registers 16 to 27 with AVX-512. With AVX2 they are in memory.
#ifdef __AVX512F__
#define TERCET_FLOATS(r, n) TERCET_REGISTER(n)
#define TERCET_ADD_SCALED(sum, scale, floats) "vfmadd231ps " sum ", " scale ", " floats "\n\t"
#define TERCET_ADD_MINIMUM(sum, minimum, factor, floats) "vfmadd231ps " minimum ", " factor ", " floats "\n\t"
#else
#define TERCET_FLOATS(r, n) "32 * (" #n " - 16)(%[sums])"
#define TERCET_ADD_SCALED(sum, scale, floats)         \
  "vfmadd213ps " floats ", " scale ", " sum "\n\t"    \
  ".if !%c[has_min]\n\t"                              \
  "vmovaps " sum ", " floats "\n\t"                   \
  ".endif\n\t"
#define TERCET_ADD_MINIMUM(sum, minimum, factor, floats)    \
  "vfmadd231ps " minimum ", " factor ", " sum "\n\t"        \
  "vmovaps " sum ", " floats "\n\t"
#endif

// The sums begin with the offset of the row, or with zero if weights have a minimum.
#define TERCET_BEGIN_ROW(left, right, float_left, float_right, address) \
  ".if %c[has_min]\n\t"                                                 \
  "vxorps " left ", " left ", " left "\n\t"                             \
  ".else\n\t"                                                           \
  "vpbroadcastd " address ", " left "\n\t"                              \
  ".endif\n\t"                                                          \
  "vmovaps " left ", " right "\n\t"
#define TERCET_BEGIN_ROWS TERCET_ROWS(TERCET_BEGIN_ROW, "%c[offset]", "first_group", "fourth_group")

#define TERCET_LOAD_HALVES(vector)                                                         \
  "vcvtph2ps " TERCET_VECTOR_BYTES " * " vector "(%[group]), " TERCET_REGISTER(12) "\n\t"  \
  "vcvtph2ps " TERCET_VECTOR_BYTES " * " vector " + " TERCET_VECTOR_BYTES " / 2(%[group]), " TERCET_REGISTER(13) "\n\t"

#define TERCET_SCALE_ROW(left, right, float_left, float_right, address)                             \
  "vbroadcastss " address ", " TERCET_REGISTER(14) "\n\t"                                           \
  "vcvtdq2ps " left ", " left "\n\t"                                                                \
  "vcvtdq2ps " right ", " right "\n\t"                                                              \
  "vmulps " TERCET_REGISTER(12) ", " TERCET_REGISTER(14) ", " TERCET_REGISTER(15) "\n\t"            \
  "vmulps " TERCET_REGISTER(13) ", " TERCET_REGISTER(14) ", " TERCET_REGISTER(14) "\n\t"            \
  TERCET_ADD_SCALED(left, TERCET_REGISTER(15), float_left)                                          \
  TERCET_ADD_SCALED(right, TERCET_REGISTER(14), float_right)

#define TERCET_ADD_MINIMA(left, right, float_left, float_right, address)                            \
  "vbroadcastss " address ", " TERCET_REGISTER(14) "\n\t"                                           \
  TERCET_ADD_MINIMUM(left, TERCET_REGISTER(12), TERCET_REGISTER(14), float_left)                    \
  TERCET_ADD_MINIMUM(right, TERCET_REGISTER(13), TERCET_REGISTER(14), float_right)

// Adds the scaled sums of a group, and then its minima, to the sums of floats.
#define TERCET_SCALE_ROWS                                                   \
  TERCET_LOAD_HALVES("0")                                                   \
  TERCET_ROWS(TERCET_SCALE_ROW, "%c[scale]", "first_group", "fourth_group") \
  ".if %c[has_min]\n\t"                                                     \
  TERCET_LOAD_HALVES("1")                                                   \
  TERCET_ROWS(TERCET_ADD_MINIMA, "%c[sum]", "first_group", "fourth_group") \
  ".endif\n\t"

// The places of the numbers in a `RowGroup`, and the constants of a weight.
#define TERCET_ASSEMBLY_CONSTANTS(rows_, has_min_)                                                                  \
  [rows] "i"(rows_), [has_min] "i"(has_min_), [scale] "i"(offsetof(RowGroup, scale)),                               \
      [sum] "i"(offsetof(RowGroup, sum)), [offset] "i"(offsetof(RowGroup, offset))

#define TERCET_ASSEMBLY_REGISTERS                                                                                       \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
      "xmm14", "xmm15", "memory"

#endif
