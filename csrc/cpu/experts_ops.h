// The operations of a mixture of experts, as torch calls them.
#pragma once

#include <limits>
#include <vector>

#include "experts.h"
#include "graph.h"
#include "layer_ops.h"
#include "op_checks.h"

namespace tercet {

/// The memory of an operation of experts, and its result.
struct ExpertTensors {
  int64_t tokens, hidden, n, num_experts, per_token;
  /// x [tokens, hidden] -> inner [tokens * per_token, n] -> out [tokens, hidden]
  Tensor out, inner, sums, indices, weights;

  ExpertTensors(
      const Tensor& x, const Tensor& logits, size_t gate_ups, size_t downs, int64_t n, int64_t per_token)
      : tokens(x.size(0)), hidden(x.size(1)), n(n), num_experts(logits.size(1)), per_token(per_token) {
    check_rows(x, n);
    check(logits, "logits", at::kFloat, {tokens, num_experts});
    TORCH_CHECK(
        static_cast<int64_t>(gate_ups) == num_experts && static_cast<int64_t>(downs) == num_experts,
        "there must be weights of ", num_experts, " experts, got ", gate_ups, " and ", downs);
    TORCH_CHECK(
        0 < per_token && per_token <= num_experts, "a token must have 1 to ", num_experts, " experts, got ", per_token);
    const int64_t pairs = tokens * per_token;
    TORCH_CHECK(pairs <= std::numeric_limits<int32_t>::max(), "there are too many tokens");
    const auto floats = x.options().dtype(at::kFloat), integers = x.options().dtype(at::kInt);
    out = empty_result({tokens, hidden}, x.options());
    inner = empty_result({pairs, n}, x.options());
    sums = empty_result({tokens, round_up(hidden, kPanel)}, floats);
    indices = empty_result({2 * pairs + num_experts + 2}, integers);
    weights = empty_result({2 * pairs}, floats);
  }

