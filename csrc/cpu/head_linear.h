// A linear layer for each head: x [rows, heads, k] -> out [rows, heads, n]. In latent attention these map queries to the
// space of latents, and results back.
#pragma once

#include "linear.h"

namespace tercet {

/// Rows of heads: row r, head h at numbers + r * stride + h * head_stride.
template <typename T>
struct HeadRows {
  T* numbers;
  int64_t stride, head_stride;
};

/// The packed weights of all heads, one after the other: [heads * panels, k / kPerWord, kPanel, kPerWord]. Rows of x are
/// x_stride numbers apart.
template <typename T, typename X>
struct HeadsPacked : Packed<T, X> {
  int64_t x_stride;

  const char* address(int64_t panel) const {
    return reinterpret_cast<const char*>(this->panels) + panel * this->panel_distance();
  }

  /// As in `Packed`, whose rows of x are k numbers apart.
  template <int kRows, int kPanels = 1, typename P>
  void multiply(const X* x, int64_t first, Chunk chunk, const T* opened, RowSums* sums, P prefetch) const {
    multiply_chunk<typename Packed<T, X>::D, kRows, kPanels>(
        x + first * x_stride + chunk.begin, x_stride, opened, chunk.size(), sums, chunk.begin == 0, prefetch,
        kPanel * this->k);
  }
};

/// Stores the sums of a row of one head. first_panel: of the head.
template <typename Out>
struct StoreHead {
  Out* out;
  int64_t stride, n, first_panel;

  void operator()(int64_t row, int64_t panel, Vec left, Vec right) const {
    const int64_t column = (panel - first_panel) * kPanel;
    store_pair(out + row * stride + column, {left, right}, n - column);
  }
  void prefetch(int64_t row, int64_t panel) const {
    prefetch_to_write(out + row * stride + (panel - first_panel) * kPanel);
  }
};

/// Multiplies rows of x with the weights of their heads. Threads claim runs of neighbouring panels, as in `multiply`
/// (linear.h). A run may have panels of several heads.
template <typename T, typename X, typename Out>
void head_linear(
    const HeadRows<const X>& x,
    int64_t rows,
    int64_t heads,
    const HeadsPacked<T, X>& weight,
    const NextWeight& next_weight,
    int64_t n,
    const HeadRows<Out>& out) {
  using Weight = HeadsPacked<T, X>;
  const int64_t panels = ceil_div(n, kPanel), threads = ThreadPool::get().num_threads();
  const int64_t blocks = std::min(
      rows, std::max(ceil_div(rows * weight.row_bytes(), Tuning::get().block_bytes), ceil_div(rows, kMaxBlockRows)));
  const Runs runs(heads * panels, threads), next_runs(next_weight.num_panels, threads);
  const int64_t items = blocks * runs.count();
  const auto first_of_item = [&](int64_t item) {
    if (item < items || !next_weight.panels)
      return weight.address(runs.first_panel(std::min(runs.count() - 1, item / blocks)));
    const int64_t run = std::min(next_runs.count() - 1, item - items);
    return next_weight.panels + next_runs.first_panel(run) * next_weight.panel_bytes;
  };
  ThreadPool::get().run(items, [&](int64_t item) {
    const int64_t block = item % blocks, index = item / blocks;
    const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
    const int64_t begin = runs.first_panel(index), end = runs.first_panel(index + 1);
    for (int64_t from = begin, to; from < end; from = to) {
      const int64_t head = from / panels;
      to = std::min(end, (head + 1) * panels);
      const Run run{from, to, to < end ? weight.address(to) : first_of_item(item + threads)};
      const X* x_of_head = x.numbers + head * x.head_stride;
      const StoreHead<Out> store{out.numbers + head * out.head_stride, out.stride, n, head * panels};
      if (count <= Weight::kFewRows)
        for_each_piece<Weight::kFewRows>(
            count, [&](int64_t, auto few) { multiply_few_rows<few>(x_of_head, first, weight, run, store); });
      else
        multiply_block(x_of_head, first, count, weight, run, store);
    }
  });
}

/// x as floats.
template <typename T>
void widen_heads(const HeadRows<const T>& x, int64_t rows, int64_t heads, int64_t k, const HeadRows<float>& out) {
  for_each_row_block(rows, heads * k, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row)
      for (int64_t head = 0; head < heads; ++head) {
        const T* from = x.numbers + row * x.stride + head * x.head_stride;
        float* to = out.numbers + row * out.stride + head * out.head_stride;
        for (int64_t i = 0; i < k; i += kPanel) store_pair(to + i, load_pair(from + i, k - i), k - i);
      }
  });
}

}  // namespace tercet
