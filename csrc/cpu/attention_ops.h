// The operations of attention, as torch calls them.
#pragma once

#include "attention.h"
#include "graph.h"
#include "op_checks.h"
#include "rotary.h"

namespace tercet {

/// The shape of a KV pool: plain [slots, kv_heads, head_dim], or in panels (kv_panels.h). Values have value_dim numbers.
struct KVPoolShape {
  int64_t kv_heads, head_dim, value_dim, slots;
  bool in_panels;
  int64_t k_stride, v_stride;  // from slot to slot, or from block to block
};

inline void check_panels(const Tensor& pool, const char* name, at::ScalarType type, at::IntArrayRef shape) {
  TORCH_CHECK(pool.device().is_cpu() && pool.scalar_type() == type, name, " must be ", type, " on the CPU");
  TORCH_CHECK(pool.sizes() == shape, name, " must have shape ", shape, ", got ", pool.sizes());
  int64_t stride = 1;
  for (int64_t d = pool.dim() - 1; d > 0; stride *= shape[d--])
    TORCH_CHECK(pool.stride(d) == stride, "blocks of ", name, " must be contiguous");
}

inline KVPoolShape check_kv_pools(const Tensor& k_pool, const Tensor& v_pool, at::ScalarType type) {
  const bool in_panels = k_pool.dim() != 3;
  const int64_t per_word = 4 / c10::elementSize(type), slots = k_pool.size(0), kv_heads = k_pool.size(1);
  TORCH_CHECK(v_pool.dim() == (in_panels ? 6 : 3), "v_pool must be plain or in panels like k_pool, got ", v_pool.sizes());
  const int64_t dim = k_pool.size(2) * (in_panels ? per_word : 1), value_dim = v_pool.size(2) * (in_panels ? kPanel : 1);
  TORCH_CHECK(
      kv_heads > 0 && std::min(dim, value_dim) > 0, "a KV pool must have heads with components, got shapes ",
      k_pool.sizes(), " and ", v_pool.sizes());
  if (!in_panels) {
    check(k_pool, "k_pool", type, {slots, kv_heads, dim});
    const bool has_keys = v_pool.data_ptr() == k_pool.data_ptr();  // as in latent attention
    if (!has_keys || kv_heads > 1)
      check(v_pool, "v_pool", type, {slots, kv_heads, value_dim});
    else
      TORCH_CHECK(
          v_pool.scalar_type() == type && v_pool.sizes() == at::IntArrayRef({slots, 1, value_dim}) && value_dim <= dim &&
              v_pool.stride(0) == dim && v_pool.stride(2) == 1,
          "a v_pool in the memory of keys must be their first components, got shape ", v_pool.sizes());
  } else {
    TORCH_CHECK(dim % kPanel == 0, "heads must be whole panels");
    check_panels(k_pool, "k_pool", type, {slots, kv_heads, dim / per_word, kPanel, per_word});
    check_panels(v_pool, "v_pool", type, {slots, kv_heads, value_dim / kPanel, kPanel / per_word, kPanel, per_word});
  }
  return {kv_heads, dim, value_dim, slots * (in_panels ? kPanel : 1), in_panels, k_pool.stride(0), v_pool.stride(0)};
}

/// The pool of models whose keys and values have the same size.
inline KVPoolShape check_equal_pools(const Tensor& k_pool, const Tensor& v_pool, at::ScalarType type) {
  const KVPoolShape pool = check_kv_pools(k_pool, v_pool, type);
  TORCH_CHECK(
      pool.value_dim == pool.head_dim && pool.v_stride == pool.k_stride,
      "k_pool and v_pool must have the same shape and strides, got ", k_pool.sizes(), " and ", v_pool.sizes());
  return pool;
}

inline void rotate_and_store_op(
    const Tensor& qkv,
    const Tensor& positions,
    const Tensor& slots,
    const Tensor& cos_sin,
    const optional<Tensor>& q_norm,
    const optional<Tensor>& k_norm,
    double eps,
    const Tensor& k_pool,
    const Tensor& v_pool,
    const optional<Tensor>& q_scales,
    bool norm_after) {
  const auto type = qkv.scalar_type();
  const KVPoolShape pool = check_equal_pools(k_pool, v_pool, type);
  const int64_t kv_heads = pool.kv_heads, dim = pool.head_dim;
  TORCH_CHECK(qkv.dim() == 2, "qkv must be a matrix, got ", qkv.sizes());
  const int64_t tokens = qkv.size(0), num_positions = cos_sin.size(0), num_slots = pool.slots;
  const int64_t heads = qkv.size(1) / dim - 2 * kv_heads;
  TORCH_CHECK(heads > 0 && heads % kv_heads == 0 && dim % 2 == 0, "qkv does not fit the pool");
  check_rows(qkv, "qkv", type, {tokens, (heads + 2 * kv_heads) * dim});
  check(positions, "positions", at::kLong, {tokens});
  check(slots, "slots", at::kLong, {tokens});
  check(cos_sin, "cos_sin", at::kFloat, {num_positions, dim});
  TORCH_CHECK(q_norm.has_value() == k_norm.has_value(), "a norm of queries without one of keys, or the reverse");
  TORCH_CHECK(!norm_after || (q_norm && !q_scales), "norm_after needs norms, and excludes q_scales");
  if (q_scales) check(*q_scales, "q_scales", at::kFloat, {num_positions});
  const bool norms_rows = q_norm && q_norm->numel() != dim;
  if (q_norm) check(*q_norm, "q_norm", at::kFloat, {norms_rows ? heads * dim : dim});
  if (k_norm) check(*k_norm, "k_norm", at::kFloat, {norms_rows ? kv_heads * dim : dim});
  const auto call = [&]<typename T>(T, const auto&... panels) {
    const Heads<T> shape{
        heads, kv_heads, dim, cos_sin.const_data_ptr<float>(), data_or_null<float>(q_norm), data_or_null<float>(k_norm),
        norms_rows, norm_after, eps, data_or_null<float>(q_scales), qkv.stride(0)};
    run_or_record(
        tokens,
        [=,
         qkv = qkv.data_ptr<T>(),
         positions = positions.const_data_ptr<int64_t>(),
         slots = slots.const_data_ptr<int64_t>(),
         k_pool = k_pool.data_ptr<T>(),
         v_pool = v_pool.data_ptr<T>()](int64_t tokens) {
          check_indices(positions, tokens, "positions", num_positions);
          check_indices(slots, tokens, "slots", num_slots);
          rotate_and_store(qkv, tokens, positions, slots, shape, k_pool, v_pool, panels...);
        });
  };
  if (pool.in_panels)
    TERCET_DOT_FLOAT(type, [&] { call(scalar_t(), KVPanels<scalar_t>{pool.k_stride, dim}); });
  else
    TERCET_ANY_FLOAT(type, [&] { call(scalar_t()); });
}

inline Tensor attention_op(
    const Tensor& q,
    const Tensor& k_pool,
    const Tensor& v_pool,
    const Tensor& slot_table,
    const Tensor& rows,
    const Tensor& seq_lens,
    const optional<Tensor>& starts,
    optional<int64_t> window,
    double scale,
    const optional<Tensor>& sinks,
    optional<double> soft_cap) {
  const auto type = q.scalar_type();
  const KVPoolShape pool = check_kv_pools(k_pool, v_pool, type);
  const int64_t kv_heads = pool.kv_heads, dim = pool.head_dim;
  const int64_t tokens = q.size(0), heads = q.size(1);
  const int64_t num_requests = rows.size(0);
  TORCH_CHECK(q.dim() == 3 && q.size(2) == dim, "q must have heads as large as those of the pool, got ", q.sizes());
  TORCH_CHECK(q.device().is_cpu() && q.stride(2) == 1 && q.stride(1) == dim, "heads of q must be contiguous");
  TORCH_CHECK(heads > 0 && heads % kv_heads == 0, "heads must be a multiple of ", kv_heads, ", got ", heads);
  TORCH_CHECK(!window || *window > 0, "a window must be positive, got ", *window);
  check(slot_table, "slot_table", at::kInt, {slot_table.size(0), slot_table.size(1)});
  check(rows, "rows", at::kLong, {num_requests});
  check(seq_lens, "seq_lens", at::kLong, {num_requests});
  if (starts)
    check(*starts, "starts", at::kLong, {num_requests + 1});
  else
    TORCH_CHECK(tokens == num_requests, "without starts every request has one new token");
  if (sinks) check(*sinks, "sinks", at::kFloat, {heads});
  TORCH_CHECK(!soft_cap || *soft_cap > 0, "a soft cap must be positive, got ", *soft_cap);
  const auto out = empty_result({tokens, heads * pool.value_dim}, q.options());
  constexpr int64_t kEverything = std::numeric_limits<int32_t>::max();
  const AttentionBatch batch{
      .slot_table = slot_table.const_data_ptr<int32_t>(),
      .num_rows = slot_table.size(0),
      .context = slot_table.size(1),
      .num_slots = pool.slots,
      .rows = rows.const_data_ptr<int64_t>(),
      .seq_lens = seq_lens.const_data_ptr<int64_t>(),
      .starts = data_or_null<int64_t>(starts),
      .max_tokens = tokens,
      .num_requests = num_requests,
      .heads = heads,
      .kv_heads = kv_heads,
      .head_dim = dim,
      .value_dim = pool.value_dim,
      .window = window.value_or(kEverything),
  };
  const auto call = [&]<typename T, bool kInPanels>() {
    const AttentionInputs<T> inputs{
        .batch = batch,
        .q = q.const_data_ptr<T>(),
        .q_stride = q.stride(0),
        .pool = {k_pool.const_data_ptr<T>(), v_pool.const_data_ptr<T>(), pool.k_stride, pool.v_stride},
        .scale = static_cast<float>(soft_cap.value_or(scale)),
        .cap_scale = soft_cap ? static_cast<float>(scale / *soft_cap) : 0.f,
        .sinks = data_or_null<float>(sinks),
        .out = out.data_ptr<T>(),
    };
    run_or_record_requests(num_requests, [inputs, plan = step_plan(batch, sizeof(T))](int64_t requests) {
      Attention<T, kInPanels>(inputs, plan->get(requests, ThreadPool::get().num_threads())).run();
    });
  };
  if (pool.in_panels)
    TERCET_DOT_FLOAT(type, [&] { call.template operator()<scalar_t, true>(); });
  else
    TERCET_ANY_FLOAT(type, [&] { call.template operator()<scalar_t, false>(); });
  return out;
}

}  // namespace tercet
