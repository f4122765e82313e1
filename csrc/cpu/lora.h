// LoRA adapters (arXiv 2106.09685): B (A x) of each row's adapter, added to the result of a linear layer.
#pragma once

#include <c10/util/Exception.h>

#include <vector>

#include "linear.h"

namespace tercet {

/// The adapters of rows. A layer has those of all requests in slots from 1.
struct RowAdapters {
  /// [rows], 0: none
  const int32_t* slots;
  /// [num_slots + 1], the rank of each slot. 0: there is no adapter.
  const int64_t* ranks;
  int64_t num_slots;

  int64_t rank(int64_t row) const { return ranks[slots[row]]; }
};

/// The matrices A of a layer. A layer may be stacked of several matrices, each with an A and a B of its own.
template <typename T>
struct LoraA {
  /// [slots, num_panels, k / kPerWord, kPanel, kPerWord]: the rows of all A of a slot, one after the other. A slot of a
  /// lower rank uses the first panels.
  const T* panels;
  int64_t num_panels, k, matrices;

  static constexpr int64_t kPerWord = Dot<T>::kPerWord;

  const T* panel(int64_t slot, int64_t index) const { return panels + ((slot - 1) * num_panels + index) * kPanel * k; }
  /// The numbers of a row of the results.
  int64_t width() const { return num_panels * kPanel; }
  int64_t max_rank() const { return width() / matrices; }
};

/// The matrices B of a layer.
template <typename T>
struct LoraB {
  /// [slots, num_panels, max_rank / kPerWord, kPanel, kPerWord]: the rows of each B begin a panel. A slot of a lower rank
  /// uses the first words of each panel.
  const T* panels;
  int64_t num_panels, max_rank;
  /// Rows of each B.
  std::vector<int64_t> rows;

  static constexpr int64_t kPerWord = Dot<T>::kPerWord;

  const T* panel(int64_t slot, int64_t index) const {
    return panels + ((slot - 1) * num_panels + index) * kPanel * max_rank;
  }
};

/// Whether any row has an adapter. Raises an error if that of a row is invalid.
inline bool have_adapters(const RowAdapters& adapters, int64_t rows, int64_t max_rank, int64_t per_word) {
  bool found = false;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = adapters.slots[row];
    TORCH_CHECK(
        0 <= slot && slot <= adapters.num_slots, "adapters must be in [0, ", adapters.num_slots, "], got ", slot);
    const int64_t rank = adapters.ranks[slot];
    TORCH_CHECK(0 <= rank && rank <= max_rank && rank % per_word == 0, "slot ", slot, " has an invalid rank: ", rank);
    found = found || rank > 0;
  }
  return found;
}

/// Rows that follow one another and have the same adapter.
struct LoraBlock {
  int64_t first, count, slot;

  static constexpr int64_t kMaxRows = 4 * tercet::kMaxRows;
};

/// The blocks of the rows that have an adapter. Each has at most LoraBlock::kMaxRows rows.
inline std::vector<LoraBlock> lora_blocks(const RowAdapters& adapters, int64_t rows) {
  std::vector<LoraBlock> blocks;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = adapters.slots[row];
    if (adapters.rank(row) == 0) continue;
    const bool continues = !blocks.empty() && blocks.back().slot == slot &&
        blocks.back().first + blocks.back().count == row && blocks.back().count < LoraBlock::kMaxRows;
    if (continues)
      ++blocks.back().count;
    else
      blocks.push_back({row, 1, slot});
  }
  return blocks;
}

/// The sums of rows with a panel. The bits of a row do not depend on the other rows.
template <typename T, typename X>
[[gnu::noinline]] void lora_sums(
    const X* x, int64_t x_stride, int64_t rows, const T* panel, int64_t numbers, RowSums* sums) {
  for_each_piece(rows, [&](int64_t at, auto piece) {
    multiply_chunk<Dot<T, X>, piece>(
        x + at * x_stride, x_stride, panel, numbers, sums + at, /*is_first=*/true, NoPrefetch());
  });
}

/// x [rows, k] -> out [rows, a.width()]: A x of each row that has an adapter, in float.
template <typename T, typename X>
void shrink_rows(const X* x, const RowAdapters& adapters, int64_t rows, const LoraA<T>& a, float* out) {
  const auto blocks = lora_blocks(adapters, rows);
  ThreadPool::get().run(static_cast<int64_t>(blocks.size()) * a.num_panels, [&](int64_t item) {
    const auto [first, count, slot] = blocks[item / a.num_panels];
    const int64_t panel = item % a.num_panels;
    if (panel * kPanel >= a.matrices * adapters.ranks[slot]) return;
    RowSums sums[LoraBlock::kMaxRows];
    lora_sums(x + first * a.k, a.k, count, a.panel(slot, panel), a.k, sums);
    for (int64_t r = 0; r < count; ++r) {
      float* to = out + (first + r) * a.width() + panel * kPanel;
      store_pair(to, {to_vec(sums[r][0]), to_vec(sums[r][1])});
    }
  });
}

