// Root-mean-square normalisation (arXiv 1910.07467), with the residual addition before it, and other sums of rows.
#pragma once

#include "dot.h"
#include "thread_pool.h"

namespace tercet {

/// Divides rows of row_size numbers into blocks that are large enough to share out to threads, and calls
/// f(first row, row after the last) for each.
template <typename F>
void for_each_row_block(int64_t rows, int64_t row_size, const F& f) {
  constexpr int64_t kBlockSize = 4 * 1024;
  const int64_t blocks = std::max<int64_t>(1, rows * row_size / kBlockSize);
  ThreadPool::get().run(blocks, [&](int64_t block) { f(rows * block / blocks, rows * (block + 1) / blocks); });
}

/// 1 / rms of n numbers; `squares` is the sum of their squares.
inline float inverse_rms(float squares, int64_t n, double eps) {
  return 1.f / std::sqrt(squares / n + static_cast<float>(eps));
}

/// 1 / rms of the n numbers of x.
template <typename T>
float inverse_rms_of(const T* x, int64_t n, double eps) {
  FloatPair squares{Vec(0.f), Vec(0.f)};
  for (int64_t i = 0; i < n; i += kPanel) {
    const FloatPair value = load_pair(x + i, n - i);
    squares = squares + value * value;
  }
  return inverse_rms(sum_of(squares.left + squares.right), n, eps);
}

/// x = norm(x) * weight, for the n numbers of x.
template <typename T>
void normalise(T* x, const float* weight, double eps, int64_t n) {
  const Vec scale(inverse_rms_of(x, n, eps));
  for (int64_t i = 0; i < n; i += kPanel)
    store_pair(x + i, load_pair(x + i, n - i) * scale * load_pair(weight + i, n - i), n - i);
}

/// out = norm(x) * weight. With a residual: residual += x, out = norm(residual) * weight. All are [rows, n]. Rows of x are
/// x_stride numbers apart.
template <typename T>
void rms_norm(
    const T* x, int64_t x_stride, T* residual, const float* weight, double eps, int64_t rows, int64_t n, T* out) {
  for_each_row_block(rows, n, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const T* source = residual ? residual + row * n : x + row * x_stride;
      if (row + 1 < end) {
        // Other cores wrote x and read `out`.
        for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) prefetch_line(x + (row + 1) * x_stride + i);
        if (residual) prefetch_to_write(residual + (row + 1) * n, n);
        prefetch_to_write(out + (row + 1) * n, n);
      }
      FloatPair squares{Vec(0.f), Vec(0.f)};
      for (int64_t i = 0; i < n; i += kPanel) {
        // The norm is that of the stored sum, which is rounded to T.
        if (residual) {
          T* sum = residual + row * n + i;
          store_pair(sum, load_pair(x + row * x_stride + i, n - i) + load_pair(sum, n - i), n - i);
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

/// x *= factor. x is [rows, n].
template <typename T>
void scale_rows(T* x, float factor, int64_t rows, int64_t n) {
  for_each_row_block(rows, n, [&](int64_t first, int64_t end) {
    const int64_t stop = end * n;
    for (int64_t i = first * n; i < stop; i += kPanel) store_pair(x + i, load_pair(x + i, stop - i) * Vec(factor), stop - i);
  });
}

/// x = max(x, 0) ** 2, rounded once. x is [rows, n].
template <typename T>
void square_relu(T* x, int64_t rows, int64_t n) {
  for_each_row_block(rows, n, [&](int64_t first, int64_t end) {
    const int64_t stop = end * n;
    for (int64_t i = first * n; i < stop; i += kPanel) {
      const FloatPair value = load_pair(x + i, stop - i);
      const FloatPair positive{at::vec::maximum(value.left, Vec(0.f)), at::vec::maximum(value.right, Vec(0.f))};
      store_pair(x + i, positive * positive, stop - i);
    }
  });
}

/// out += sigmoid(gates) * x, rounded once; gates: one number for each row. Without gates: out += x. out and x are
/// [rows, n].
template <typename T>
void add_gated(const T* x, const float* gates, int64_t rows, int64_t n, T* out) {
  for_each_row_block(rows, n, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const T* source = x + row * n;
      T* sum = out + row * n;
      const Vec factor(gates ? 1.f / (1.f + std::exp(-gates[row])) : 1.f);
      for (int64_t i = 0; i < n; i += kPanel)
        store_pair(sum + i, load_pair(sum + i, n - i) + load_pair(source + i, n - i) * factor, n - i);
    }
  });
}

/// residual += norm(x) * weight, rounded once. x and the residual are [rows, n].
template <typename T>
void add_rms_norm(const T* x, T* residual, const float* weight, double eps, int64_t rows, int64_t n) {
  for_each_row_block(rows, n, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const T* source = x + row * n;
      T* sum = residual + row * n;
      if (row + 1 < end) prefetch_to_write(sum + n, n);  // other cores wrote it
      const Vec scale(inverse_rms_of(source, n, eps));
      for (int64_t i = 0; i < n; i += kPanel) {
        const FloatPair normed = load_pair(source + i, n - i) * scale * load_pair(weight + i, n - i);
        store_pair(sum + i, load_pair(sum + i, n - i) + normed, n - i);
      }
    }
  });
}

}  // namespace tercet
