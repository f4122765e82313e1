// Rotary position embedding (arXiv 2104.09864) of queries and keys. Stores keys and values in the KV pool.
#pragma once

#include <vector>

#include "kv_panels.h"
#include "norm.h"

namespace tercet {

template <typename T>
struct Heads {
  int64_t heads, kv_heads, head_dim;
  /// [context, head_dim]: the cosines of a position's angles, then the sines
  const float* cos_sin;
  /// [head_dim] each: weights of an RMSNorm of every head (Qwen 3); nullptr: no norm
  const T* q_norm;
  const T* k_norm;
  double eps;
};

/// Normalises one head, if `norm` is given, and rotates it: component i rotates with component i + head_dim / 2.
template <typename T>
void rotate_head(const T* x, const T* norm, const float* cos_sin, const Heads<T>& h, float* scratch, T* out) {
  const int64_t dim = h.head_dim, half = dim / 2;
  FloatPair squares{Vec(0.f), Vec(0.f)};
  for (int64_t i = 0; i < dim; i += kPanel) {
    const FloatPair value = load_pair(x + i, dim - i);
    squares = squares + value * value;
    store_pair(scratch + i, value, dim - i);
  }
  if (norm) {
    const Vec scale(inverse_rms(sum_of(squares.left + squares.right), dim, h.eps));
    for (int64_t i = 0; i < dim; i += kPanel)
      store_pair(scratch + i, load_pair(scratch + i, dim - i) * scale * load_pair(norm + i, dim - i), dim - i);
  }
  for (int64_t i = 0; i < half; i += kPanel) {
    const int64_t count = half - i;
    const FloatPair cos = load_pair(cos_sin + i, count), sin = load_pair(cos_sin + half + i, count);
    const FloatPair first = load_pair(scratch + i, count), second = load_pair(scratch + half + i, count);
    store_pair(out + i, first * cos - second * sin, count);
    store_pair(out + half + i, second * cos + first * sin, count);
  }
}

/// Rotates the queries of qkv [tokens, heads + 2 * kv_heads, head_dim] in place. Calls
/// store(token, KV head, rotated key, value) for every token and KV head.
template <typename T, typename Store>
void rotate(T* qkv, int64_t tokens, const int64_t* positions, const Heads<T>& h, const Store& store) {
  const int64_t dim = h.head_dim, row = (h.heads + 2 * h.kv_heads) * dim;
  for_each_row_block(tokens, row, [&](int64_t first, int64_t end) {
    std::vector<float> scratch(dim);
    std::vector<T> rotated(dim);
    for (int64_t token = first; token < end; ++token) {
      const float* cos_sin = h.cos_sin + positions[token] * dim;
      T* q = qkv + token * row;
      for (int64_t head = 0; head < h.heads; ++head)
        rotate_head(q + head * dim, h.q_norm, cos_sin, h, scratch.data(), q + head * dim);
      const T* k = q + h.heads * dim;
      for (int64_t head = 0; head < h.kv_heads; ++head, k += dim) {
        rotate_head(k, h.k_norm, cos_sin, h, scratch.data(), rotated.data());
        store(token, head, rotated.data(), k + h.kv_heads * dim);
      }
    }
  });
}

/// Stores keys and values in their slots of k_pool and v_pool [slots, kv_heads, head_dim].
template <typename T>
void rotate_and_store(
    T* qkv, int64_t tokens, const int64_t* positions, const int64_t* slots, const Heads<T>& h, T* k_pool, T* v_pool) {
  rotate(qkv, tokens, positions, h, [&](int64_t token, int64_t head, const T* key, const T* value) {
    const int64_t at = (slots[token] * h.kv_heads + head) * h.head_dim;
    std::copy_n(key, h.head_dim, k_pool + at);
    std::copy_n(value, h.head_dim, v_pool + at);
  });
}

/// The same for pools in panels.
template <typename T>
void rotate_and_store(
    T* qkv, int64_t tokens, const int64_t* positions, const int64_t* slots, const Heads<T>& h, T* k_pool, T* v_pool,
    const KVPanels<T>& panels) {
  rotate(qkv, tokens, positions, h, [&](int64_t token, int64_t head, const T* key, const T* value) {
    const int64_t slot = slots[token];
    const bool next_slot_follows = token + 1 < tokens && slots[token + 1] == slot + 1;
    panels.store_key(key, slot, head, k_pool);
    panels.store_value(value, slot, head, !next_slot_follows, v_pool);
  });
}

}  // namespace tercet
