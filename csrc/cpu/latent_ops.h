// The operations of latent attention, as torch calls them.
#pragma once

#include "attention_ops.h"
#include "head_linear.h"
#include "latent.h"
#include "layer_ops.h"

namespace tercet {

/// Checks a view [tokens, heads, size] whose innermost dimension is contiguous.
inline void check_heads(const Tensor& x, const char* name, at::ScalarType type, at::IntArrayRef shape) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == type, name, " must be ", type, " on the CPU");
  TORCH_CHECK(x.sizes() == shape, name, " must have shape ", shape, ", got ", x.sizes());
  TORCH_CHECK(x.stride(2) == 1 || x.size(2) == 1, "the last dimension of ", name, " must be contiguous");
}

/// q, q_out: the rotated part of queries [tokens, heads, rope_dim], views; q_out may be q. projected: what the key of each
/// token is made from, [tokens, latent_dim + rope_dim], a view with contiguous rows, which this overwrites.
inline void rotate_and_store_latent_op(
    const Tensor& q,
    const Tensor& q_out,
    const Tensor& projected,
    const Tensor& positions,
    const Tensor& slots,
    const Tensor& cos_sin,
    const Tensor& norm,
    double eps,
    const Tensor& k_pool,
    const Tensor& v_pool) {
  const auto type = projected.scalar_type();
  const KVPoolShape pool = check_kv_pools(k_pool, v_pool, type);
  const int64_t dim = pool.head_dim, latent_dim = pool.value_dim, rope_dim = dim - latent_dim;
  TORCH_CHECK(pool.kv_heads == 1, "latent attention has one KV head, got ", pool.kv_heads);
  TORCH_CHECK(
      rope_dim > 0 && rope_dim % 2 == 0, "keys must have an even number of rotated components after the latent, got ", dim,
      " components with a latent of ", latent_dim);
  TORCH_CHECK(
      pool.in_panels || k_pool.data_ptr() == v_pool.data_ptr(), "values of a plain pool must be components of keys");
  const int64_t tokens = projected.size(0), heads = q.size(1), num_positions = cos_sin.size(0);
  check_heads(projected.unsqueeze(1), "projected", type, {tokens, 1, dim});
  check_heads(q, "q", type, {tokens, heads, rope_dim});
  check_heads(q_out, "q_out", type, {tokens, heads, rope_dim});
  check(positions, "positions", at::kLong, {tokens});
  check(slots, "slots", at::kLong, {tokens});
  check(cos_sin, "cos_sin", at::kFloat, {num_positions, rope_dim});
  check(norm, "norm", at::kFloat, {latent_dim});
  const auto call = [&]<typename T>(T, const auto&... pools) {
    const LatentTokens<T> in{
        .keys = projected.data_ptr<T>(),
        .key_stride = projected.stride(0),
        .latent_dim = latent_dim,
        .rope_dim = rope_dim,
        .q = q.const_data_ptr<T>(),
        .q_stride = q.stride(0),
        .q_head_stride = q.stride(1),
        .heads = heads,
        .out = q_out.data_ptr<T>(),
        .out_stride = q_out.stride(0),
        .out_head_stride = q_out.stride(1),
        .positions = positions.const_data_ptr<int64_t>(),
        .slots = slots.const_data_ptr<int64_t>(),
        .cos_sin = cos_sin.const_data_ptr<float>(),
        .norm = norm.const_data_ptr<float>(),
        .eps = eps,
    };
    run_or_record(tokens, [=, num_slots = pool.slots](int64_t tokens) {
      check_indices(in.positions, tokens, "positions", num_positions);
      check_indices(in.slots, tokens, "slots", num_slots);
      rotate_and_store_latent(in, tokens, pools...);
    });
  };
  if (pool.in_panels)
    TERCET_DOT_FLOAT(type, [&] {
      call(
          scalar_t(), k_pool.data_ptr<scalar_t>(), v_pool.data_ptr<scalar_t>(), KVPanels<scalar_t>{pool.k_stride, dim},
          KVPanels<scalar_t>{pool.v_stride, latent_dim});
    });
  else
    TERCET_ANY_FLOAT(type, [&] { call(scalar_t(), k_pool.data_ptr<scalar_t>()); });
}

/// x [tokens, heads, k], a view -> [tokens, heads, n + room]: row t of head h times the packed weight [n, k] of head h, and
/// then `room` numbers that this does not write.
/// packed: [heads, ceil(n / kPanel), k / kPerWord, kPanel, kPerWord], of the type of x, or bfloat16 under an x of float.
inline Tensor head_linear_op(const Tensor& x, const Tensor& packed, int64_t n, int64_t room) {
  const auto type = x.scalar_type();
  TORCH_CHECK(x.dim() == 3, "x must be [tokens, heads, numbers], got ", x.sizes());
  const int64_t tokens = x.size(0), heads = x.size(1), k = x.size(2);
  check_heads(x, "x", type, {tokens, heads, k});
  TORCH_CHECK(
      std::min({heads, k, n}) > 0 && room >= 0, "x and the result must have heads with numbers, got x of ", x.sizes(),
      ", n ", n, " and room ", room);
  const auto out = empty_result({tokens, heads, n + room}, x.options());
  const auto call = [&]<typename T, typename X, typename Out>(const HeadRows<const X>& rows, const HeadRows<Out>& out_rows) {
    constexpr int64_t kPerWord = Dot<T, X>::kPerWord;
    TORCH_CHECK(k % kPerWord == 0, "rows of x must be whole words");
    check(
        packed, "packed", c10::CppTypeToScalarType<T>::value,
        {heads, ceil_div(n, kPanel), k / kPerWord, kPanel, kPerWord});
    const HeadsPacked<T, X> weight{{packed.const_data_ptr<T>(), nullptr, k}, rows.stride};
    const auto next = next_weight(weight, heads * ceil_div(n, kPanel));
    run_or_record(
        tokens, [=](int64_t tokens) { head_linear(rows, tokens, heads, weight, *next, n, out_rows); });
  };
  const auto rows_of = [&]<typename T>(T) {
    return HeadRows<const T>{x.const_data_ptr<T>(), x.stride(0), x.stride(1)};
  };
  const auto to = [&]<typename T>(T) { return HeadRows<T>{out.data_ptr<T>(), heads * (n + room), n + room}; };
  if (type == at::kBFloat16 && Tuning::get().widens_bfloat16) {
    const auto floats = empty_result({tokens, heads, k}, x.options().dtype(at::kFloat));
    const HeadRows<float> widened{floats.data_ptr<float>(), heads * k, k};
    run_or_record(tokens, [=, from = rows_of(at::BFloat16())](int64_t tokens) {
      widen_heads(from, tokens, heads, k, widened);
    });
    call.template operator()<at::BFloat16, float>(
        HeadRows<const float>{widened.numbers, heads * k, k}, to(at::BFloat16()));
    return out;
  }
  with_packed_types(x, packed, [&]<typename X, typename T>(X, T) {
    if constexpr (kMultipliesBFloat16 || std::is_same_v<X, float>) call.template operator()<T, X>(rows_of(X()), to(X()));
  });
  return out;
}

}  // namespace tercet
