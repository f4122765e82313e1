// The operations of gate and up projections, as torch calls them. `lora`: see `lora_gates`.
#pragma once

#include <string_view>
#include <vector>

#include "layer_ops.h"
#include "lora_ops.h"

namespace tercet {

inline Tensor gated_linear_op(
    const Tensor& x,
    const Tensor& packed,
    const optional<Tensor>& bias,
    int64_t n,
    std::string_view activation,
    const optional<std::vector<Tensor>>& lora) {
  const auto parts = lora_gates(lora, x.size(0), n);
  const auto out = empty_result({x.size(0), n}, x.options());
  with_weight(x, packed, bias, 2 * round_up(n, kLanes), [&]<typename T>(T, const auto* numbers, const auto& weight) {
    const auto next = next_weight(weight, ceil_div(n, kLanes));
    with_activation(activation, [&]<typename Activation>(Activation) {
      run_or_record(x.size(0), [=, out = out.template data_ptr<T>()](int64_t rows) {
        gated_linear<Activation>(numbers, rows, weight, *next, n, out, parts_of(parts, rows));
      });
    });
  });
  return out;
}

inline Tensor quantized_gated_linear_op(
    const Tensor& x,
    const Tensor& packed,
    const optional<Tensor>& bias,
    int64_t n,
    int64_t bits,
    std::string_view activation,
    const optional<std::vector<Tensor>>& lora) {
  const auto parts = lora_gates(lora, x.size(0), n);
  const auto out = empty_result({x.size(0), n}, x.options());
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    with_activation(activation, [&]<typename Activation>(Activation) {
      with_quantized(
          x, packed, bias, 2 * round_up(n, kLanes), bits,
          [n, parts, out = out.data_ptr<scalar_t>()](
              const auto& x, int64_t rows, const auto& weight, const NextWeight& next) {
            gated_linear<Activation>(x, rows, weight, next, n, out, parts_of(parts, rows));
          });
    });
  });
  return out;
}

}  // namespace tercet
