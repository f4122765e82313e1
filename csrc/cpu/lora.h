// LoRA adapters (arXiv 2106.09685): B (A x) of each row's adapter, added to the result of a linear layer.
#pragma once

#include <vector>

#include "linear.h"

namespace tercet {

/// The adapters of a layer, in slots from 1. T is the type of their numbers. A layer may be stacked of several matrices,
/// each with an A and a B of its own.
template <typename T>
struct LoraTables {
  /// [slots, a_panels, k / kPerWord, kPanel, kPerWord]: the rows of all A of a slot, one after the other.
  const T* a;
  /// [slots, b_panels, rank / kPerWord, kPanel, kPerWord]: the rows of each B begin a panel.
  const T* b;
  /// [slots + 1], the rank of each slot, at most `rank`. 0: there is no adapter. A slot uses the first panels of A and the
  /// first words of each panel of B.
  const int64_t* ranks;
  int64_t slots, k, rank, a_panels, b_panels;
  /// Rows of each B.
  std::vector<int64_t> rows;

  static constexpr int64_t kPerWord = Dot<T>::kPerWord;

  const T* a_panel(int64_t slot, int64_t panel) const { return a + ((slot - 1) * a_panels + panel) * kPanel * k; }
  const T* b_panel(int64_t slot, int64_t panel) const { return b + ((slot - 1) * b_panels + panel) * kPanel * rank; }
  /// Numbers of a row of the results of A.
  int64_t width() const { return a_panels * kPanel; }
  /// Panels of A that a slot uses.
  int64_t used_panels(int64_t slot) const { return ceil_div(static_cast<int64_t>(rows.size()) * ranks[slot], kPanel); }
};

/// Rows that follow one another and have the same adapter.
struct LoraBlock {
  int64_t first, count, slot;

  static constexpr int64_t kMaxRows = 4 * tercet::kMaxRows;
};

/// The blocks of the rows that have an adapter. Each has at most LoraBlock::kMaxRows rows.
template <typename T>
std::vector<LoraBlock> lora_blocks(const int32_t* adapters, int64_t rows, const LoraTables<T>& tables) {
  std::vector<LoraBlock> blocks;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = adapters[row];
    TORCH_CHECK(0 <= slot && slot <= tables.slots, "adapters must be in [0, ", tables.slots, "], got ", slot);
    const int64_t rank = tables.ranks[slot];
    TORCH_CHECK(
        0 <= rank && rank <= tables.rank && rank % tables.kPerWord == 0, "slot ", slot, " has an invalid rank: ", rank);
    if (rank == 0) continue;
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

/// x [rows, k] -> between [rows, width of the tables]: A x of each row of the blocks, in float.
template <typename T, typename X>
void shrink_rows(const X* x, const std::vector<LoraBlock>& blocks, const LoraTables<T>& tables, float* between) {
  const int64_t width = tables.width();
  ThreadPool::get().run(static_cast<int64_t>(blocks.size()) * tables.a_panels, [&](int64_t item) {
    const auto [first, count, slot] = blocks[item / tables.a_panels];
    const int64_t panel = item % tables.a_panels;
    if (panel >= tables.used_panels(slot)) return;
    RowSums sums[LoraBlock::kMaxRows];
    lora_sums(x + first * tables.k, tables.k, count, tables.a_panel(slot, panel), tables.k, sums);
    for (int64_t r = 0; r < count; ++r) {
      float* to = between + (first + r) * width + panel * kPanel;
      store_pair(to, {to_vec(sums[r][0]), to_vec(sums[r][1])});
    }
  });
}

/// out [rows, n] += B of the rows of `between`, in float. Then the sum is rounded to the type of `out`.
template <typename T, typename Out>
void expand_rows(
    const float* between, const std::vector<LoraBlock>& blocks, const LoraTables<T>& tables, int64_t n, Out* out) {
  constexpr int64_t kPanelsOfItem = 16;
  const int64_t items = ceil_div(tables.b_panels, kPanelsOfItem), width = tables.width();
  ThreadPool::get().run(static_cast<int64_t>(blocks.size()) * items, [&](int64_t item) {
    const auto [first, count, slot] = blocks[item / items];
    const int64_t rank = tables.ranks[slot], begin = item % items * kPanelsOfItem;
    int64_t panel = 0, column = 0;  // where the next matrix begins
    for (size_t matrix = 0; matrix < tables.rows.size(); ++matrix) {
      const int64_t rows = tables.rows[matrix], panels = ceil_div(rows, kPanel);
      const int64_t from = std::max(begin - panel, int64_t{0}), to = std::min(begin + kPanelsOfItem - panel, panels);
      for (int64_t at = from; at < to; ++at) {
        RowSums sums[LoraBlock::kMaxRows];
        const float* x = between + first * width + static_cast<int64_t>(matrix) * rank;
        lora_sums(x, width, count, tables.b_panel(slot, panel + at), rank, sums);
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

/// gate_up [rows, 2 * n] -> activation(gate) * up [rows, n]
template <typename Activation, typename T, typename Out>
void activate_gates(const T* gate_up, int64_t rows, int64_t n, Out* out) {
  for_each_row_block(rows, 2 * n, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const T *gates = gate_up + 2 * row * n, *ups = gates + n;
      for (int64_t i = 0; i < n; i += kPanel) {
        const FloatPair gate = load_pair(gates + i, n - i), up = load_pair(ups + i, n - i);
        const FloatPair activated{
            Activation::template of<Out>(gate.left), Activation::template of<Out>(gate.right)};
        store_pair(out + row * n + i, activated * up, n - i);
      }
    }
  });
}

}  // namespace tercet
