// The inputs of a recorded decode step, as torch calls them.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "graph.h"
#include "op_checks.h"

namespace tercet {

/// Sets column i of a matrix whose rows have `width` numbers.
inline void set_column(int64_t* matrix, int64_t width, int64_t i, std::initializer_list<int64_t> numbers) {
  for (const int64_t number : numbers) {
    matrix[i] = number;
    i += width;
  }
}

/// Writes the inputs of a decode step to the memory that a recording reads:
///   of_tokens [3, tokens]: the id, the slot and the position of each new token
///   of_requests [4, requests]: the row and the length of each request; each selected token and its row
///   starts [requests + 1]: the first new token of each request
/// Also writes the slots of the new tokens to the table. rows, seq_lens, slots: int32 [n]. Returns the largest length.
inline int64_t set_decode_inputs_op(
    const Tensor& rows,
    const Tensor& seq_lens,
    const Tensor& slots,
    const Tensor& newest,
    const Tensor& slot_table,
    const Tensor& of_tokens,
    const Tensor& of_requests,
    const Tensor& starts) {
  check_not_recording("the inputs of a step");
  const int64_t n = rows.size(0), max_tokens = of_tokens.size(1), max_requests = of_requests.size(1);
  const int64_t num_rows = slot_table.size(0), context_len = slot_table.size(1);
  TORCH_CHECK(n <= std::min(max_tokens, max_requests), "there is no room for ", n, " requests");
  for (const auto& [tensor, name] : {std::pair{&rows, "rows"}, {&seq_lens, "seq_lens"}, {&slots, "slots"}})
    check(*tensor, name, at::kInt, {n});
  check(newest, "newest", at::kLong, {num_rows});
  check(slot_table, "slot_table", at::kInt, {num_rows, context_len});
  check(of_tokens, "of_tokens", at::kLong, {3, max_tokens});
  check(of_requests, "of_requests", at::kLong, {4, max_requests});
  check(starts, "starts", at::kLong, {max_requests + 1});
  const int32_t *row = rows.const_data_ptr<int32_t>(), *len = seq_lens.const_data_ptr<int32_t>();
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  const int64_t* token = newest.const_data_ptr<int64_t>();
  int32_t* table = slot_table.data_ptr<int32_t>();
  int64_t *of_token = of_tokens.data_ptr<int64_t>(), *of_request = of_requests.data_ptr<int64_t>();
  int64_t *start = starts.data_ptr<int64_t>(), longest = 0;
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(0 <= row[i] && row[i] < num_rows, "rows must be rows of slot_table, got ", row[i]);
    TORCH_CHECK(0 < len[i] && len[i] <= context_len, "seq_lens must be in [1, ", context_len, "], got ", len[i]);
    table[row[i] * context_len + len[i] - 1] = slot[i];
    set_column(of_token, max_tokens, i, {token[row[i]], slot[i], len[i] - 1});
    set_column(of_request, max_requests, i, {row[i], len[i], i, row[i]});
    start[i] = i;
    longest = std::max<int64_t>(longest, len[i]);
  }
  start[n] = n;
  return longest;
}

}  // namespace tercet
