// x @ weight.T + bias over a weight that has been packed into panels.
#pragma once

#include "dot.h"
#include "pool.h"

namespace tercet {

/// Bytes of x that stay in a core's cache while panels pass by.
constexpr int64_t kBlockBytes = 160 * 1024;

/// packed: [panels, k / kPerWord, kPanel, kPerWord], zeros beyond the last column; k is a multiple of kPerWord.
template <typename T>
struct Packed {
  const T* panels;
  /// [panels, kPanel] or nullptr
  const float* bias;
  int64_t k;

  static constexpr int64_t kMaxRows = tercet::kMaxRows;
  int64_t row_bytes() const { return k * sizeof(T); }

  /// sums[r] += row (first + r) of x times a panel
  template <int kRows>
  void multiply(const T* x, int64_t first, int64_t panel, Floats (&sums)[kRows][2]) const {
    constexpr int64_t kPerWord = Dot<T>::kPerWord;
    multiply_panel<T, kRows>(x + first * k, k, panels + panel * kPanel * k, kPanel * kPerWord, k / kPerWord, sums);
  }
};

/// For every row and panel: finish(row, panel, left sums, right sums). X: what this kind of weight multiplies.
template <typename X, typename Weight, typename Finish>
void multiply(const X& x, int64_t rows, const Weight& weight, int64_t num_panels, const Finish& finish) {
  const int64_t blocks = ceil_div(rows * weight.row_bytes(), kBlockBytes);
  Pool::get().run(blocks * num_panels, [&](int64_t item) {
    const int64_t block = item / num_panels, panel = item % num_panels;
    const int64_t first = rows * block / blocks, end = rows * (block + 1) / blocks;
    Floats bias[2] = {};
    if (weight.bias) {
      bias[0] = load_floats(weight.bias + panel * kPanel);
      bias[1] = load_floats(weight.bias + panel * kPanel + kLanes);
    }
    in_pieces<Weight::kMaxRows>(end - first, [&](int64_t at, auto count) {
      Floats sums[count][2] = {};
      weight.template multiply<count>(x, first + at, panel, sums);
      for (int r = 0; r < count; ++r)
        finish(first + at + r, panel, vec_of(sums[r][0] + bias[0]), vec_of(sums[r][1] + bias[1]));
    });
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
    const Vec silu = gate / (Vec(1.f) + gate.neg().exp());
    store_pair(out + row * n + column, {silu * up, Vec(0.f)}, std::min(kLanes, n - column));
  });
}

}  // namespace tercet
