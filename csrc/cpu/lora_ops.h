// The operations of LoRA adapters, as torch calls them.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "layer_ops.h"
#include "lora.h"

namespace tercet {

template <typename T>
LoraTables<T> lora_tables(
    const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& ranks, std::vector<int64_t> rows) {
  constexpr int64_t kPerWord = LoraTables<T>::kPerWord;
  const int64_t slots = a.size(0), k = x.size(1), rank = b.size(2) * kPerWord;
  int64_t panels = 0;
  for (const int64_t count : rows) {
    TORCH_CHECK(count > 0, "rows must be positive, got ", count);
    panels += ceil_div(count, kPanel);
  }
  const int64_t a_panels = ceil_div(static_cast<int64_t>(rows.size()) * rank, kPanel);
  TORCH_CHECK(k > 0 && k % kPerWord == 0 && rank > 0, "x must have whole words, and the tables must have a rank");
  check(a, "a", a.scalar_type(), {slots, a_panels, k / kPerWord, kPanel, kPerWord});
  check(b, "b", a.scalar_type(), {slots, panels, rank / kPerWord, kPanel, kPerWord});
  check(ranks, "ranks", at::kLong, {slots + 1});
  return {
      a.const_data_ptr<T>(), b.const_data_ptr<T>(), ranks.const_data_ptr<int64_t>(), slots, k, rank, a_panels, panels,
      std::move(rows)};
}

/// Calls f(T(), numbers of x) with the type of the tables. Numbers of another type than T are widened to float.
template <typename F>
void with_lora_types(const Tensor& x, const Tensor& a, const F& f) {
  if (a.scalar_type() == at::kBFloat16) {
    f(at::BFloat16(), x.const_data_ptr<at::BFloat16>());
    return;
  }
  TORCH_CHECK(a.scalar_type() == at::kFloat, "a must be float or bfloat16, got ", a.scalar_type());
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    if constexpr (std::is_same_v<scalar_t, float>)
      f(float(), x.const_data_ptr<float>());
    else
      f(float(), widened_rows<scalar_t>(x).template const_data_ptr<float>());
  });
}

/// out [T, n] += B (A x) of each row's adapter, in place. x [T, k]; adapters: int32 [T], 0 for none. a, b, ranks: see
/// LoraTables. `rows`: those of each B. out has the type of x or is float.
inline void add_lora_op(
    const Tensor& x,
    const Tensor& out,
    const Tensor& a,
    const Tensor& b,
    const Tensor& ranks,
    const Tensor& adapters,
    std::vector<int64_t> rows) {
  const int64_t count = x.size(0);
  int64_t n = 0;
  for (const int64_t rows_of_part : rows) n += rows_of_part;
  check(x, "x", x.scalar_type(), {count, x.size(1)});
  check(out, "out", out.scalar_type() == at::kFloat ? at::kFloat : x.scalar_type(), {count, n});
  check(adapters, "adapters", at::kInt, {count});
  with_lora_types(x, a, [&]<typename T>(T, const auto* numbers) {
    const auto tables = lora_tables<T>(x, a, b, ranks, rows);
    const Tensor between = empty_result({count, tables.width()}, x.options().dtype(at::kFloat));
    TERCET_ANY_FLOAT(out.scalar_type(), [&] {
      run_or_record(
          count,
          [=, adapters = adapters.const_data_ptr<int32_t>(), between = between.template data_ptr<float>(),
           to = out.template data_ptr<scalar_t>()](int64_t num_rows) {
            const auto blocks = lora_blocks(adapters, num_rows, tables);
            shrink_rows(numbers, blocks, tables, between);
            expand_rows(between, blocks, tables, n, to);
          });
    });
  });
}

/// activation(gate) * up [T, n] of gate_up [T, 2 * n]: float, or of the type of the result.
inline Tensor gated_activation_op(const Tensor& gate_up, at::ScalarType dtype, std::string_view activation) {
  const int64_t rows = gate_up.size(0), n = gate_up.size(1) / 2;
  check(gate_up, "gate_up", gate_up.scalar_type() == at::kFloat ? at::kFloat : dtype, {rows, 2 * n});
  const auto out = empty_result({rows, n}, gate_up.options().dtype(dtype));
  with_activation(activation, [&]<typename Activation>(Activation) {
    TERCET_ANY_FLOAT(dtype, [&] {
      const auto call = [&](const auto* from) {
        run_or_record(rows, [=, to = out.template data_ptr<scalar_t>()](int64_t count) {
          activate_gates<Activation>(from, count, n, to);
        });
      };
      if (gate_up.scalar_type() == at::kFloat)
        call(gate_up.const_data_ptr<float>());
      else
        call(gate_up.const_data_ptr<scalar_t>());
    });
  });
  return out;
}

}  // namespace tercet
