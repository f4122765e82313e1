// The operations that choose tokens and score them, as torch calls them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "argmax.h"
#include "counter_rng.h"
#include "graph.h"
#include "op_checks.h"
#include "sampling.h"
#include "soft_cap.h"
#include "token_logprobs.h"
#include "token_mask.h"

namespace tercet {

inline void soft_cap_op(const Tensor& logits, double cap) {
  const int64_t n = logits.size(1);
  check(logits, "logits", at::kFloat, {logits.size(0), n});
  run_or_record(logits.size(0), [=, cap = *cap_of(cap), logits = logits.data_ptr<float>()](int64_t rows) {
    cap_logits(logits, cap, rows, n);
  });
}

inline Tensor argmax_op(const Tensor& logits) {
  check_not_recording("the choice of a token");
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
  check_not_recording("a token mask");
  const int64_t num_masks = lines.size(0), vocab = logits.size(1);
  const int64_t words = (vocab + kMaskBits - 1) / kMaskBits;
  check(logits, "logits", at::kFloat, {logits.size(0), vocab});
  check(lines, "lines", at::kLong, {num_masks});
  check(bits, "bits", at::kInt, {num_masks, words});
  const int64_t* line = lines.const_data_ptr<int64_t>();
  check_indices(line, num_masks, "lines", logits.size(0));
  for (int64_t i = 1; i < num_masks; ++i) TORCH_CHECK(line[i - 1] < line[i], "lines must rise, got ", line[i]);
  mask_tokens(logits.data_ptr<float>(), vocab, line, bits.const_data_ptr<int32_t>(), words, num_masks);
}

/// A column of float64 parameters, one for each of n draws, with any stride.
inline at::TensorAccessor<const double, 1> column(const Tensor& tensor, const char* name, int64_t n) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == at::kDouble, name, " must be float64 on the CPU");
  TORCH_CHECK(tensor.sizes() == at::IntArrayRef{n}, name, " must have shape [", n, "], got ", tensor.sizes());
  return tensor.accessor<const double, 1>();
}

/// Checks the parameters of a row.
inline Selection selection_of(double temperature, double top_k, double top_p, double max_gap) {
  const auto divisor = static_cast<float>(temperature);
  TORCH_CHECK(
      divisor > 0 && std::isfinite(divisor) && top_k >= 1 && top_p > 0 && max_gap >= 0,
      "temperature, top_k and top_p must be positive, max_gap not negative, and temperature a finite float32");
  return {divisor, static_cast<int64_t>(std::min(top_k, 0x1p62)), top_p, static_cast<float>(max_gap)};
}

inline Tensor sample_op(
    const Tensor& logits,
    const Tensor& lines,
    const Tensor& temperature,
    const Tensor& top_k,
    const Tensor& top_p,
    const Tensor& max_gap,
    const Tensor& draw) {
  check_not_recording("the choice of a token");
  const int64_t n = lines.size(0), vocab = logits.size(1);
  check(logits, "logits", at::kFloat, {logits.size(0), vocab});
  check(lines, "lines", at::kLong, {n});
  TORCH_CHECK(vocab > 0, "there is no token to choose");
  const auto temperatures = column(temperature, "temperature", n), top_ks = column(top_k, "top_k", n);
  const auto top_ps = column(top_p, "top_p", n), max_gaps = column(max_gap, "max_gap", n);
  const auto draws = column(draw, "draw", n);
  const float* all = logits.const_data_ptr<float>();
  const int64_t* line = lines.const_data_ptr<int64_t>();
  check_indices(line, n, "lines", logits.size(0));
  std::vector<Selection> selections;
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(0 <= draws[i] && draws[i] < 1, "draw must be in [0, 1), got ", draws[i]);
    selections.push_back(selection_of(temperatures[i], top_ks[i], top_ps[i], max_gaps[i]));
  }
  auto tokens = at::empty({n}, lines.options());
  int64_t* chosen = tokens.data_ptr<int64_t>();
  ThreadPool::get().run(n, [&](int64_t i) {
    chosen[i] = Distribution(all + line[i] * vocab, vocab, selections[i]).sample(draws[i]);
  });
  return tokens;
}

/// The columns of a table of sampling parameters, as `Column` (sampling_layout.py) numbers them.
enum Column { kTemperature, kTopK, kTopP, kMaxGap, kGreedy = 7, kNumColumns };

/// A token for each of n lines of logits [n, vocab] without edits. Line i has the parameters and the seed of row rows[i],
/// and the draw of positions[i]. The tokens are also stored as the rows' newest ones.
inline Tensor choose_tokens_op(
    const Tensor& logits,
    const Tensor& rows,
    const Tensor& positions,
    const Tensor& params,
    const Tensor& seeds,
    const optional<Tensor>& newest) {
  check_not_recording("the choice of a token");
  const int64_t n = rows.size(0), vocab = logits.size(1), num_rows = seeds.size(0);
  check(logits, "logits", at::kFloat, {n, vocab});
  TORCH_CHECK(vocab > 0, "there is no token to choose");
  check(rows, "rows", at::kLong, {n});
  check(positions, "positions", at::kLong, {n});
  check(params, "params", at::kDouble, {num_rows, kNumColumns});
  check(seeds, "seeds", at::kLong, {num_rows});
  const float* all = logits.const_data_ptr<float>();
  const int64_t *row = rows.const_data_ptr<int64_t>(), *position = positions.const_data_ptr<int64_t>();
  const int64_t* seed = seeds.const_data_ptr<int64_t>();
  const auto param = params.accessor<const double, 2>();
  std::vector<Selection> selections;
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(0 <= row[i] && row[i] < num_rows, "rows must be rows of params, got ", row[i]);
    const auto of_row = param[row[i]];
    selections.push_back(selection_of(of_row[kTemperature], of_row[kTopK], of_row[kTopP], of_row[kMaxGap]));
  }
  const auto tokens = at::empty({n}, rows.options());
  int64_t* chosen = tokens.data_ptr<int64_t>();
  ThreadPool::get().run(n, [&](int64_t i) {
    const float* x = all + i * vocab;
    chosen[i] = param[row[i]][kGreedy] != 0
        ? argmax(x, vocab)
        : Distribution(x, vocab, selections[i]).sample(uniform(seed[row[i]], position[i]));
  });
  if (newest) store_newest_op(tokens, rows, *newest);
  return tokens;
}

/// Log probabilities for n lines of logits [rows, vocab]: of the tokens ids [n, m], and of the k most probable tokens.
/// Returns float32 [n, m], float32 [n, k] and int32 [n, k].
inline std::tuple<Tensor, Tensor, Tensor> token_logprobs_op(
    const Tensor& logits, const Tensor& lines, const Tensor& ids, int64_t k) {
  check_not_recording("log probabilities");
  const int64_t n = lines.size(0), vocab = logits.size(1), m = ids.size(1);
  check(logits, "logits", at::kFloat, {logits.size(0), vocab});
  check(lines, "lines", at::kLong, {n});
  check(ids, "ids", at::kLong, {n, m});
  TORCH_CHECK(0 <= k && k <= vocab, "k must be at most the size of the vocabulary, got ", k);
  const float* all = logits.const_data_ptr<float>();
  const int64_t* line = lines.const_data_ptr<int64_t>();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  check_indices(line, n, "lines", logits.size(0));
  check_indices(id, n * m, "ids", vocab);
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
