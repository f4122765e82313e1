// Root-mean-square normalisation (arXiv 1910.07467), with the sum before it.
#pragma once

#include "dot.h"
#include "pool.h"

namespace tercet {

/// Calls f(first row, last row) for blocks of rows that are worth another thread's while.
template <typename F>
void in_row_blocks(int64_t rows, int64_t row_numbers, const F& f) {
  constexpr int64_t kNumbers = 4 * 1024;
  const int64_t blocks = std::max<int64_t>(1, rows * row_numbers / kNumbers);
  Pool::get().run(blocks, [&](int64_t block) { f(rows * block / blocks, rows * (block + 1) / blocks); });
}

/// 1 / rms of n numbers whose squares add up to `squares`
inline float inverse_rms(float squares, int64_t n, double eps) {
  return 1.f / std::sqrt(squares / n + static_cast<float>(eps));
}

/// out = norm(x) * weight, or with a residual: residual += x, out = norm(residual) * weight; all [rows, n].
template <typename T>
void rms_norm(const T* x, T* residual, const T* weight, double eps, int64_t rows, int64_t n, T* out) {
  in_row_blocks(rows, n, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const T* source = residual ? residual + row * n : x + row * n;
      FloatPair squares{Vec(0.f), Vec(0.f)};
      for (int64_t i = 0; i < n; i += kPanel) {
        // A sum counts as everybody else will see it: rounded.
        if (residual) {
          T* sum = residual + row * n + i;
          store_pair(sum, load_pair(x + row * n + i, n - i) + load_pair(sum, n - i), n - i);
        }
        const FloatPair value = load_pair(source + i, n - i);
        squares = squares + value * value;
      }
      const Vec scale(inverse_rms(sum_of(squares.left + squares.right), n, eps));
      for (int64_t i = 0; i < n; i += kPanel)
        store_pair(out + row * n + i, load_pair(source + i, n - i) * scale * load_pair(weight + i, n - i), n - i);
    }
  });
}

}  // namespace tercet