/// out [rows, n] += B of the rows of `shrunk` [rows, width], in float. Then the sum is rounded to the type of `out`.
template <typename T, typename Out>
void expand_rows(
    const float* shrunk,
    int64_t width,
    const RowAdapters& adapters,
    int64_t num_rows,
    const LoraB<T>& b,
    int64_t n,
    Out* out) {
  constexpr int64_t kPanelsOfItem = 16;
  const auto blocks = lora_blocks(adapters, num_rows);
  const int64_t items = ceil_div(b.num_panels, kPanelsOfItem);
  ThreadPool::get().run(static_cast<int64_t>(blocks.size()) * items, [&](int64_t item) {
    const auto [first, count, slot] = blocks[item / items];
    const int64_t rank = adapters.ranks[slot], begin = item % items * kPanelsOfItem;
    int64_t panel = 0, column = 0;  // where the next matrix begins
    for (size_t matrix = 0; matrix < b.rows.size(); ++matrix) {
      const int64_t rows = b.rows[matrix], panels = ceil_div(rows, kPanel);
      const int64_t from = std::max(begin - panel, int64_t{0}), to = std::min(begin + kPanelsOfItem - panel, panels);
      for (int64_t at = from; at < to; ++at) {
        RowSums sums[LoraBlock::kMaxRows];
        const float* x = shrunk + first * width + static_cast<int64_t>(matrix) * rank;
        lora_sums(x, width, count, b.panel(slot, panel + at), rank, sums);
        const int64_t left = rows - at * kPanel;
        for (int64_t r = 0; r < count; ++r) {
          Out* sum = out + (first + r) * n + column + at * kPanel;
          store_pair(sum, load_pair(sum, left) + FloatPair{to_vec(sums[r][0]), to_vec(sums[r][1])}, left);
        }
      }
      panel += panels;
      column += rows;
    }
  });
}

/// What adapters add to a gate and up projection: B of the rows of `shrunk` [rows, width]. B has as many rows of gate as
/// of up.
template <typename T>
class LoraGates final : public GateParts {
 public:
  LoraGates(const float* shrunk, int64_t width, const RowAdapters& adapters, LoraB<T> b)
      : shrunk_(shrunk), width_(width), adapters_(adapters), b_(std::move(b)) {}

  bool is_needed(int64_t rows) const override {
    return have_adapters(adapters_, rows, std::min(b_.max_rank, width_ / 2), LoraB<T>::kPerWord);
  }

  void add(int64_t first, int64_t rows, int64_t panel, RowSums* sums, int64_t stride) const override {
    const int32_t* slots = adapters_.slots + first;
    for (int64_t at = 0, end; at < rows; at = end) {
      for (end = at + 1; end < rows && slots[end] == slots[at];) ++end;
      if (adapters_.ranks[slots[at]] == 0) continue;
      for_each_piece(end - at, [&](int64_t begin, auto piece) {
        add_piece<piece>(first + at + begin, panel, sums + (at + begin) * stride, stride);
      });
    }
  }

 private:
  using D = Dot<T, float>;

  /// The same for kRows rows of one adapter. The bits of a row do not depend on the other rows.
  template <int kRows>
  void add_piece(int64_t first, int64_t panel, RowSums* sums, int64_t stride) const {
    // A panel of StoreGated is one side of a panel of gate, and of one of up.
    const T* gates = b_.panel(adapters_.slots[first], panel / 2) + panel % 2 * kLanes * D::kPerWord;
    const T* ups = gates + b_.num_panels / 2 * kPanel * b_.max_rank;
    const int64_t rank = adapters_.rank(first);
    const RowPointers<float, kRows> of_gate(shrunk_ + first * width_, width_);
    const RowPointers<float, kRows> of_up(shrunk_ + first * width_ + rank, width_);
    Floats parts[kRows][2];
    unrolled<2 * kRows>([&](auto i) { parts[i / 2][i % 2] = Floats{}; });
    for (int64_t at = 0; at < rank; at += D::kPerWord, gates += kPanel * D::kPerWord, ups += kPanel * D::kPerWord) {
      unrolled<D::kParts>([&](auto part) {
        const auto gate = D::load_side(gates, part), up = D::load_side(ups, part);
        unrolled<kRows>([&](auto r) {
          D::add(parts[r][0], D::broadcast(of_gate.at(r, at), part), gate);
          D::add(parts[r][1], D::broadcast(of_up.at(r, at), part), up);
        });
      });
    }
    unrolled<2 * kRows>([&](auto i) { sums[i / 2 * stride][i % 2] += parts[i / 2][i % 2]; });
  }

  const float* shrunk_;
  int64_t width_;
  RowAdapters adapters_;
  LoraB<T> b_;
};

}  // namespace tercet
