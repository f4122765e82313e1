// Linear layers: x @ weight.T + bias, with the weight packed into panels. README.md has a picture of a packed weight.
#pragma once

#include <algorithm>
#include <type_traits>

#include "dot.h"
#include "norm.h"
#include "thread_pool.h"

namespace tercet {

/// Bytes of a block of rows of x. It stays in a core's L2 cache while panels pass by.
constexpr int64_t kBlockBytes = 80 * 1024;

/// Products of floats that are summed before they are added to the other sums of a row. A sum of floats loses more bits
/// the longer it is. With 16-bit numbers, their own rounding is far larger than that of the sum.
constexpr int64_t kProductsOfSum = 64;

template <int kRows>
inline void add_sums(Floats (&sums)[kRows][2], const Floats (&part)[kRows][2]) {
  for (int r = 0; r < kRows; ++r)
    for (int side = 0; side < 2; ++side) sums[r][side] += part[r][side];
}

/// sums[r] += row r of x [kRows, k] times a panel, which lies in one piece
template <typename D, int kRows, typename P>
inline void multiply_in_parts(
    const typename D::Row* x, int64_t k, const typename D::Panel* panel, Floats (&sums)[kRows][2], P&& prefetch) {
  constexpr int64_t kPanelStride = kPanel * D::kPerWord;
  const int64_t words = k / D::kPerWord;
  if constexpr (!std::is_same_v<typename D::Row, float>) {
    multiply_panel<D, kRows>(x, k, panel, kPanelStride, words, sums, prefetch);
  } else {
    constexpr int64_t kWords = kProductsOfSum / D::kPerWord;
    for (int64_t word = 0; word < words; word += kWords) {
      Floats part[kRows][2] = {};
      const int64_t count = std::min(kWords, words - word);
      multiply_panel<D, kRows>(
          x + word * D::kPerWord, k, panel + word * kPanelStride, kPanelStride, count, part, prefetch);
      add_sums(sums, part);
    }
  }
}

/// A packed weight: [panels, k / kPerWord, kPanel, kPerWord], with zeros beyond the last column. k is a multiple of
/// kPerWord. X is the type of the numbers of x.
template <typename T, typename X = T>
struct Packed {
  using D = Dot<T, X>;

  const T* panels;
  /// [panels, kPanel] or nullptr
  const float* bias;
  int64_t k;

  static constexpr int64_t kMaxRows = tercet::kMaxRows;
  /// Bytes of a row of x.
  int64_t row_bytes() const { return k * sizeof(X); }
  int64_t panel_bytes() const { return kPanel * k * sizeof(T); }
  int64_t words() const { return k / D::kPerWord; }

  /// What `rows` rows of x are multiplied with.
  const T* open(int64_t panel, [[maybe_unused]] int64_t rows) const { return panels + panel * kPanel * k; }

  /// sums[r] += row (first + r) of x times an opened panel
  template <int kRows>
  void multiply(const X* x, int64_t first, const T* panel, Floats (&sums)[kRows][2], Prefetch prefetch) const {
    multiply_in_parts<D, kRows>(x + first * k, k, panel, sums, prefetch);
  }
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
      const auto opened = weight.open(panel, count);
      const int64_t next_panel = panel + 1 < end ? panel + 1 : next_run;
      const char* next = reinterpret_cast<const char*>(weight.panels) + next_panel * weight.panel_bytes();
      for_each_piece<Weight::kMaxRows>(count, [&](int64_t at, auto piece) {
        const int64_t bytes_per_word = weight.panel_bytes() / weight.words() * piece / count;
        const Prefetch prefetch{next + weight.panel_bytes() * at / count, bytes_per_word};
        Floats sums[piece][2] = {};
        weight.template multiply<piece>(x, first + at, opened, sums, prefetch);
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
template <typename T, typename X>
void unpack_rows(const int64_t* ids, int64_t count, const T* panels, int64_t k, X* out) {
  constexpr int64_t kPerWord = Dot<T, X>::kPerWord;
  for_each_row_block(count, k, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const T* from = panels + ids[i] / kPanel * kPanel * k + ids[i] % kPanel * kPerWord;
      X* to = out + i * k;
      for (int64_t word = 0; word < k; word += kPerWord) std::copy_n(from + word * kPanel, kPerWord, to + word);
    }
  });
}

}  // namespace tercet
