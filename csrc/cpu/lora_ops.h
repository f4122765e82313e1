// The operations of LoRA adapters, as torch calls them.
#pragma once

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "graph.h"
#include "lora.h"
#include "op_checks.h"

namespace tercet {

/// adapters: int32 [rows], 0 for none. ranks: int64 [slots + 1].
inline RowAdapters row_adapters(const Tensor& adapters, const Tensor& ranks, int64_t rows, int64_t slots) {
  check(adapters, "adapters", at::kInt, {rows});
  check(ranks, "ranks", at::kLong, {slots + 1});
  return {adapters.const_data_ptr<int32_t>(), ranks.const_data_ptr<int64_t>(), slots};
}

template <typename T>
LoraB<T> lora_b(const Tensor& b, std::vector<int64_t> rows) {
  constexpr int64_t kPerWord = LoraB<T>::kPerWord;
  const int64_t rank = b.size(2) * kPerWord;
  int64_t panels = 0;
  TORCH_CHECK(!rows.empty(), "there must be rows of at least one matrix");
  for (const int64_t count : rows) {
    TORCH_CHECK(count > 0, "rows must be positive, got ", count);
    panels += ceil_div(count, kPanel);
  }
  TORCH_CHECK(rank > 0, "b must have a rank");
  check(b, "b", c10::CppTypeToScalarType<T>::value, {b.size(0), panels, b.size(2), kPanel, kPerWord});
  return {b.const_data_ptr<T>(), panels, rank, std::move(rows)};
}

/// Calls f(T(), numbers of x, widen) with the type of the tables, T: bfloat16, or else float. If x has another type,
/// the numbers are floats in a tensor that this call may record, and widen(rows) sets them.
template <typename F>
void with_lora_types(const Tensor& x, const Tensor& a, const F& f) {
  const auto nothing = [](int64_t) {};
  if (a.scalar_type() == at::kBFloat16) {
    f(at::BFloat16(), x.const_data_ptr<at::BFloat16>(), nothing);
    return;
  }
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    const auto* numbers = x.const_data_ptr<scalar_t>();
    if constexpr (std::is_same_v<scalar_t, float>) {
      f(float(), numbers, nothing);
    } else {
      const Tensor floats = empty_result(x.sizes(), x.options().dtype(at::kFloat));
      float* to = floats.template data_ptr<float>();
      const int64_t k = x.size(1);
      f(float(), static_cast<const float*>(to), [=](int64_t rows) { widen_rows(numbers, rows, k, to); });
    }
  });
}

/// A x of each row's adapter, float [T, width]. x [T, k]; a: see LoraA; `matrices`: how many are stacked. Rows without an
/// adapter are not set.
inline Tensor shrink_lora_op(
    const Tensor& x, const Tensor& a, const Tensor& ranks, const Tensor& adapters, int64_t matrices) {
  const auto type = a.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "a must be float or bfloat16, got ", type);
  const int64_t count = x.size(0), k = x.size(1), per_word = 4 / a.element_size();
  check(x, "x", x.scalar_type(), {count, k});
  TORCH_CHECK(k > 0 && k % per_word == 0 && matrices > 0, "x must have whole words, and there must be matrices");
  check(a, "a", type, {a.size(0), a.size(1), k / per_word, kPanel, per_word});
  const RowAdapters of_rows = row_adapters(adapters, ranks, count, a.size(0));
  const Tensor out = empty_result({count, a.size(1) * kPanel}, x.options().dtype(at::kFloat));
  with_lora_types(x, a, [&]<typename T>(T, const T* numbers, const auto& widen) {
    const LoraA<T> matrices_a{a.const_data_ptr<T>(), a.size(1), k, matrices};
    run_or_record(count, [=, to = out.template data_ptr<float>()](int64_t rows) {
      if (!have_adapters(of_rows, rows, matrices_a.max_rank(), LoraA<T>::kPerWord)) return;
      widen(rows);
      shrink_rows(numbers, of_rows, rows, matrices_a, to);
    });
  });
  return out;
}

/// out [T, n] += B of each row of `shrunk`, the result of shrink_lora, in place. b: see LoraB. `rows`: those of each B.
inline void expand_lora_op(
    const Tensor& shrunk,
    const Tensor& out,
    const Tensor& b,
    const Tensor& ranks,
    const Tensor& adapters,
    std::vector<int64_t> rows) {
  const int64_t count = out.size(0), width = shrunk.size(1), n = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const auto matrices = static_cast<int64_t>(rows.size());
  check(shrunk, "shrunk", at::kFloat, {count, width});
  check(out, "out", out.scalar_type(), {count, n});
  const RowAdapters of_rows = row_adapters(adapters, ranks, count, b.size(0));
  TERCET_DOT_FLOAT(b.scalar_type(), [&] {
    using T = scalar_t;
    const auto matrices_b = lora_b<T>(b, rows);
    const int64_t max_rank = std::min(matrices_b.max_rank, width / matrices);
    TERCET_ANY_FLOAT(out.scalar_type(), [&] {
      run_or_record(
          count,
          [=, shrunk = shrunk.const_data_ptr<float>(), to = out.data_ptr<scalar_t>()](int64_t num_rows) {
            if (have_adapters(of_rows, num_rows, max_rank, LoraB<T>::kPerWord))
              expand_rows(shrunk, width, of_rows, num_rows, matrices_b, n, to);
          });
    });
  });
}

/// What adapters add to a gate and up projection of n columns each. `lora`: none, or the result of shrink_lora, b, ranks
/// and adapters. A recorded step holds it.
inline std::shared_ptr<const GateParts> lora_gates(
    const optional<std::vector<Tensor>>& lora, int64_t rows, int64_t n) {
  if (!lora) return nullptr;
  TORCH_CHECK(lora->size() == 4, "lora must have four tensors, got ", lora->size());
  const Tensor &shrunk = (*lora)[0], &b = (*lora)[1];
  const int64_t width = shrunk.size(1);
  check(shrunk, "shrunk", at::kFloat, {rows, width});
  const RowAdapters of_rows = row_adapters((*lora)[3], (*lora)[2], rows, b.size(0));
  std::shared_ptr<const GateParts> gates;
  TERCET_DOT_FLOAT(b.scalar_type(), [&] {
    gates = std::make_shared<LoraGates<scalar_t>>(
        shrunk.const_data_ptr<float>(), width, of_rows, lora_b<scalar_t>(b, {n, n}));
  });
  return gates;
}

}  // namespace tercet
