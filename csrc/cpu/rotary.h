// Rotary position embedding (arXiv 2104.09864) of queries and keys. Stores keys and values in the KV pool.
#pragma once

#include "kv_panels.h"
#include "norm.h"

namespace tercet {

template <typename T>
struct Heads {
  int64_t heads, kv_heads, head_dim;
  /// [context, head_dim]: the cosines of a position's angles, then the sines
  const float* cos_sin;
  /// weights of an RMSNorm; nullptr: no norm
  const float* q_norm;
  const float* k_norm;
  /// Whether a norm is that of all query heads, or all key heads, of a token (OLMo 2), and has a weight for each of
  /// their numbers. Otherwise it is that of each head (Qwen 3), and all heads have the same weights.
  bool norms_rows;
  /// whether the norm comes after the rotation (Hunyuan)
  bool norm_after;
  double eps;
  /// [context]: what the queries of a position are multiplied by; nullptr: by nothing
  const float* q_scales;
  /// Numbers from a token to the next one. A token has queries, keys and values, and may have others after them.
  int64_t row_stride;
};

/// Rotates one head in place: component i rotates with component i + dim / 2. Before, multiplies it by `scale`, and by
/// `norm`, if `norm` is given.
template <typename T>
void rotate_head(T* x, const float* norm, Vec scale, const float* cos_sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kPanel) {
    const int64_t count = half - i;
    const auto load = [&](int64_t at) {
      const FloatPair value = load_pair(x + at, count);
      return norm ? value * scale * load_pair(norm + at, count) : value * scale;
    };
    const FloatPair cos = load_pair(cos_sin + i, count), sin = load_pair(cos_sin + half + i, count);
    const FloatPair first = load(i), second = load(half + i);
    store_pair(x + i, first * cos - second * sin, count);
    store_pair(x + half + i, second * cos + first * sin, count);
  }
}

/// Rotates the queries or the keys of a token in place. Normalises them before or after, if `norm` is given. Multiplies
/// them by `factor`, which a norm after the rotation would cancel.
template <typename T>
void rotate_heads(T* x, int64_t heads, const float* norm, float factor, const float* cos_sin, const Heads<T>& h) {
  const int64_t size = heads * h.head_dim, size_of_norm = h.norms_rows ? size : h.head_dim;
  const float* norm_before = h.norm_after ? nullptr : norm;
  for (T* end = x + size; x < end; x += size_of_norm) {
    const Vec scale(norm_before ? inverse_rms_of(x, size_of_norm, h.eps) * factor : factor);
    for (int64_t i = 0; i < size_of_norm; i += h.head_dim)
      rotate_head(x + i, norm_before ? norm_before + i : nullptr, scale, cos_sin, h.head_dim);
    if (h.norm_after) normalise(x, norm, h.eps, size_of_norm);
  }
}

/// Rotates the queries and keys of a row of qkv in place.
template <typename T>
void rotate_row(T* row, int64_t position, const Heads<T>& h) {
  const float* cos_sin = h.cos_sin + position * h.head_dim;
  rotate_heads(row, h.heads, h.q_norm, h.q_scales ? h.q_scales[position] : 1.f, cos_sin, h);
  rotate_heads(row + h.heads * h.head_dim, h.kv_heads, h.k_norm, 1.f, cos_sin, h);
}

/// Divides tokens, each with row_size numbers, into runs: tokens whose slots are neighbours in the same group of kLanes
/// slots. Calls f(first token, first token after the run, first token after this thread's block of runs) for each run. No
/// two threads have tokens of the same run.
template <typename F>
void for_each_run_of_slots(const int64_t* slots, int64_t tokens, int64_t row_size, const F& f) {
  const auto next_run = [&](int64_t token) {
    while (0 < token && token < tokens && slots[token] % kLanes > 0 && slots[token] == slots[token - 1] + 1) ++token;
    return token;
  };
  for_each_row_block(tokens, row_size, [&](int64_t first, int64_t end) {
    end = next_run(end);
    for (int64_t run = next_run(first), next; run < end; run = next) {
      next = next_run(run + 1);
      f(run, next, end);
    }
  });
}

/// Rotates the queries and keys of qkv [tokens, heads + 2 * kv_heads, head_dim], a view, in place. Calls
/// store(keys of the first token, slot of the first token, tokens) for each run of slots.
template <typename T, typename Store>
void rotate_and_store(
    T* qkv, int64_t tokens, const int64_t* positions, const int64_t* slots, const Heads<T>& h, const Store& store) {
  const int64_t row_size = h.row_stride;
  for_each_run_of_slots(slots, tokens, row_size, [&](int64_t run, int64_t next, int64_t end) {
    for (int64_t token = run; token < next; ++token) {
      T* row = qkv + token * row_size;
      if (token + 1 < end) prefetch_to_write(row + row_size, row_size);
      rotate_row(row, positions[token], h);
    }
    store(qkv + run * row_size + h.heads * h.head_dim, slots[run], next - run);
  });
}

/// Stores keys and values in their slots of k_pool and v_pool [slots, kv_heads, head_dim].
template <typename T>
void rotate_and_store(
    T* qkv, int64_t tokens, const int64_t* positions, const int64_t* slots, const Heads<T>& h, T* k_pool, T* v_pool) {
  const int64_t size = h.kv_heads * h.head_dim;
  rotate_and_store(qkv, tokens, positions, slots, h, [&](const T* keys, int64_t slot, int64_t count) {
    for (int64_t i = 0; i < count; ++i, keys += h.row_stride) {
      std::copy_n(keys, size, k_pool + (slot + i) * size);
      std::copy_n(keys + size, size, v_pool + (slot + i) * size);
    }
  });
}

/// The same for pools in panels.
template <typename T>
void rotate_and_store(
    T* qkv, int64_t tokens, const int64_t* positions, const int64_t* slots, const Heads<T>& h, T* k_pool, T* v_pool,
    const KVPanels<T>& panels) {
  rotate_and_store(qkv, tokens, positions, slots, h, [&](const T* keys, int64_t slot, int64_t count) {
    for (int64_t head = 0; head < h.kv_heads; ++head, keys += h.head_dim) {
      panels.store_keys(keys, h.row_stride, slot, count, head, k_pool);
      panels.store_values(keys + h.kv_heads * h.head_dim, h.row_stride, slot, count, head, v_pool);
    }
  });
}

}  // namespace tercet
