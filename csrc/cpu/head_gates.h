// Gates of attention heads (LFM3): the output of each head is multiplied by a sigmoid.
#pragma once

#include <cmath>

#include "graph.h"
#include "norm.h"
#include "op_checks.h"

namespace tercet {

/// x[row, head] *= sigmoid(gates[row, head]), rounded once. x is [rows, heads, dim]; rows of gates are gate_stride numbers
/// apart.
template <typename T>
void gate_heads(T* x, const T* gates, int64_t gate_stride, int64_t rows, int64_t heads, int64_t dim) {
  for_each_row_block(rows, heads * dim, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row)
      for (int64_t head = 0; head < heads; ++head) {
        T* of_head = x + (row * heads + head) * dim;
        const Vec factor(1.f / (1.f + std::exp(-static_cast<float>(gates[row * gate_stride + head]))));
        for (int64_t i = 0; i < dim; i += kPanel) store_pair(of_head + i, load_pair(of_head + i, dim - i) * factor, dim - i);
      }
  });
}

/// x: [rows, heads * dim]. gates: [rows, heads], a view with contiguous rows.
inline void gate_heads_op(const Tensor& x, const Tensor& gates) {
  const auto type = x.scalar_type();
  const int64_t rows = x.size(0), n = x.size(1), heads = gates.size(1);
  check(x, "x", type, {rows, n});
  check_rows(gates, "gates", type, {rows, heads});
  TORCH_CHECK(heads > 0 && n % heads == 0, "x must have whole heads, got ", n, " numbers for ", heads, " gates");
  TERCET_ANY_FLOAT(type, [&] {
    run_or_record(
        rows, [=, x = x.data_ptr<scalar_t>(), gate = gates.const_data_ptr<scalar_t>(), stride = gates.stride(0)](
                  int64_t rows) { gate_heads(x, gate, stride, rows, heads, n / heads); });
  });
}

}  // namespace tercet
