// The operation of Gated DeltaNets, as torch calls it.
#pragma once

#include "delta_net.h"
#include "graph.h"
#include "op_checks.h"

namespace tercet {

/// Checks all that decides where `DeltaNetHead` reads and writes.
template <typename T>
void check_tokens(const DeltaNetTokens<T>& in, int64_t requests, int64_t tokens, int64_t num_rows) {
  check_indices(in.rows, requests, "rows", num_rows);
  TORCH_CHECK(in.first_token(0) == 0, "starts must begin with 0, got ", in.first_token(0));
  for (int64_t request = 0; request < requests; ++request)
    TORCH_CHECK(
        in.first_token(request) < in.first_token(request + 1) && in.first_token(request + 1) <= tokens,
        "starts must increase to at most ", tokens, ", got ", in.first_token(request + 1));
  for (int64_t token = 0; token < in.first_token(requests); ++token)
    TORCH_CHECK(in.positions[token] >= 0, "positions must be at least 0, got ", in.positions[token]);
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t first = in.first_token(request), length = in.saved_len(request) - in.positions[first];
    if (in.saved_len(request) == 0) continue;
    TORCH_CHECK(
        length > 0 && length <= in.first_token(request + 1) - first, "saved_lens must be 0 or end in the new tokens, got ",
        in.saved_len(request));
    check_indices(in.saved_rows + request, 1, "saved_rows", num_rows);
  }
}

/// projected: [tokens, columns] -> [tokens, value_size]; see DeltaNetTokens. starts: the first token of each request, and
/// the number of tokens; none: each request has one token. Requests have rows of their own, except for padding.
/// saved_lens, saved_rows: see DeltaNetTokens; both or none.
inline Tensor delta_net_op(
    const Tensor& projected,
    const Tensor& convolution,
    const Tensor& decay_rate,
    const Tensor& decay_bias,
    const Tensor& norm,
    double eps,
    int64_t num_key_heads,
    const Tensor& positions,
    const Tensor& rows,
    const optional<Tensor>& starts,
    const optional<Tensor>& saved_lens,
    const optional<Tensor>& saved_rows,
    const Tensor& recent,
    const Tensor& states) {
  const auto type = projected.scalar_type();
  TORCH_CHECK(states.dim() == 4 && recent.dim() == 3, "states must have four dimensions, and recent inputs three");
  const int64_t tokens = projected.size(0), requests = rows.size(0), num_rows = states.size(0);
  const int64_t value_heads = states.size(1), key_dim = states.size(2), value_dim = states.size(3);
  TORCH_CHECK(
      num_key_heads > 0 && value_heads > 0 && value_heads % num_key_heads == 0, "the number of value heads must be a "
      "multiple of that of key heads (", num_key_heads, "), got ", value_heads);
  const int64_t width = recent.size(1) + 1, channels = 2 * num_key_heads * key_dim + value_heads * value_dim;
  TORCH_CHECK(std::min({width - 1, key_dim, value_dim}) > 0, "heads and recent inputs must not be empty");
  check(projected, "projected", type, {tokens, channels + value_heads * value_dim + 2 * value_heads});
  check(convolution, "convolution", at::kFloat, {width, channels});
  check(decay_rate, "decay_rate", at::kFloat, {value_heads});
  check(decay_bias, "decay_bias", at::kFloat, {value_heads});
  check(norm, "norm", at::kFloat, {value_dim});
  check(positions, "positions", at::kLong, {tokens});
  check(rows, "rows", at::kLong, {requests});
  if (starts)
    check(*starts, "starts", at::kLong, {requests + 1});
  else
    TORCH_CHECK(tokens == requests, "without starts every request has one new token");
  TORCH_CHECK(saved_lens.has_value() == saved_rows.has_value(), "saved_lens and saved_rows belong together");
  if (saved_lens) {
    check(*saved_lens, "saved_lens", at::kLong, {requests});
    check(*saved_rows, "saved_rows", at::kLong, {requests});
  }
  check(recent, "recent", type, {num_rows, width - 1, channels});
  check(states, "states", at::kFloat, {num_rows, value_heads, key_dim, value_dim});
  const auto out = empty_result({tokens, value_heads * value_dim}, projected.options());
  TERCET_ANY_FLOAT(type, [&] {
    const DeltaNetTokens<scalar_t> in{
        .projected = projected.const_data_ptr<scalar_t>(),
        .key_heads = num_key_heads,
        .value_heads = value_heads,
        .key_dim = key_dim,
        .value_dim = value_dim,
        .width = width,
        .convolution = convolution.const_data_ptr<float>(),
        .decay_rate = decay_rate.const_data_ptr<float>(),
        .decay_bias = decay_bias.const_data_ptr<float>(),
        .norm = norm.const_data_ptr<float>(),
        .eps = eps,
        .rows = rows.const_data_ptr<int64_t>(),
        .starts = data_or_null<int64_t>(starts),
        .positions = positions.const_data_ptr<int64_t>(),
        .saved_lens = data_or_null<int64_t>(saved_lens),
        .saved_rows = data_or_null<int64_t>(saved_rows),
        .recent = recent.data_ptr<scalar_t>(),
        .states = states.data_ptr<float>(),
        .out = out.data_ptr<scalar_t>(),
    };
    run_or_record_requests(requests, [=](int64_t requests) {
      check_tokens(in, requests, tokens, num_rows);
      run_delta_net(in, requests);
    });
  });
  return out;
}

}  // namespace tercet
