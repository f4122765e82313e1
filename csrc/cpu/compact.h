// Linear layers with weights of bfloat16 in 12 bits each, without loss. README.md has a picture.
//
// The high byte of a bfloat16 is its sign and most of its exponent. A panel has few different high bytes, so a code of 4
// bits stands for one of the 16 most frequent ones. The low byte stays as it is. The header of a panel lists the other
// numbers, the exceptions. DFloat11 (arXiv 2504.11651) codes exponents of weights for GPUs, with Huffman codes.
#pragma once

#include <array>
#include <numeric>
#include <vector>

#include "linear.h"

namespace tercet {

/// The header of a panel: the high bytes that the codes stand for, the bytes of the header (uint32), the exceptions in
/// ascending order, and zeros. An exception is a uint32: 256 * the number's place in the plain panel + its high byte. The
/// last one is kNoException.
class CompactHeader {
 public:
  static constexpr uint32_t kNoException = ~uint32_t{0};
  static constexpr int64_t kMaxPlaces = 1 << 24;

  explicit CompactHeader(const uint8_t* panel) : panel_(panel) {}

  /// The bytes of a header are a multiple of this.
  static constexpr int64_t kMultiple = 64;

  static int64_t bytes_for(int64_t exceptions) {
    return round_up(kStart + sizeof(uint32_t) * (exceptions + 1), kMultiple);
  }

  const uint8_t* high_bytes() const { return panel_; }
  const uint32_t* exceptions() const { return reinterpret_cast<const uint32_t*>(panel_ + kStart); }
  int64_t num_bytes() const { return exceptions()[-1]; }

  static int64_t place(uint32_t exception) { return exception >> 8; }
  static uint8_t high_byte(uint32_t exception) { return exception & 255; }
  static uint32_t exception(int64_t place, uint8_t high_byte) { return static_cast<uint32_t>(place << 8 | high_byte); }

 private:
  static constexpr int64_t kStart = 16 + sizeof(uint32_t);
  const uint8_t* panel_;
};

/// Two words of all columns of a panel. First come the codes: a byte has that of the first word in its lower half, and
/// that of the second in its upper half. Then come the low bytes of the first word, then those of the second. Bytes have
/// the order in which VPUNPCKLBW and VPUNPCKHBW make the left and the right columns of a word from low and high bytes.
struct CompactGroup {
  static constexpr int64_t kNumbers = 4, kPlaces = kPanel * kNumbers, kBytes = kPlaces * 3 / 2;
  static constexpr int64_t kWordPlaces = kPlaces / 2;

  /// Where the byte of a number is, by the place of the number in its word.
  static int64_t byte_of(int64_t place) {
    const int64_t side = place / kPanel, at = place % kPanel;
    return at / 8 * 16 + side * 8 + at % 8;
  }
};

/// A packed weight of bfloat16: [panels, header and groups]. All headers have the same size.
struct CompactPacked {
  const uint8_t* panels;
  const float* bias;
  int64_t k, header_bytes;

  static constexpr int64_t kMaxRows = tercet::kMaxRows;
  /// With at most so many rows, each piece of rows unpacks the panel. Otherwise the first piece writes it to the cache.
  static constexpr int64_t kWholeRows = 2 * kMaxRows;
  static constexpr int64_t kFewRows = 0;  // one panel whose successor is prefetched is read faster than several at once
  static constexpr bool kPrefetchesParts = false;
  static constexpr int64_t kPerWord = 2;

  struct Opened {
    const uint8_t* panel;
    /// The chunk unpacked, or nullptr.
    at::BFloat16* unpacked;
    bool is_unpacked;
  };

  int64_t row_bytes() const { return k * sizeof(at::BFloat16); }
  static int64_t panel_bytes(int64_t numbers) { return numbers / CompactGroup::kNumbers * CompactGroup::kBytes; }
  int64_t panel_distance() const { return header_bytes + panel_bytes(k); }

#ifdef __AVX512BF16__
  using D = Dot<at::BFloat16>;

  Opened open(int64_t panel, Chunk, int64_t rows, Prefetch) const {
    alignas(64) static thread_local at::BFloat16 unpacked[Tuning::kMaxChunk * kPanel];
    return {panels + panel * panel_distance(), rows <= kWholeRows ? nullptr : unpacked, false};
  }

  template <int kRows>
  void multiply(
      const at::BFloat16* x, int64_t first, Chunk chunk, Opened& opened, RowSums* sums, Prefetch prefetch) const {
    x += first * k + chunk.begin;
    if (opened.is_unpacked) {
      multiply_chunk<D, kRows>(x, k, opened.unpacked, chunk.size(), sums, chunk.begin == 0, prefetch);
    } else if (opened.unpacked) {
      multiply_packed<kRows, true>(x, chunk, opened, sums, prefetch);
      opened.is_unpacked = true;
    } else {
      multiply_packed<kRows, false>(x, chunk, opened, sums, prefetch);
    }
  }

