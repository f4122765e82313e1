// Gated short convolutions (LFM2, arXiv 2511.23404).
#pragma once

#include <vector>

#include "norm.h"

namespace tercet {

/// The new tokens of a layer, and what its tokens have stored.
template <typename T>
struct ConvolvedTokens {
  /// [tokens, 3, channels]: a token stores the product of the first and the last vector. The second one multiplies the
  /// result.
  const T* projected;
  int64_t channels, width;
  /// [width, channels], those of the oldest token first
  const float* weight;
  /// [channels], or null
  const float* bias;
  /// what slots have stored, [channels] each; they are slot_stride numbers apart
  T* stored;
  int64_t slot_stride;
  /// [rows, context]
  const int32_t* slot_table;
  int64_t context;
  /// The row of each request, and its first token. starts is null if each has one token.
  const int64_t* rows;
  const int64_t* starts;
  const int64_t* positions;
  const int64_t* slots;
  /// [tokens, channels]
  T* out;
};

/// Writes what tokens store to their slots.
template <typename T>
void store_inputs(const ConvolvedTokens<T>& in, int64_t tokens) {
  const int64_t n = in.channels;
  for_each_row_block(tokens, 3 * n, [&](int64_t first, int64_t end) {
    for (int64_t token = first; token < end; ++token) {
      const T* from = in.projected + token * 3 * n;
      T* to = in.stored + in.slots[token] * in.slot_stride;
      for (int64_t i = 0; i < n; i += kPanel)
        store_pair(to + i, load_pair(from + i, n - i) * load_pair(from + 2 * n + i, n - i), n - i);
    }
  });
}

/// Computes the outputs of tokens from what they and the tokens before them have stored. Tokens before position 0 count
/// as zeros.
template <typename T>
void convolve_stored(const ConvolvedTokens<T>& in, int64_t tokens) {
  const int64_t n = in.channels;
  for_each_row_block(tokens, (in.width + 2) * n, [&](int64_t first, int64_t end) {
    std::vector<const T*> inputs(in.width);
    int64_t request = in.starts ? 0 : first;
    for (int64_t token = first; token < end; ++token) {
      if (in.starts)
        while (in.starts[request + 1] <= token) ++request;
      else
        request = token;
      const int64_t position = in.positions[token], missing = std::max<int64_t>(0, in.width - 1 - position);
      const int32_t* slots = in.slot_table + in.rows[request] * in.context;
      for (int64_t i = missing; i < in.width; ++i)
        inputs[i] = in.stored + slots[position - in.width + 1 + i] * in.slot_stride;
      const T* gate = in.projected + (3 * token + 1) * n;
      for (int64_t i = 0; i < n; i += kPanel) {
        FloatPair sum = in.bias ? load_pair(in.bias + i, n - i) : FloatPair{Vec(0.f), Vec(0.f)};
        for (int64_t k = missing; k < in.width; ++k)
          sum = sum + load_pair(inputs[k] + i, n - i) * load_pair(in.weight + k * n + i, n - i);
        store_pair(in.out + token * n + i, sum * load_pair(gate + i, n - i), n - i);
      }
    }
  });
}

}  // namespace tercet
