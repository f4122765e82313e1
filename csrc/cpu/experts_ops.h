// The operations of a mixture of experts, as torch calls them.
#pragma once

#include <limits>
#include <vector>

#include "experts.h"
#include "graph.h"
#include "layer_ops.h"
#include "op_checks.h"

namespace tercet {

/// The arguments of an operation of experts, besides x and the router's logits.
struct ExpertArguments {
  /// of each expert: a packed weight, and a packed bias. Without biases the lists of biases are empty.
  std::vector<Tensor> gate_ups, downs, gate_up_biases, down_biases;
  /// columns of an expert's gate and of its up projection
  int64_t n;
  int64_t per_token;
  bool normalized;
  /// of ClampedGate; none: the activation is silu(gate) * up
  optional<double> alpha, limit;
  /// of RoutingRule
  bool sigmoids;
  optional<Tensor> corrections;
  double least_sum, scale;
  int64_t num_groups, groups_per_token;

  RoutingRule rule() const {
    return {
        normalized, sigmoids, data_or_null<float>(corrections), static_cast<float>(least_sum),
        static_cast<float>(scale), num_groups, groups_per_token};
  }
};

/// Calls f with the activation.
template <typename F>
void with_activation(const ExpertArguments& arguments, const F& f) {
  TORCH_CHECK(
      arguments.alpha.has_value() == arguments.limit.has_value(), "alpha and limit must be given together");
  if (arguments.limit)
    f(ClampedGate{static_cast<float>(*arguments.alpha), static_cast<float>(*arguments.limit)});
  else
    f(SiluMul());
}

/// The memory of an operation of experts, and its result.
struct ExpertTensors {
  int64_t tokens, hidden, n, num_experts, per_token;
  /// x [tokens, hidden] -> inner [tokens * per_token, n] -> out [tokens, hidden]
  Tensor out, inner, sums, indices, weights;

  ExpertTensors(const Tensor& x, const Tensor& logits, const ExpertArguments& arguments)
      : tokens(x.size(0)),
        hidden(x.size(1)),
        n(arguments.n),
        num_experts(logits.size(1)),
        per_token(arguments.per_token) {
    check_rows(x, n);
    check(logits, "logits", at::kFloat, {tokens, num_experts});
    check_count("weights", arguments.gate_ups, arguments.downs);
    if (!arguments.gate_up_biases.empty() || !arguments.down_biases.empty())
      check_count("biases", arguments.gate_up_biases, arguments.down_biases);
    TORCH_CHECK(
        0 < per_token && per_token <= num_experts, "a token must have 1 to ", num_experts, " experts, got ", per_token);
    if (arguments.corrections) check(*arguments.corrections, "corrections", at::kFloat, {num_experts});
    TORCH_CHECK(arguments.corrections || !arguments.sigmoids, "sigmoids need corrections");
    check_groups(arguments);
    const int64_t pairs = tokens * per_token;
    TORCH_CHECK(pairs <= std::numeric_limits<int32_t>::max(), "there are too many tokens");
    const auto floats = x.options().dtype(at::kFloat), integers = x.options().dtype(at::kInt);
    out = empty_result({tokens, hidden}, x.options());
    inner = empty_result({pairs, n}, x.options());
    sums = empty_result({tokens, round_up(hidden, kPanel)}, floats);
    indices = empty_result({2 * pairs + num_experts + 2}, integers);
    weights = empty_result({2 * pairs}, floats);
  }

  void check_count(const char* name, at::TensorList gate_ups, at::TensorList downs) const {
    TORCH_CHECK(
        static_cast<int64_t>(gate_ups.size()) == num_experts && static_cast<int64_t>(downs.size()) == num_experts,
        "there must be ", name, " of ", num_experts, " experts, got ", gate_ups.size(), " and ", downs.size());
  }