 private:
  /// The words of a group: left and right columns of the first, then of the second.
  using Words = __m512i[4];

  /// Unpacks the groups of a chunk, in order.
  class Reader {
   public:
    Reader(const uint8_t* panel, int64_t header_bytes, Chunk chunk)
        : first_(chunk.begin / CompactGroup::kNumbers),
          groups_(panel + header_bytes + first_ * CompactGroup::kBytes),
          high_bytes_(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel)))),
          exception_(CompactHeader(panel).exceptions()) {
      while (CompactHeader::place(*exception_) < chunk.begin * kPanel) ++exception_;
    }

    /// The next group with an exception.
    int64_t next_exception() const { return CompactHeader::place(*exception_) / CompactGroup::kPlaces - first_; }

    void unpack(int64_t group, Words& words) const {
      const uint8_t* from = groups_ + group * CompactGroup::kBytes;
      const __m512i half = _mm512_set1_epi8(15), codes = _mm512_loadu_si512(from);
      const __m512i high[2] = {
          _mm512_shuffle_epi8(high_bytes_, _mm512_and_si512(codes, half)),
          _mm512_shuffle_epi8(high_bytes_, _mm512_and_si512(_mm512_srli_epi16(codes, 4), half))};
#pragma GCC unroll 2
      for (int word = 0; word < 2; ++word) {
        const __m512i low = _mm512_loadu_si512(from + (word + 1) * sizeof(low));
        words[2 * word] = _mm512_unpacklo_epi8(low, high[word]);
        words[2 * word + 1] = _mm512_unpackhi_epi8(low, high[word]);
      }
    }

    /// Corrects the exceptions of an unpacked group.
    void correct(int64_t group, Words& words) {
      alignas(64) uint8_t bytes[sizeof(Words)];
      std::memcpy(bytes, words, sizeof(bytes));
      exception_ = correct_bytes(bytes, exception_, (first_ + group) * CompactGroup::kPlaces);
      std::memcpy(words, bytes, sizeof(bytes));
    }

   private:
    [[gnu::noinline]] static const uint32_t* correct_bytes(uint8_t* bytes, const uint32_t* exception, int64_t begin) {
      for (; CompactHeader::place(*exception) < begin + CompactGroup::kPlaces; ++exception)
        bytes[2 * (CompactHeader::place(*exception) - begin) + 1] = CompactHeader::high_byte(*exception);
      return exception;
    }

    int64_t first_;
    const uint8_t* groups_;
    __m512i high_bytes_;
    const uint32_t* exception_;
  };

  /// kKeeps: writes what it unpacks to `opened.unpacked`.
  template <int kRows, bool kKeeps>
  void multiply_packed(
      const at::BFloat16* x, Chunk chunk, const Opened& opened, RowSums* sums, Prefetch prefetch) const {
    Reader reader(opened.panel, header_bytes, chunk);
    Prefetcher prefetcher = prefetch.start();
    const RowPointers<at::BFloat16, kRows> rows(x, k);
    Floats part[kRows][2];
    if (chunk.begin == 0)
      unrolled<2 * kRows>([&](auto i) { part[i / 2][i % 2] = Floats{}; });
    else
      unrolled<2 * kRows>([&](auto i) { part[i / 2][i % 2] = sums[i / 2][i % 2]; });
    const auto multiply_group = [&](int64_t group, auto has_exceptions) __attribute__((always_inline)) {
      prefetcher(2);
      Words words;
      reader.unpack(group, words);
      if constexpr (has_exceptions) reader.correct(group, words);
      // For a memcpy of all words, GCC would keep them in memory.
      if constexpr (kKeeps)
        unrolled<4>([&, to = opened.unpacked + group * CompactGroup::kPlaces](auto i) {
          _mm512_store_si512(to + i * kPanel, words[i]);
        });
#pragma GCC unroll 2
      for (int word = 0; word < 2; ++word) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const auto numbers = D::broadcast(rows.at(r, group * CompactGroup::kNumbers + word * kPerWord), 0);
          D::add(part[r][0], numbers, words[2 * word]);
          D::add(part[r][1], numbers, words[2 * word + 1]);
        }
      }
    };
    const int64_t groups = chunk.size() / CompactGroup::kNumbers;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t plain_end = std::min(groups, reader.next_exception());
      for (; group < plain_end; ++group) multiply_group(group, std::false_type());
      if (group < groups) multiply_group(group, std::true_type());
    }
    add_part<false>(sums, part);
  }
#endif
};

/// Packs panels of bfloat16 [panels, k / 2, kPanel, 2] more densely. `numbers`: those of a panel.
class Compactor {
 public:
  Compactor(const uint16_t* panels, int64_t num_panels, int64_t numbers)
      : panels_(panels), numbers_(numbers), tables_(num_panels) {
    std::vector<int64_t> exceptions(num_panels);
    ThreadPool::get().run(num_panels, [&](int64_t panel) { exceptions[panel] = fill_table(panel); });
    total_exceptions_ = std::accumulate(exceptions.begin(), exceptions.end(), int64_t{0});
    header_bytes_ = CompactHeader::bytes_for(*std::max_element(exceptions.begin(), exceptions.end()));
  }

