// The activations of gated feed-forward layers.
#pragma once

#include <c10/util/Exception.h>

#include <string_view>

#include "vectors.h"

namespace tercet {

/// x * sigmoid(x)
struct Silu {
  template <typename Out>
  [[gnu::always_inline]] static Vec of(Vec x) {
    return x / (Vec(1.f) + exp_for<Out>(x.neg()));
  }
};

/// GELU with tanh in place of the error function (arXiv 1606.08415): x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
struct GeluTanh {
  template <typename Out>
  [[gnu::always_inline]] static Vec of(Vec x) {
    constexpr float kFactor = 1.5957691216f;  // 2 sqrt(2 / pi)
    const Vec slope = at::vec::fmadd(x * x, Vec(-0.044715f * kFactor), Vec(-kFactor));
    return x / (Vec(1.f) + exp_for<Out>(x * slope));
  }
};

/// Calls f with the activation of a name that layers/activation.py has.
template <typename F>
void with_activation(std::string_view name, const F& f) {
  if (name == "silu") return f(Silu());
  if (name == "gelu_tanh") return f(GeluTanh());
  TORCH_CHECK(false, "activation must be silu or gelu_tanh, got ", std::string(name));
}

}  // namespace tercet
