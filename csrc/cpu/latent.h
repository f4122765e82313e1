// Latent attention (MLA, arXiv 2405.04434): the rotation of queries, and what a token stores.
//
// A token has one key for all query heads: its latent, normalised, then a part that is rotated. Its value is the latent.
#pragma once

#include "rotary.h"

namespace tercet {

/// The new tokens of a layer.
template <typename T>
struct LatentTokens {
  /// The keys before their norm and rotation, [tokens, latent_dim + rope_dim]. Rows are key_stride numbers apart.
  T* keys;
  int64_t key_stride, latent_dim, rope_dim;
  /// The rotated part of the queries [tokens, heads, rope_dim]: token t, head h at q + t * q_stride + h * q_head_stride
  const T* q;
  int64_t q_stride, q_head_stride, heads;
  /// where the rotated queries are written to, which may be where they are
  T* out;
  int64_t out_stride, out_head_stride;
  const int64_t* positions;
  const int64_t* slots;
  /// [context, rope_dim]: the cosines of a position's angles, then the sines
  const float* cos_sin;
  /// [latent_dim]
  const float* norm;
  double eps;
};

/// Writes the rotated queries of a token. Normalises and rotates its key in place.
template <typename T>
void rotate_latent_token(const LatentTokens<T>& in, int64_t token) {
  const float* cos_sin = in.cos_sin + in.positions[token] * in.rope_dim;
  for (int64_t head = 0; head < in.heads; ++head) {
    const T* from = in.q + token * in.q_stride + head * in.q_head_stride;
    T* to = in.out + token * in.out_stride + head * in.out_head_stride;
    if (from != to) std::copy_n(from, in.rope_dim, to);
    rotate_head(to, nullptr, Vec(1.f), cos_sin, in.rope_dim);
  }
  T* key = in.keys + token * in.key_stride;
  normalise(key, in.norm, in.eps, in.latent_dim);
  rotate_head(key + in.latent_dim, nullptr, Vec(1.f), cos_sin, in.rope_dim);
}

/// Writes the rotated queries of all tokens, and calls store(keys, slot, tokens) for each run (rotary.h).
template <typename T, typename Store>
void rotate_and_store_latent(const LatentTokens<T>& in, int64_t tokens, const Store& store) {
  const int64_t row_size = in.latent_dim + (1 + in.heads) * in.rope_dim;
  for_each_run_of_slots(in.slots, tokens, row_size, [&](int64_t run, int64_t next, int64_t) {
    for (int64_t token = run; token < next; ++token) rotate_latent_token(in, token);
    store(in.keys + run * in.key_stride, in.slots[run], next - run);
  });
}

/// Stores keys in k_pool [slots, latent_dim + rope_dim], whose first components are the values.
template <typename T>
void rotate_and_store_latent(const LatentTokens<T>& in, int64_t tokens, T* k_pool) {
  const int64_t size = in.latent_dim + in.rope_dim;
  rotate_and_store_latent(in, tokens, [&](const T* keys, int64_t slot, int64_t count) {
    for (int64_t i = 0; i < count; ++i) std::copy_n(keys + i * in.key_stride, size, k_pool + (slot + i) * size);
  });
}

/// Stores keys and values in pools in panels.
template <typename T>
void rotate_and_store_latent(
    const LatentTokens<T>& in,
    int64_t tokens,
    T* k_pool,
    T* v_pool,
    const KVPanels<T>& key_panels,
    const KVPanels<T>& value_panels) {
  rotate_and_store_latent(in, tokens, [&](const T* keys, int64_t slot, int64_t count) {
    key_panels.store_keys(keys, in.key_stride, slot, count, 0, k_pool);
    value_panels.store_values(keys, in.key_stride, slot, count, 0, v_pool);
  });
}

}  // namespace tercet