  Routing routing() const {
    const int64_t pairs = tokens * per_token;
    auto* index = indices.data_ptr<int32_t>();
    auto* weight = weights.data_ptr<float>();
    return {num_experts, per_token, index, weight, index + 2 * pairs, index + pairs, weight + pairs};
  }
};

/// Routes, and computes both passes, now or when the graph runs. x: rows that gate_ups multiply. convert(rows) returns
/// so many rows of the result of the first pass as rows that downs multiply.
template <typename Out, typename Rows, typename GateUp, typename Down, typename Convert>
void run_experts(
    const Tensor& logits,
    const ExpertTensors& tensors,
    bool normalized,
    const Rows& x,
    std::vector<GateUp> gate_ups,
    std::vector<Down> downs,
    Convert convert) {
  const auto next = next_weight(NextWeight{});
  run_or_record(
      tensors.tokens,
      [=,
       gate_ups = std::move(gate_ups),
       downs = std::move(downs),
       routing = tensors.routing(),
       n = tensors.n,
       hidden = tensors.hidden,
       logits = logits.const_data_ptr<float>(),
       inner = tensors.inner.data_ptr<Out>(),
       sums = tensors.sums.data_ptr<float>(),
       out = tensors.out.data_ptr<Out>()](int64_t rows) {
        route(logits, rows, normalized, routing);
        experts_silu_mul(x, routing, gate_ups, downs, n, inner);
        sum_experts(convert(rows * routing.per_token), rows, routing, downs, *next, hidden, sums, out);
      });
}

/// The weights of all experts for rows of X, which `x` becomes when it is multiplied.
template <typename T, typename X, typename Store>
std::vector<ExpertWeight<const X*, Store>> expert_weights(const Tensor& x, at::TensorList packed, int64_t columns) {
  std::vector<ExpertWeight<const X*, Store>> weights;
  weights.reserve(packed.size());
  for (const Tensor& one : packed)
    with_kind(x, one, {}, columns, [&]<typename OfX, typename Multiplied>(OfX, Multiplied, const auto& weight) {
      if constexpr (std::is_same_v<OfX, T> && std::is_same_v<Multiplied, X>) weights.emplace_back(weight);
    });
  return weights;
}

/// x [tokens, hidden], logits float [tokens, experts] -> [tokens, hidden]. gate_ups, downs: a packed weight of each
/// expert. n: columns of an expert's gate and of its up projection
inline Tensor experts_op(
    const Tensor& x,
    const Tensor& logits,
    std::vector<Tensor> gate_ups,
    std::vector<Tensor> downs,
    int64_t n,
    int64_t per_token,
    bool normalized) {
  const ExpertTensors tensors(x, logits, gate_ups.size(), downs.size(), n, per_token);
  const int64_t gate_up_columns = 2 * round_up(n, kLanes);
  const auto run = [&]<typename T, typename X>(T, X) {
    auto of_gate_ups = expert_weights<T, X, StoreExpertSiluMul<T>>(x, gate_ups, gate_up_columns);
    auto of_downs = expert_weights<T, X, AddToTokens>(tensors.inner, downs, tensors.hidden);
    if constexpr (std::is_same_v<T, X>) {
      run_experts<T>(
          logits, tensors, normalized, x.const_data_ptr<T>(), std::move(of_gate_ups), std::move(of_downs),
          [inner = tensors.inner.const_data_ptr<T>()](int64_t) { return inner; });
    } else {
      const Tensor wide = widened_rows(x), wide_inner = empty_result(tensors.inner.sizes(), wide.options());
      run_experts<T>(
          logits, tensors, normalized, wide.const_data_ptr<X>(), std::move(of_gate_ups), std::move(of_downs),
          [n, inner = tensors.inner.const_data_ptr<T>(), to = wide_inner.template data_ptr<X>()](int64_t rows) {
            widen_rows(inner, rows, n, to);
            return static_cast<const X*>(to);
          });
    }
  };
  if (x.scalar_type() == at::kFloat) {
    run(float(), float());
  } else {
    TORCH_CHECK(x.scalar_type() == at::kBFloat16, "x must be float or bfloat16, got ", x.scalar_type());
    if (Tuning::get().widens_bfloat16)
      run(at::BFloat16(), float());
    else if constexpr (kMultipliesBFloat16)
      run(at::BFloat16(), at::BFloat16());
  }
  return tensors.out;
}

/// The weights of 8 or 4 bits of all experts.
template <typename Weight, typename Store>
std::vector<ExpertWeight<typename Weight::Rows, Store>> quantized_expert_weights(
    const Tensor& x, at::TensorList packed, int64_t columns) {
  std::vector<ExpertWeight<typename Weight::Rows, Store>> weights;
  weights.reserve(packed.size());
  for (const Tensor& one : packed) weights.emplace_back(quantized_weight<Weight>(x, one, {}, columns));
  return weights;
}

/// The same with weights of `bits` bits, and rows that are quantised.
inline Tensor quantized_experts_op(
    const Tensor& x,
    const Tensor& logits,
    std::vector<Tensor> gate_ups,
    std::vector<Tensor> downs,
    int64_t n,
    int64_t per_token,
    bool normalized,
    int64_t bits) {
  const ExpertTensors tensors(x, logits, gate_ups.size(), downs.size(), n, per_token);
  TORCH_CHECK(bits == 4 || bits == 8, "weights must have 4 or 8 bits");
  const auto run = [&]<typename Weights>() {
    using Weight = QuantizedPacked<Weights>;
    using Rows = typename Weight::Rows;
    const int64_t hidden = tensors.hidden;
    TERCET_ANY_FLOAT(x.scalar_type(), [&] {
      auto of_gate_ups =
          quantized_expert_weights<Weight, StoreExpertSiluMul<scalar_t>>(x, gate_ups, 2 * round_up(n, kLanes));
      auto of_downs = quantized_expert_weights<Weight, AddToTokens>(tensors.inner, downs, hidden);
      const auto bytes = x.options().dtype(at::kByte);
      const Tensor memory = empty_result({x.size(0), Rows::row_bytes(hidden)}, bytes);
      const Tensor inner_memory = empty_result({tensors.inner.size(0), Rows::row_bytes(n)}, bytes);
      const Rows quantized{memory.data_ptr<uint8_t>(), hidden}, inner{inner_memory.data_ptr<uint8_t>(), n};
      run_or_record(
          x.size(0), [=, x = x.const_data_ptr<scalar_t>()](int64_t rows) { quantize_rows(x, rows, quantized); });
      run_experts<scalar_t>(
          logits, tensors, normalized, quantized, std::move(of_gate_ups), std::move(of_downs),
          [inner, from = tensors.inner.const_data_ptr<scalar_t>()](int64_t rows) {
            quantize_rows(from, rows, inner);
            return inner;
          });
    });
  };
  bits == 4 ? run.template operator()<Int4Weights>() : run.template operator()<Int8Weights>();
  return tensors.out;
}

}  // namespace tercet
