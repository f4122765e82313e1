// Linear layers: x @ weight.T + bias, with the weight packed into panels. README.md has a picture of a packed weight.
#pragma once

#include <limits>

#include "dot.h"
#include "norm.h"
#include "thread_pool.h"

namespace tercet {

/// Bytes of a block of rows of x. It stays in a core's L2 cache while panels pass by.
constexpr int64_t kBlockBytes = 80 * 1024;

/// A packed weight: [panels, k / kPerWord, kPanel, kPerWord], with zeros beyond the last column. k is a multiple of
/// kPerWord.
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
  void multiply(const T* x, int64_t first, int64_t panel, Floats (&sums)[kRows][2], Prefetch prefetch) const {
    const T* row = x + first * k;
    const T* weights = panels + panel * kPanel * k;
    for (int64_t word = 0; word < words(); word += kWordsOfSum) {
      Floats part[kRows][2] = {};
      const int64_t count = std::min(kWordsOfSum, words() - word), at = word * Dot<T>::kPerWord;
      multiply_panel<T, kRows>(row + at, k, weights + at * kPanel, kPanel * Dot<T>::kPerWord, count, part, prefetch);
      for (int r = 0; r < kRows; ++r)
        for (int side = 0; side < 2; ++side) sums[r][side] += part[r][side];
    }
  }

 private:
  /// Words whose products are summed before they are added to the other sums. A sum of floats loses more bits the longer
  /// it is. With 16-bit numbers, their own rounding is far larger than that of the sum.
  static constexpr int64_t kWordsOfSum = std::is_same_v<T, float> ? 64 : std::numeric_limits<int64_t>::max();
};

/// Multiplies rows of x with all panels. Calls store(row, panel, left sums, right sums) for every row and panel. X is
/// the form of x that this kind of weight multiplies.
///
/// Threads claim runs of neighbouring panels, for one block of rows at a time. While a thread multiplies one panel it
/// prefetches the next one, evenly over all rows: with few rows, memory bandwidth is the limit and should never idle.
/// At the end of a run it prefetches the first panel of the run this thread will probably claim next.
template <typename X, typename Weight, typename Store>
void multiply(const X& x, int64_t rows, const Weight& weight, int64_t num_panels, const Store& store) {
  constexpr int64_t kRunsPerThread = 3, kMaxRunLength = 8;
  const int64_t blocks = ceil_div(rows * weight.row_bytes(), kBlockBytes);
  const int64_t threads = ThreadPool::get().num_threads();
  const int64_t runs = std::min(num_panels, std::max(kRunsPerThread * threads, ceil_div(num_panels, kMaxRunLength)));
  const auto first_panel = [=](int64_t run) { return num_panels * run / runs; };
  ThreadPool::get().run(blocks * runs, [&](int64_t item) {
    // All blocks of rows multiply a run before the next run begins, so its panels are read from memory once.
    const int64_t block = item % blocks, run = item / blocks;
    const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
    const int64_t end = first_panel(run + 1), next_run = first_panel(std::min(runs - 1, (item + threads) / blocks));
    for (int64_t panel = first_panel(run); panel < end; ++panel) {
      Floats bias[2] = {};
      if (weight.bias) {
        bias[0] = load_floats(weight.bias + panel * kPanel);
        bias[1] = load_floats(weight.bias + panel * kPanel + kLanes);
      }
      const int64_t next_panel = panel + 1 < end ? panel + 1 : next_run;
      const char* next = reinterpret_cast<const char*>(weight.panels) + next_panel * weight.panel_bytes();
      for_each_piece<Weight::kMaxRows>(count, [&](int64_t at, auto piece) {
        const int64_t bytes_per_word = weight.panel_bytes() / weight.words() * piece / count;
        const Prefetch prefetch{next + weight.panel_bytes() * at / count, bytes_per_word};
        Floats sums[piece][2] = {};
        weight.template multiply<piece>(x, first + at, panel, sums, prefetch);
        for (int r = 0; r < piece; ++r)
          store(first + at + r, panel, to_vec(sums[r][0] + bias[0]), to_vec(sums[r][1] + bias[1]));
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

/// x [rows, k] -> silu(x @ gate.T) * (x @ up.T) [rows, n]. A panel has kLanes columns of gate, then kLanes of up.
template <typename X, typename Weight, typename Out>
void linear_silu_mul(const X& x, int64_t rows, const Weight& weight, int64_t n, Out* out) {
  multiply(x, rows, weight, ceil_div(n, kLanes), [=](int64_t row, int64_t panel, Vec gate, Vec up) {
    const int64_t column = panel * kLanes;
    const Vec silu = gate / (Vec(1.f) + exp_for<Out>(gate.neg()));
    store_pair(out + row * n + column, {silu * up, Vec(0.f)}, std::min(kLanes, n - column));
  });
}

/// Reads columns of a packed weight [n, k], which are the rows of an embedding, into out [count, k]. ids are below n.
template <typename T>
void unpack_rows(const int64_t* ids, int64_t count, const T* panels, int64_t k, T* out) {
  constexpr int64_t kPerWord = Dot<T>::kPerWord;
  for_each_row_block(count, k, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const T* from = panels + ids[i] / kPanel * kPanel * k + ids[i] % kPanel * kPerWord;
      T* to = out + i * k;
      for (int64_t word = 0; word < k; word += kPerWord) std::copy_n(from + word * kPanel, kPerWord, to + word);
    }
  });
}

}  // namespace tercet
