// The operations that choose tokens and score them, as torch calls them.
#pragma once

#include "argmax.h"
#include "graph.h"
#include "op_checks.h"
#include "sampling.h"
#include "token_logprobs.h"
#include "token_mask.h"

namespace tercet {

inline Tensor argmax_op(const Tensor& logits) {
  TORCH_CHECK(!Graph::recording(), "the choice of a token cannot be recorded");
  check(logits, "logits", at::kFloat, {logits.size(0), logits.size(1)});
  auto tokens = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  argmax(logits.const_data_ptr<float>(), logits.size(0), logits.size(1), tokens.data_ptr<int64_t>());
  return tokens;
}

/// newest[row] = token for each of the rows; 0 for an invalid token (-1).
inline void store_newest_op(const Tensor& tokens, const Tensor& rows, const Tensor& newest) {
  const int64_t num_rows = newest.size(0);
  check(tokens, "tokens", at::kLong, {rows.size(0)});
  check(rows, "rows", at::kLong, {rows.size(0)});
  check(newest, "newest", at::kLong, {num_rows});
  run_or_record(
      rows.size(0),
      [=,
       token = tokens.const_data_ptr<int64_t>(),
       row = rows.const_data_ptr<int64_t>(),
       newest = newest.data_ptr<int64_t>()](int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          TORCH_CHECK(0 <= row[i] && row[i] < num_rows, "rows must be rows of newest, got ", row[i]);
          newest[row[i]] = std::max<int64_t>(token[i], 0);
        }
      });
}

inline void mask_tokens_op(const Tensor& logits, const Tensor& lines, const Tensor& bits) {
  TORCH_CHECK(!Graph::recording(), "token masks cannot be recorded");
  const int64_t num_masks = lines.size(0), vocab = logits.size(1);
  const int64_t words = (vocab + kMaskBits - 1) / kMaskBits;
  check(logits, "logits", at::kFloat, {logits.size(0), vocab});
  check(lines, "lines", at::kLong, {num_masks});
  check(bits, "bits", at::kInt, {num_masks, words});
  const int64_t* line = lines.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_masks; ++i) {
    TORCH_CHECK(0 <= line[i] && line[i] < logits.size(0), "lines must be lines of logits, got ", line[i]);
    TORCH_CHECK(i == 0 || line[i - 1] < line[i], "lines must rise, got ", line[i]);
  }
  mask_tokens(logits.data_ptr<float>(), vocab, line, bits.const_data_ptr<int32_t>(), words, num_masks);
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

/// Log probabilities for n lines of logits [rows, vocab]: of the tokens ids [n, m], and of the k most probable tokens.
/// Returns float32 [n, m], float32 [n, k] and int32 [n, k].
inline std::tuple<Tensor, Tensor, Tensor> token_logprobs_op(
    const Tensor& logits, const Tensor& lines, const Tensor& ids, int64_t k) {
  const int64_t n = lines.size(0), vocab = logits.size(1), m = ids.size(1);
  check(logits, "logits", at::kFloat, {logits.size(0), vocab});
  check(lines, "lines", at::kLong, {n});
  check(ids, "ids", at::kLong, {n, m});
  TORCH_CHECK(0 <= k && k <= vocab, "k must be at most the size of the vocabulary, got ", k);
  const float* all = logits.const_data_ptr<float>();
  const int64_t* line = lines.const_data_ptr<int64_t>();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i)
    TORCH_CHECK(0 <= line[i] && line[i] < logits.size(0), "lines must be lines of logits, got ", line[i]);
  for (int64_t i = 0; i < n * m; ++i) TORCH_CHECK(0 <= id[i] && id[i] < vocab, "ids must be token ids, got ", id[i]);
  auto values = at::empty({n, m}, logits.options()), top = at::empty({n, k}, logits.options());
  auto top_ids = at::empty({n, k}, logits.options().dtype(at::kInt));
  float* value = values.data_ptr<float>();
  float* top_value = top.data_ptr<float>();
  int32_t* top_id = top_ids.data_ptr<int32_t>();
  ThreadPool::get().run(n, [&](int64_t i) {
    const RowLogprobs row(all + line[i] * vocab, vocab);
    for (int64_t j = i * m; j < (i + 1) * m; ++j) value[j] = row.of(id[j]);
    row.find_top(k, top_value + i * k, top_id + i * k);
  });
  return {values, top, top_ids};
}

}  // namespace tercet
