// Products of weights of 8 or 4 bits with rows of 8 bits, for processors with VPDPBUSD, which multiplies bytes.
//
// To the 96 VPDPBUSD of six rows with a group come 24 multiplications with scales, or 36 with scales and minima. The same
// units execute them. So 80 % of the rate of VPDPBUSD is the limit with 8 bits, and 73 % with 4. More rows share a load of
// the columns, but 8 to 12 rows were slower than 6.
#pragma once

#include "group_assembly.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
/// Rows of bytes are multiplied in assembly.
#define TERCET_BYTE_PRODUCTS

namespace tercet {

#ifdef __AVX512VNNI__
#define TERCET_DPBUSD "vpdpbusd "
#else
#define TERCET_DPBUSD "%{vex%} vpdpbusd "  // the other encoding needs AVX-512
#endif

#define TERCET_ADD_BYTES(left, right, float_left, float_right, address)                      \
  "vpbroadcastd " address ", " TERCET_REGISTER(14) "\n\t"                                    \
  TERCET_DPBUSD TERCET_REGISTER(14) ", " TERCET_REGISTER(12) ", " left "\n\t"                \
  TERCET_DPBUSD TERCET_REGISTER(14) ", " TERCET_REGISTER(13) ", " right "\n\t"

#define TERCET_LOAD_BYTES(vector, n) \
  "vmovups " TERCET_VECTOR_BYTES " * (" vector ")(%[group]), " TERCET_REGISTER(n) "\n\t"

// With AVX-512, the sums of floats are in registers between groups.
#ifdef __AVX512F__
#define TERCET_LOAD_FLOATS(left, right, float_left, float_right, address)     \
  "vmovaps " address ", " float_left "\n\t"                                   \
  "vmovaps 64 + " address ", " float_right "\n\t"
#define TERCET_STORE_FLOATS(left, right, float_left, float_right, address)    \
  "vmovaps " float_left ", " address "\n\t"                                   \
  "vmovaps " float_right ", 64 + " address "\n\t"
#define TERCET_EACH_FLOATS(f)                                                 \
  TERCET_ROW(f, 0, 0, 1, 16, 17, "0(%[sums])")                                \
  TERCET_ROW(f, 1, 2, 3, 18, 19, "128(%[sums])")                              \
  TERCET_ROW(f, 2, 4, 5, 20, 21, "256(%[sums])")                              \
  TERCET_ROW(f, 3, 6, 7, 22, 23, "384(%[sums])")                              \
  TERCET_ROW(f, 4, 8, 9, 24, 25, "512(%[sums])")                              \
  TERCET_ROW(f, 5, 10, 11, 26, 27, "640(%[sums])")
#define TERCET_FLOAT_REGISTERS                                                                                     \
  , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27"
#else
#define TERCET_EACH_FLOATS(f)
#define TERCET_FLOAT_REGISTERS
#endif

/// sums[r] += the products of row r with groups of a panel, one group after the other: scales of the columns * scale of
/// row r * the sum of the integers. Weights of 4 bits then add minima of the columns * sum of row r.
///
/// values: 32 numbers of each row, for each group. row_groups: what belongs to the groups of row 0. The next row is
/// `stride` bytes after both. panel: `groups` groups, at least one, as `Dot` of the weights says.
///
/// Prefetches `bytes` bytes from `next` with each word; with more than two rows, those of a group at once. Of few rows,
/// memory is the limit, and prefetches that are spread evenly leave it the least idle.
template <bool kHasMin, int kRows, typename RowGroup>
[[gnu::always_inline]] inline void multiply_bytes(
    const int8_t* values,
    const RowGroup* row_groups,
    int64_t stride,
    int64_t groups,
    const uint8_t* panel,
    Floats (*sums)[2],
    const char* next,
    int64_t bytes) {
  static_assert(kRows <= kMaxAssemblyRows);
  static constexpr int32_t kLowHalves = 0x0f0f0f0f;
  const char *first = reinterpret_cast<const char*>(values), *first_group = reinterpret_cast<const char*>(row_groups);
  const char *fourth = first + 3 * stride, *fourth_group = first_group + 3 * stride, *end = next;
  if (kRows > 2) bytes *= 8;
  asm volatile(
      TERCET_EACH_FLOATS(TERCET_LOAD_FLOATS)
      "1:\n\t"
      ".if %c[rows] > 2\n\t"
      "add %[bytes], %[end]\n\t"
      "cmp %[end], %[next]\n\t"
      "jae 3f\n"
      "2:\n\t"
      "prefetcht1 (%[next])\n\t"
      "add $64, %[next]\n\t"
      "cmp %[end], %[next]\n\t"
      "jb 2b\n"
      "3:\n\t"
      ".endif\n\t"
      TERCET_BEGIN_ROWS
      ".if %c[has_min]\n\t"
      "vpbroadcastd %[low_halves], " TERCET_REGISTER(15) "\n\t"
      ".endif\n\t"
      ".set tercet_word, 0\n\t"
      ".rept 8\n\t"
      ".if %c[rows] <= 2\n\t"
      "prefetcht1 (%[next])\n\t"
      "prefetcht1 64(%[next])\n\t"
      "add %[bytes], %[next]\n\t"
      ".endif\n\t"
      ".if %c[has_min]\n\t"
      TERCET_LOAD_BYTES("2 + tercet_word", 12)
      "vpsrlw $4, " TERCET_REGISTER(12) ", " TERCET_REGISTER(13) "\n\t"
      "vandps " TERCET_REGISTER(15) ", " TERCET_REGISTER(12) ", " TERCET_REGISTER(12) "\n\t"
      "vandps " TERCET_REGISTER(15) ", " TERCET_REGISTER(13) ", " TERCET_REGISTER(13) "\n\t"
      ".else\n\t"
      TERCET_LOAD_BYTES("1 + 2 * tercet_word", 12)
      TERCET_LOAD_BYTES("2 + 2 * tercet_word", 13)
      ".endif\n\t"
      TERCET_ROWS(TERCET_ADD_BYTES, "4 * tercet_word", "first", "fourth")
      ".set tercet_word, tercet_word + 1\n\t"
      ".endr\n\t"
      TERCET_SCALE_ROWS
      "add $32, %[first]\n\t"
      "add $32, %[fourth]\n\t"
      "add %[row_group], %[first_group]\n\t"
      "add %[row_group], %[fourth_group]\n\t"
      "add %[group_bytes], %[group]\n\t"
      "dec %[groups]\n\t"
      "jnz 1b\n\t"
      TERCET_EACH_FLOATS(TERCET_STORE_FLOATS)
      : [first] "+r"(first), [fourth] "+r"(fourth), [first_group] "+r"(first_group), [fourth_group] "+r"(fourth_group),
        [group] "+r"(panel), [groups] "+r"(groups), [next] "+r"(next), [end] "+r"(end)
      : [stride] "r"(stride), [sums] "r"(sums), [bytes] "r"(bytes), [low_halves] "m"(kLowHalves),
        [row_group] "i"(sizeof(RowGroup)), [group_bytes] "i"((kHasMin ? 10 : 17) * sizeof(Floats)),
        TERCET_ASSEMBLY_CONSTANTS(kRows, kHasMin)
      : TERCET_ASSEMBLY_REGISTERS TERCET_FLOAT_REGISTERS);
}

#undef TERCET_DPBUSD
#undef TERCET_ADD_BYTES
#undef TERCET_LOAD_BYTES
#undef TERCET_LOAD_FLOATS
#undef TERCET_STORE_FLOATS
#undef TERCET_EACH_FLOATS
#undef TERCET_FLOAT_REGISTERS

}  // namespace tercet
#endif
