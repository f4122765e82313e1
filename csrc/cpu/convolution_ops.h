// The operation of short convolutions, as torch calls it.
#pragma once

#include "convolution.h"
#include "graph.h"
#include "op_checks.h"

namespace tercet {

/// Checks all that decides where `convolve_stored` reads.
template <typename T>
void check_tokens(
    const ConvolvedTokens<T>& in, int64_t tokens, int64_t num_requests, int64_t num_rows, int64_t num_slots) {
  check_indices(in.slots, tokens, "slots", num_slots);
  check_indices(in.positions, tokens, "positions", in.context);
  TORCH_CHECK(!in.starts || in.starts[0] == 0, "starts must begin with 0, got ", in.starts ? in.starts[0] : 0);
  int64_t request = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    if (!in.starts) request = token;
    while (in.starts && request < num_requests && in.starts[request + 1] <= token) ++request;
    TORCH_CHECK(request < num_requests, "token ", token, " is of no request");
    const int64_t row = in.rows[request], position = in.positions[token];
    TORCH_CHECK(0 <= row && row < num_rows, "there is no row ", row, ", but ", num_rows, " rows");
    for (int64_t before = 0; before < std::min(in.width, position + 1); ++before) {
      const int64_t slot = in.slot_table[row * in.context + position - before];
      TORCH_CHECK(0 <= slot && slot < num_slots, "there is no slot ", slot, ", but ", num_slots, " slots");
    }
  }
}

/// projected: [tokens, 3 * channels] -> [tokens, channels]; see ConvolvedTokens. stored: [slots, channels], a view with
/// contiguous rows. rows: the row of each request in slot_table. starts: the first token of each request, and the number of
/// tokens; none: each request has one token.
inline Tensor short_convolution_op(
    const Tensor& projected,
    const Tensor& weight,
    const optional<Tensor>& bias,
    const Tensor& positions,
    const Tensor& slots,
    const Tensor& slot_table,
    const Tensor& rows,
    const optional<Tensor>& starts,
    const Tensor& stored) {
  const auto type = projected.scalar_type();
  TORCH_CHECK(weight.dim() == 2 && stored.dim() == 2, "weight and stored must be matrices");
  const int64_t tokens = projected.size(0), width = weight.size(0), channels = weight.size(1);
  const int64_t num_requests = rows.size(0), num_rows = slot_table.size(0), context = slot_table.size(1);
  TORCH_CHECK(std::min(width, channels) > 0, "a convolution must have weights, got ", weight.sizes());
  check(projected, "projected", type, {tokens, 3 * channels});
  check(weight, "weight", at::kFloat, {width, channels});
  if (bias) check(*bias, "bias", at::kFloat, {channels});
  check(positions, "positions", at::kLong, {tokens});
  check(slots, "slots", at::kLong, {tokens});
  check(slot_table, "slot_table", at::kInt, {num_rows, context});
  check(rows, "rows", at::kLong, {num_requests});
  if (starts)
    check(*starts, "starts", at::kLong, {num_requests + 1});
  else
    TORCH_CHECK(tokens == num_requests, "without starts every request has one new token");
  check_rows(stored, "stored", type, {stored.size(0), channels});
  const auto out = empty_result({tokens, channels}, projected.options());
  TERCET_ANY_FLOAT(type, [&] {
    const ConvolvedTokens<scalar_t> in{
        .projected = projected.const_data_ptr<scalar_t>(),
        .channels = channels,
        .width = width,
        .weight = weight.const_data_ptr<float>(),
        .bias = data_or_null<float>(bias),
        .stored = stored.data_ptr<scalar_t>(),
        .slot_stride = stored.stride(0),
        .slot_table = slot_table.const_data_ptr<int32_t>(),
        .context = context,
        .rows = rows.const_data_ptr<int64_t>(),
        .starts = data_or_null<int64_t>(starts),
        .positions = positions.const_data_ptr<int64_t>(),
        .slots = slots.const_data_ptr<int64_t>(),
        .out = out.data_ptr<scalar_t>(),
    };
    run_or_record(tokens, [=, num_slots = stored.size(0)](int64_t tokens) {
      check_tokens(in, tokens, num_requests, num_rows, num_slots);
      store_inputs(in, tokens);
      convolve_stored(in, tokens);
    });
  });
  return out;
}

}  // namespace tercet