  void check_groups(const ExpertArguments& arguments) const {
    const int64_t groups = arguments.num_groups, kept = arguments.groups_per_token;
    TORCH_CHECK(
        groups > 0 && num_experts % groups == 0, "num_groups must divide ", num_experts, " experts, got ", groups);
    TORCH_CHECK(0 < kept && kept <= groups, "a token must have 1 to ", groups, " groups, got ", kept);
    const int64_t size = num_experts / groups;
    TORCH_CHECK(per_token <= kept * size, kept, " groups of ", size, " experts have fewer than ", per_token);
    TORCH_CHECK(
        groups == 1 || size > 1 || !arguments.corrections,
        "with corrections a group must have at least 2 experts, got 1");
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
template <typename Out, typename Activation, typename Rows, typename GateUp, typename Down, typename Convert>
void run_experts(
    const Tensor& logits,
    const ExpertTensors& tensors,
    const RoutingRule& rule,
    const Activation& activation,
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
        route(logits, rows, rule, routing);
        activate_experts(x, routing, gate_ups, downs, activation, n, inner);
        sum_experts(convert(rows * routing.per_token), rows, routing, downs, *next, hidden, sums, out);
      });
}

/// The bias of an expert.
inline optional<Tensor> bias_of(at::TensorList biases, size_t expert) {
  return biases.empty() ? optional<Tensor>() : biases[expert];
}

/// The weights of all experts for rows of X, which `x` becomes when it is multiplied.
template <typename T, typename X, typename Store>
std::vector<ExpertWeight<const X*, Store>> expert_weights(
    const Tensor& x, at::TensorList packed, at::TensorList biases, int64_t columns) {
  std::vector<ExpertWeight<const X*, Store>> weights;
  weights.reserve(packed.size());
  for (size_t i = 0; i < packed.size(); ++i)
    with_kind(x, packed[i], bias_of(biases, i), columns, [&]<typename OfX, typename Multiplied>(OfX, Multiplied, const auto& weight) {
      if constexpr (std::is_same_v<OfX, T> && std::is_same_v<Multiplied, X>) weights.emplace_back(weight);
    });
  return weights;
}

/// x [tokens, hidden], logits float [tokens, experts] -> [tokens, hidden]
inline Tensor run_experts_op(const Tensor& x, const Tensor& logits, const ExpertArguments& arguments) {
  const ExpertTensors tensors(x, logits, arguments);
  const int64_t n = tensors.n, gate_up_columns = 2 * round_up(n, kLanes);
  const auto run = [&]<typename T, typename X, typename Activation>(T, X, const Activation& activation) {
    auto gate_ups = expert_weights<T, X, typename Activation::template Store<T>>(
        x, arguments.gate_ups, arguments.gate_up_biases, gate_up_columns);
    auto downs =
        expert_weights<T, X, AddToTokens>(tensors.inner, arguments.downs, arguments.down_biases, tensors.hidden);
    if constexpr (std::is_same_v<T, X>) {
      run_experts<T>(
          logits, tensors, arguments.rule(), activation, x.const_data_ptr<T>(), std::move(gate_ups),
          std::move(downs), [inner = tensors.inner.const_data_ptr<T>()](int64_t) { return inner; });
    } else {
      const Tensor wide = widened_rows(x), wide_inner = empty_result(tensors.inner.sizes(), wide.options());
      run_experts<T>(
          logits, tensors, arguments.rule(), activation, wide.const_data_ptr<X>(), std::move(gate_ups),
          std::move(downs),
          [n, inner = tensors.inner.const_data_ptr<T>(), to = wide_inner.template data_ptr<X>()](int64_t rows) {
            widen_rows(inner, rows, n, to);
            return static_cast<const X*>(to);
          });
    }
  };
  with_activation(arguments, [&](const auto& activation) {
    if (x.scalar_type() == at::kFloat) {
      run(float(), float(), activation);
    } else {
      TORCH_CHECK(x.scalar_type() == at::kBFloat16, "x must be float or bfloat16, got ", x.scalar_type());
      if (Tuning::get().widens_bfloat16)
        run(at::BFloat16(), float(), activation);
      else if constexpr (kMultipliesBFloat16)
        run(at::BFloat16(), at::BFloat16(), activation);
    }
  });
  return tensors.out;
}

/// The weights of 8 or 4 bits of all experts.
template <typename Weight, typename Store>
std::vector<ExpertWeight<typename Weight::Rows, Store>> quantized_expert_weights(
    const Tensor& x, at::TensorList packed, at::TensorList biases, int64_t columns) {
  std::vector<ExpertWeight<typename Weight::Rows, Store>> weights;
  weights.reserve(packed.size());
  for (size_t i = 0; i < packed.size(); ++i) {
    const optional<Tensor> bias = bias_of(biases, i);
    if (bias) check(*bias, "bias", at::kFloat, {ceil_div(columns, kPanel), kPanel});
    weights.emplace_back(quantized_weight<Weight>(x, packed[i], bias, columns));
  }
  return weights;
}

/// The same with weights of `bits` bits, and rows that are quantised.
inline Tensor run_quantized_experts_op(
    const Tensor& x, const Tensor& logits, const ExpertArguments& arguments, int64_t bits) {
  const ExpertTensors tensors(x, logits, arguments);
  const int64_t n = tensors.n, hidden = tensors.hidden;
  TORCH_CHECK(bits == 4 || bits == 8, "weights must have 4 or 8 bits");
  const auto run = [&]<typename Weights, typename Activation>(const Activation& activation) {
    using Weight = QuantizedPacked<Weights>;
    using Rows = typename Weight::Rows;
    TERCET_ANY_FLOAT(x.scalar_type(), [&] {
      auto gate_ups = quantized_expert_weights<Weight, typename Activation::template Store<scalar_t>>(
          x, arguments.gate_ups, arguments.gate_up_biases, 2 * round_up(n, kLanes));
      auto downs =
          quantized_expert_weights<Weight, AddToTokens>(tensors.inner, arguments.downs, arguments.down_biases, hidden);
      const auto bytes = x.options().dtype(at::kByte);
      const Tensor memory = empty_result({x.size(0), Rows::row_bytes(hidden)}, bytes);
      const Tensor inner_memory = empty_result({tensors.inner.size(0), Rows::row_bytes(n)}, bytes);
      const Rows quantized{memory.data_ptr<uint8_t>(), hidden}, inner{inner_memory.data_ptr<uint8_t>(), n};
      run_or_record(
          x.size(0), [=, x = x.const_data_ptr<scalar_t>()](int64_t rows) { quantize_rows(x, rows, quantized); });
      run_experts<scalar_t>(
          logits, tensors, arguments.rule(), activation, quantized, std::move(gate_ups), std::move(downs),
          [inner, from = tensors.inner.const_data_ptr<scalar_t>()](int64_t rows) {
            quantize_rows(from, rows, inner);
            return inner;
          });
    });
  };
  with_activation(arguments, [&]<typename Activation>(const Activation& activation) {
    bits == 4 ? run.template operator()<Int4Weights>(activation) : run.template operator()<Int8Weights>(activation);
  });
  return tensors.out;
}

inline Tensor experts_op(
    const Tensor& x,
    const Tensor& logits,
    std::vector<Tensor> gate_ups,
    std::vector<Tensor> downs,
    std::vector<Tensor> gate_up_biases,
    std::vector<Tensor> down_biases,
    int64_t n,
    int64_t per_token,
    bool normalized,
    optional<double> alpha,
    optional<double> limit,
    bool sigmoids,
    const optional<Tensor>& corrections,
    double least_sum,
    double scale,
    int64_t num_groups,
    int64_t groups_per_token) {
  return run_experts_op(
      x, logits,
      {gate_ups, downs, gate_up_biases, down_biases, n, per_token, normalized, alpha, limit, sigmoids, corrections,
       least_sum, scale, num_groups, groups_per_token});
}

inline Tensor quantized_experts_op(
    const Tensor& x,
    const Tensor& logits,
    std::vector<Tensor> gate_ups,
    std::vector<Tensor> downs,
    std::vector<Tensor> gate_up_biases,
    std::vector<Tensor> down_biases,
    int64_t n,
    int64_t per_token,
    bool normalized,
    optional<double> alpha,
    optional<double> limit,
    int64_t bits,
    bool sigmoids,
    const optional<Tensor>& corrections,
    double least_sum,
    double scale,
    int64_t num_groups,
    int64_t groups_per_token) {
  return run_quantized_experts_op(
      x, logits,
      {gate_ups, downs, gate_up_biases, down_biases, n, per_token, normalized, alpha, limit, sigmoids, corrections,
       least_sum, scale, num_groups, groups_per_token}, bits);
}

}  // namespace tercet
