// x @ weight.T + bias over a weight that has been packed into panels.
#pragma once

#include "dot.h"
#include "norm.h"
#include "pool.h"

namespace tercet {

/// Bytes of x that stay in a core's cache while panels pass by.
constexpr int64_t kBlockBytes = 80 * 1024;

/// packed: [panels, k / kPerWord, kPanel, kPerWord], zeros beyond the last column; k is a multiple of kPerWord.
template <typename T>
struct Packed {
  const T* panels;
  /// [panels, kPanel] or nullptr
  const float* bias;
  int64_t k;

  static constexpr int64_t kMaxRows = tercet::kMaxRows;
  int64_t row_bytes() const { return k * sizeof(T); }
  int64_t panel_bytes() const { return kPanel * row_bytes(); }
  int64_t words() const { return k / Dot<T>::kPerWord; }

  /// sums[r] += row (first + r) of x times a panel
  template <int kRows>
  void multiply(const T* x, int64_t first, int64_t panel, Floats (&sums)[kRows][2], Fetch fetch) const {
    const T* weights = panels + panel * kPanel * k;
    multiply_panel<T, kRows>(x + first * k, k, weights, kPanel * Dot<T>::kPerWord, words(), sums, fetch);
  }
};

/// For every row and panel: finish(row, panel, left sums, right sums). X: what this kind of weight multiplies.
///
/// A thread takes a run of neighbouring panels for a block of rows. While it multiplies with one panel it brings the next
/// from memory, evenly over all rows: with few rows memory is what limits, and it should never rest. After the last of a
/// run that is the first of the run that this thread comes to if all are as fast.
template <typename X, typename Weight, typename Finish>
void multiply(const X& x, int64_t rows, const Weight& weight, int64_t num_panels, const Finish& finish) {
  constexpr int64_t kRunsOfThread = 3, kLongestRun = 8;
  const int64_t blocks = ceil_div(rows * weight.row_bytes(), kBlockBytes);
  const int64_t threads = Pool::get().num_threads();
  const int64_t runs = std::min(num_panels, std::max(kRunsOfThread * threads, ceil_div(num_panels, kLongestRun)));
  const auto first_panel = [=](int64_t run) { return num_panels * run / runs; };
  Pool::get().run(blocks * runs, [&](int64_t item) {
    // All blocks meet the same panels one after the other: these are read from memory once.
    const int64_t block = item % blocks, run = item / blocks;
    const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
    const int64_t end = first_panel(run + 1), later = first_panel(std::min(runs - 1, (item + threads) / blocks));
    for (int64_t panel = first_panel(run); panel < end; ++panel) {
      Floats bias[2] = {};
      if (weight.bias) {
        bias[0] = load_floats(weight.bias + panel * kPanel);
        bias[1] = load_floats(weight.bias + panel * kPanel + kLanes);
      }
      const int64_t next_panel = panel + 1 < end ? panel + 1 : later;
      const char* next = reinterpret_cast<const char*>(weight.panels) + next_panel * weight.panel_bytes();
      in_pieces<Weight::kMaxRows>(count, [&](int64_t at, auto piece) {
        const Fetch fetch{next + weight.panel_bytes() * at / count, weight.panel_bytes() / weight.words() * piece / count};
        Floats sums[piece][2] = {};
        weight.template multiply<piece>(x, first + at, panel, sums, fetch);
        for (int r = 0; r < piece; ++r)
          finish(first + at + r, panel, vec_of(sums[r][0] + bias[0]), vec_of(sums[r][1] + bias[1]));
      });
    }
  });
}

/// x [rows, k] -> out [rows, n]
template <typename X, typename Weight, typename Out>
void linear(const X& x, int64_t rows, const Weight& weight, int64_t n, Out* out) {
  multiply(x, rows, weight, ceil_div(n, kPanel), [=](int64_t row, int64_t panel, Vec left, Vec right) {
    const int64_t column = panel * kPanel;
    store_pair(out + row * n + column, {left, right}, n - column);
  });
}

/// x [rows, k] -> silu(x @ gate.T) * (x @ up.T) [rows, n]; a panel has kLanes columns of gate, then the same of up.
template <typename X, typename Weight, typename Out>
void linear_silu_mul(const X& x, int64_t rows, const Weight& weight, int64_t n, Out* out) {
  multiply(x, rows, weight, ceil_div(n, kLanes), [=](int64_t row, int64_t panel, Vec gate, Vec up) {
    const int64_t column = panel * kLanes;
    const Vec silu = gate / (Vec(1.f) + exp_for<Out>(gate.neg()));
    store_pair(out + row * n + column, {silu * up, Vec(0.f)}, std::min(kLanes, n - column));
  });
}

/// Columns of a packed weight [n, k], the rows of an embedding: out [count, k]. ids are below n.
template <typename T>
void unpack_rows(const int64_t* ids, int64_t count, const T* panels, int64_t k, T* out) {
  constexpr int64_t kPerWord = Dot<T>::kPerWord;
  in_row_blocks(count, k, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const T* from = panels + ids[i] / kPanel * kPanel * k + ids[i] % kPanel * kPerWord;
      for (int64_t word = 0; word < k; word += kPerWord) std::copy_n(from + word * kPanel, kPerWord, out + i * k + word);
    }
  });
}

}  // namespace tercet
