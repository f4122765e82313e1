// The operations that choose tokens, as torch calls them.
#pragma once

#include "argmax.h"
#include "graph.h"
#include "op_checks.h"
#include "sampling.h"

namespace tercet {

inline Tensor argmax_op(const Tensor& logits) {
  TORCH_CHECK(!Graph::recording(), "the choice of a token cannot be recorded");
  check(logits, "logits", at::kFloat, {logits.size(0), logits.size(1)});
  auto tokens = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  argmax(logits.const_data_ptr<float>(), logits.size(0), logits.size(1), tokens.data_ptr<int64_t>());
  return tokens;
}

/// A column of float64 parameters, one for each of n draws, with any stride.
inline at::TensorAccessor<const double, 1> column(const Tensor& tensor, const char* name, int64_t n) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == at::kDouble, name, " must be float64 on the CPU");
  TORCH_CHECK(tensor.sizes() == at::IntArrayRef{n}, name, " must have shape [", n, "], got ", tensor.sizes());
  return tensor.accessor<const double, 1>();
}

inline Tensor sample_op(
    const Tensor& logits,
    const Tensor& lines,
    const Tensor& temperature,
    const Tensor& top_k,
    const Tensor& top_p,
    const Tensor& max_gap,
    const Tensor& draw) {
  const int64_t n = lines.size(0), vocab = logits.size(1);
  check(logits, "logits", at::kFloat, {logits.size(0), vocab});
  check(lines, "lines", at::kLong, {n});
  const auto temperatures = column(temperature, "temperature", n), top_ks = column(top_k, "top_k", n);
  const auto top_ps = column(top_p, "top_p", n), max_gaps = column(max_gap, "max_gap", n);
  const auto draws = column(draw, "draw", n);
  const float* all = logits.const_data_ptr<float>();
  const int64_t* line = lines.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(0 <= line[i] && line[i] < logits.size(0), "lines must be lines of logits, got ", line[i]);
    TORCH_CHECK(
        temperatures[i] > 0 && top_ks[i] >= 1 && top_ps[i] > 0 && max_gaps[i] >= 0 && 0 <= draws[i] && draws[i] < 1,
        "temperature, top_k and top_p must be positive, max_gap not negative, and draw in [0, 1)");
  }
  auto tokens = at::empty({n}, lines.options());
  int64_t* chosen = tokens.data_ptr<int64_t>();
  ThreadPool::get().run(n, [&](int64_t i) {
    const Selection selection{
        static_cast<float>(temperatures[i]), static_cast<int64_t>(top_ks[i]), top_ps[i],
        static_cast<float>(max_gaps[i])};
    chosen[i] = Distribution(all + line[i] * vocab, vocab, selection).sample(draws[i]);
  });
  return tokens;
}

}  // namespace tercet