  /// Bytes of a panel.
  int64_t panel_bytes() const { return header_bytes_ + numbers_ * 3 / 2; }

  /// An exception takes as long as some groups. And a panel with many makes all headers large.
  bool pays() const {
    const int64_t all = numbers_ * static_cast<int64_t>(tables_.size());
    return total_exceptions_ * kMinNumbersPerException <= all && panel_bytes() * 8 <= numbers_ * 2 * 7;
  }

  /// out: [panels, panel_bytes()], zeros
  void write(uint8_t* out) const {
    ThreadPool::get().run(tables_.size(), [&](int64_t panel) { write_panel(panel, out + panel * panel_bytes()); });
  }

 private:
  static constexpr int64_t kMinNumbersPerException = 2048;

  /// Chooses the high bytes of a panel. Returns the number of exceptions.
  int64_t fill_table(int64_t panel) {
    std::array<int64_t, 256> counts{};
    const uint16_t* from = panels_ + panel * numbers_;
    for (int64_t i = 0; i < numbers_; ++i) ++counts[from[i] >> 8];
    std::array<uint8_t, 256> bytes;
    std::iota(bytes.begin(), bytes.end(), 0);
    auto& table = tables_[panel];
    std::partial_sort(bytes.begin(), bytes.begin() + table.size(), bytes.end(), [&](uint8_t a, uint8_t b) {
      return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
    });
    std::copy_n(bytes.begin(), table.size(), table.begin());
    int64_t exceptions = numbers_;
    for (const uint8_t byte : table) exceptions -= counts[byte];
    return exceptions;
  }

  void write_panel(int64_t panel, uint8_t* out) const {
    const auto& table = tables_[panel];
    std::array<int, 256> codes;
    codes.fill(-1);
    for (size_t code = 0; code < table.size(); ++code) codes[table[code]] = code;
    std::copy(table.begin(), table.end(), out);
    auto* exceptions = const_cast<uint32_t*>(CompactHeader(out).exceptions());
    exceptions[-1] = header_bytes_;
    uint8_t* group = out + header_bytes_;
    const uint16_t* from = panels_ + panel * numbers_;
    for (int64_t place = 0; place < numbers_; ++place) {
      const int64_t word = place / CompactGroup::kWordPlaces % 2;
      const int64_t at = CompactGroup::byte_of(place % CompactGroup::kWordPlaces);
      const uint8_t high = from[place] >> 8;
      if (codes[high] < 0) *exceptions++ = CompactHeader::exception(place, high);
      group[at] |= std::max(codes[high], 0) << 4 * word;
      group[(word + 1) * CompactGroup::kWordPlaces + at] = from[place] & 255;
      if ((place + 1) % CompactGroup::kPlaces == 0) group += CompactGroup::kBytes;
    }
    *exceptions = CompactHeader::kNoException;
  }

  const uint16_t* panels_;
  int64_t numbers_;
  std::vector<std::array<uint8_t, 16>> tables_;
  int64_t total_exceptions_, header_bytes_;
};

/// Reads columns of a packed weight [n, k], which are the rows of an embedding, into out [count, k]. ids are below n.
inline void unpack_rows(const int64_t* ids, int64_t count, const CompactPacked& weight, at::BFloat16* out) {
  for_each_row_block(count, weight.k, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const uint8_t* panel = weight.panels + ids[i] / kPanel * weight.panel_distance();
      const CompactHeader header(panel);
      const int64_t column = ids[i] % kPanel;
      auto* to = reinterpret_cast<uint16_t*>(out + i * weight.k);
      for (int64_t number = 0; number < weight.k; ++number) {
        const uint8_t* group = panel + weight.header_bytes + number / CompactGroup::kNumbers * CompactGroup::kBytes;
        const int64_t word = number / weight.kPerWord % 2;
        const int64_t at = CompactGroup::byte_of(column * weight.kPerWord + number % weight.kPerWord);
        const uint8_t high = header.high_bytes()[group[at] >> 4 * word & 15];
        to[number] = high << 8 | group[(word + 1) * CompactGroup::kWordPlaces + at];
      }
      for (const uint32_t* e = header.exceptions(); *e != CompactHeader::kNoException; ++e) {
        const int64_t place = CompactHeader::place(*e), word = place / CompactGroup::kWordPlaces;
        const int64_t in_word = place % CompactGroup::kWordPlaces;
        if (in_word / weight.kPerWord != column) continue;
        uint16_t& number = to[word * weight.kPerWord + in_word % weight.kPerWord];
        number = CompactHeader::high_byte(*e) << 8 | (number & 255);
      }
    }
  });
}

}  // namespace tercet
