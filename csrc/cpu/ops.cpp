// The operations as torch knows them: shapes are checked here and nowhere else. What each does is said where it is
// implemented; its twin in plain torch is the layer of the same name in model_executor/layers.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "argmax.h"
#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "graph.h"
#include "quantized.h"
#include "rotary.h"
#include "sampling.h"

/// model_executor/cpu_build.py reads it from the compiled file, before that is loaded: the version of torch and a
/// digest of these sources.
extern "C" __attribute__((used)) const char tercet_build[] = TERCET_BUILD;

namespace tercet {
namespace {

using at::Tensor;
using std::optional;

#define TERCET_ANY_FLOAT(type, ...)                                              \
  AT_DISPATCH_SWITCH(                                                            \
      type, "tercet", AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)                  \
                          AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__)           \
                              AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

// Types that `Dot` multiplies.
#ifdef __AVX512BF16__
#define TERCET_DOT_FLOAT(type, ...)                                              \
  AT_DISPATCH_SWITCH(                                                            \
      type, "tercet", AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)                  \
                          AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__))
#else
#define TERCET_DOT_FLOAT(type, ...) AT_DISPATCH_SWITCH(type, "tercet", AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__))
#endif

void check(const Tensor& tensor, const char* name, at::ScalarType type, at::IntArrayRef shape) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous(), name, " must be contiguous and on the CPU");
  TORCH_CHECK(tensor.scalar_type() == type, name, " must be ", type, ", got ", tensor.scalar_type());
  TORCH_CHECK(tensor.sizes() == shape, name, " must have shape ", shape, ", got ", tensor.sizes());
}

template <typename T>
const T* data_or_null(const optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

template <typename T>
Packed<T> packed_weight(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns) {
  const int64_t k = x.size(1), per_word = Dot<T>::kPerWord, panels = ceil_div(columns, kPanel);
  TORCH_CHECK(k % per_word == 0, "rows of x must be whole words");
  check(packed, "packed", x.scalar_type(), {panels, k / per_word, kPanel, per_word});
  if (bias) check(*bias, "bias", at::kFloat, {panels, kPanel});
  return {packed.const_data_ptr<T>(), data_or_null<float>(bias), k};
}

Tensor linear_op(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t n, bool to_float) {
  check(x, "x", x.scalar_type(), {x.size(0), x.size(1)});
  const auto out = empty_result({x.size(0), n}, to_float ? x.options().dtype(at::kFloat) : x.options());
  TERCET_DOT_FLOAT(x.scalar_type(), [&] {
    const auto weight = packed_weight<scalar_t>(x, packed, bias, n);
    const auto to = [&](auto* numbers) {
      perform(x.size(0), [=, x = x.const_data_ptr<scalar_t>()](int64_t rows) { linear(x, rows, weight, n, numbers); });
    };
    to_float ? to(out.data_ptr<float>()) : to(out.data_ptr<scalar_t>());
  });
  return out;
}

Tensor linear_silu_mul_op(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t n) {
  check(x, "x", x.scalar_type(), {x.size(0), x.size(1)});
  const auto out = empty_result({x.size(0), n}, x.options());
  TERCET_DOT_FLOAT(x.scalar_type(), [&] {
    const auto weight = packed_weight<scalar_t>(x, packed, bias, 2 * round_up(n, kLanes));
    perform(x.size(0), [=, x = x.const_data_ptr<scalar_t>(), out = out.data_ptr<scalar_t>()](int64_t rows) {
      linear_silu_mul(x, rows, weight, n, out);
    });
  });
  return out;
}

/// Their numbers, which are checked: they are of panels.
const int64_t* rows_of_panels(const Tensor& ids, int64_t panels) {
  TORCH_CHECK(!Graph::recording(), "looking up vectors cannot be recorded");
  check(ids, "ids", at::kLong, {ids.size(0)});
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.size(0); ++i)
    TORCH_CHECK(0 <= id[i] && id[i] < panels * kPanel, "there is no vector for id ", id[i]);
  return id;
}

Tensor embedding_op(const Tensor& ids, const Tensor& packed) {
  const int64_t count = ids.size(0), k = packed.size(1) * packed.size(3);
  check(packed, "packed", packed.scalar_type(), {packed.size(0), packed.size(1), kPanel, packed.size(3)});
  const int64_t* id = rows_of_panels(ids, packed.size(0));
  auto out = at::empty({count, k}, packed.options());
  TERCET_DOT_FLOAT(packed.scalar_type(), [&] {
    unpack_rows(id, count, packed.const_data_ptr<scalar_t>(), k, out.data_ptr<scalar_t>());
  });
  return out;
}

Tensor quantized_embedding_op(const Tensor& ids, const Tensor& packed, at::ScalarType type) {
  using Weight = QuantizedPacked<Int8Weights>;
  const int64_t count = ids.size(0), groups = packed.size(1);
  check(packed, "packed", at::kByte, {packed.size(0), groups, Weight::kGroupBytes});
  const int64_t* id = rows_of_panels(ids, packed.size(0));
  auto out = at::empty({count, groups * kGroup}, packed.options().dtype(type));
  const Weight weight{packed.const_data_ptr<uint8_t>(), nullptr, groups * kGroup};
  TERCET_ANY_FLOAT(type, [&] { unpack_rows(id, count, weight, out.data_ptr<scalar_t>()); });
  return out;
}

/// f(rows of x, how many, weight) with the kind of weight that was packed
template <typename F>
void with_quantized(
    const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns, int64_t bits, const F& f) {
  const int64_t k = x.size(1), panels = ceil_div(columns, kPanel);
  check(x, "x", x.scalar_type(), {x.size(0), k});
  TORCH_CHECK(k % kGroup == 0, "rows of x must be whole groups");
  TORCH_CHECK(bits == 4 || bits == 8, "weights must have 4 or 8 bits");
  if (bias) check(*bias, "bias", at::kFloat, {panels, kPanel});
  const auto scratch = empty_result({x.size(0), QuantizedRows::row_bytes(k)}, x.options().dtype(at::kByte));
  const QuantizedRows quantized{scratch.data_ptr<uint8_t>(), k};
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    perform(x.size(0), [=, x = x.const_data_ptr<scalar_t>()](int64_t rows) { quantize_rows(x, rows, quantized); });
  });
  const auto call = [&](auto weight) {
    check(packed, "packed", at::kByte, {panels, k / kGroup, weight.kGroupBytes});
    const decltype(weight) of_packed{packed.const_data_ptr<uint8_t>(), data_or_null<float>(bias), k};
    perform(x.size(0), [=](int64_t rows) { f(quantized, rows, of_packed); });
  };
  bits == 4 ? call(QuantizedPacked<Int4Weights>()) : call(QuantizedPacked<Int8Weights>());
}

Tensor quantized_linear_op(
    const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t n, int64_t bits, bool to_float) {
  const auto out = empty_result({x.size(0), n}, to_float ? x.options().dtype(at::kFloat) : x.options());
  TERCET_ANY_FLOAT(out.scalar_type(), [&] {
    with_quantized(
        x, packed, bias, n, bits,
        [n, out = out.data_ptr<scalar_t>()](const auto& x, int64_t rows, const auto& weight) {
          linear(x, rows, weight, n, out);
        });
  });
  return out;
}

Tensor quantized_linear_silu_mul_op(
    const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t n, int64_t bits) {
  const auto out = empty_result({x.size(0), n}, x.options());
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    with_quantized(
        x, packed, bias, 2 * round_up(n, kLanes), bits,
        [n, out = out.data_ptr<scalar_t>()](const auto& x, int64_t rows, const auto& weight) {
          linear_silu_mul(x, rows, weight, n, out);
        });
  });
  return out;
}

Tensor rms_norm_op(const Tensor& x, const optional<Tensor>& residual, const Tensor& weight, double eps) {
  const int64_t rows = x.size(0), n = x.size(1);
  check(x, "x", x.scalar_type(), {rows, n});
  if (residual) check(*residual, "residual", x.scalar_type(), {rows, n});
  check(weight, "weight", x.scalar_type(), {n});
  const auto out = empty_result({rows, n}, x.options());
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    perform(
        rows,
        [=,
         x = x.const_data_ptr<scalar_t>(),
         residual = residual ? residual->data_ptr<scalar_t>() : nullptr,
         weight = weight.const_data_ptr<scalar_t>(),
         out = out.data_ptr<scalar_t>()](int64_t rows) { rms_norm(x, residual, weight, eps, rows, n, out); });
  });
  return out;
}

/// Of a KV pool: plain [slots, kv_heads, head_dim], or in panels (kv_panels.h).
struct PoolShape {
  int64_t kv_heads, head_dim;
  bool in_panels;
  int64_t stride;  // from slot to slot, or from block to block
};

void check_blocks(const Tensor& pool, const char* name, at::ScalarType type, at::IntArrayRef shape) {
  TORCH_CHECK(pool.device().is_cpu() && pool.scalar_type() == type, name, " must be ", type, " on the CPU");
  TORCH_CHECK(pool.sizes() == shape, name, " must have shape ", shape, ", got ", pool.sizes());
  int64_t stride = 1;
  for (int64_t d = pool.dim() - 1; d > 0; stride *= shape[d--])
    TORCH_CHECK(pool.stride(d) == stride, "blocks of ", name, " must be contiguous");
}

PoolShape check_pools(const Tensor& k_pool, const Tensor& v_pool, at::ScalarType type) {
  const bool in_panels = k_pool.dim() != 3;
  const int64_t per_word = 4 / c10::elementSize(type), slots = k_pool.size(0), kv_heads = k_pool.size(1);
  const int64_t dim = k_pool.size(2) * (in_panels ? per_word : 1);
  if (!in_panels) {
    check(k_pool, "k_pool", type, {slots, kv_heads, dim});
    check(v_pool, "v_pool", type, {slots, kv_heads, dim});
  } else {
    TORCH_CHECK(dim % kPanel == 0, "heads must be whole panels");
    check_blocks(k_pool, "k_pool", type, {slots, kv_heads, dim / per_word, kPanel, per_word});
    check_blocks(v_pool, "v_pool", type, {slots, kv_heads, dim / kPanel, kPanel / per_word, kPanel, per_word});
    TORCH_CHECK(v_pool.stride(0) == k_pool.stride(0), "blocks of both pools must be equally far apart");
  }
  return {kv_heads, dim, in_panels, k_pool.stride(0)};
}

void rotate_and_store_op(
    const Tensor& qkv,
    const Tensor& positions,
    const Tensor& slots,
    const Tensor& cos_sin,
    const optional<Tensor>& q_norm,
    const optional<Tensor>& k_norm,
    double eps,
    const Tensor& k_pool,
    const Tensor& v_pool) {
  const auto type = qkv.scalar_type();
  const PoolShape pool = check_pools(k_pool, v_pool, type);
  const int64_t kv_heads = pool.kv_heads, dim = pool.head_dim;
  const int64_t tokens = qkv.size(0);
  const int64_t heads = qkv.size(1) / dim - 2 * kv_heads;
  TORCH_CHECK(heads > 0 && heads % kv_heads == 0 && dim % 2 == 0, "qkv does not fit the pool");
  check(qkv, "qkv", type, {tokens, (heads + 2 * kv_heads) * dim});
  check(positions, "positions", at::kLong, {tokens});
  check(slots, "slots", at::kLong, {tokens});
  check(cos_sin, "cos_sin", at::kFloat, {cos_sin.size(0), dim});
  TORCH_CHECK(q_norm.has_value() == k_norm.has_value(), "a norm of queries without one of keys, or the reverse");
  if (q_norm) check(*q_norm, "q_norm", type, {dim});
  if (k_norm) check(*k_norm, "k_norm", type, {dim});
  const auto call = [&]<typename T>(T, const auto&... panels) {
    const Heads<T> shape{
        heads, kv_heads, dim, cos_sin.const_data_ptr<float>(), data_or_null<T>(q_norm), data_or_null<T>(k_norm), eps};
    perform(
        tokens,
        [=,
         qkv = qkv.data_ptr<T>(),
         positions = positions.const_data_ptr<int64_t>(),
         slots = slots.const_data_ptr<int64_t>(),
         k_pool = k_pool.data_ptr<T>(),
         v_pool = v_pool.data_ptr<T>()](int64_t tokens) {
          rotate_and_store(qkv, tokens, positions, slots, shape, k_pool, v_pool, panels...);
        });
  };
  if (pool.in_panels)
    TERCET_DOT_FLOAT(type, [&] { call(scalar_t(), KVPanels<scalar_t>{pool.stride, dim}); });
  else
    TERCET_ANY_FLOAT(type, [&] { call(scalar_t()); });
}

Tensor attention_op(
    const Tensor& q,
    const Tensor& k_pool,
    const Tensor& v_pool,
    const Tensor& slot_table,
    const Tensor& rows,
    const Tensor& seq_lens,
    const optional<Tensor>& starts,
    optional<int64_t> window,
    double scale) {
  const auto type = q.scalar_type();
  const PoolShape pool = check_pools(k_pool, v_pool, type);
  const int64_t kv_heads = pool.kv_heads, dim = pool.head_dim;
  const int64_t tokens = q.size(0), heads = q.size(1);
  const int64_t num_requests = rows.size(0);
  TORCH_CHECK(q.size(2) == dim, "heads of q must be as large as those of the pool");
  TORCH_CHECK(q.device().is_cpu() && q.stride(2) == 1 && q.stride(1) == dim, "heads of q must be contiguous");
  TORCH_CHECK(heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  check(slot_table, "slot_table", at::kInt, slot_table.sizes());
  check(rows, "rows", at::kLong, {num_requests});
  check(seq_lens, "seq_lens", at::kLong, {num_requests});
  if (starts)
    check(*starts, "starts", at::kLong, {num_requests + 1});
  else
    TORCH_CHECK(tokens == num_requests, "without starts every request has one new token");
  TORCH_CHECK(!starts || !Graph::recording(), "attention of prompts cannot be recorded");
  const auto out = empty_result({tokens, heads * dim}, q.options());
  constexpr int64_t kEverything = std::numeric_limits<int32_t>::max();
  const AttentionBatch batch{
      .slot_table = slot_table.const_data_ptr<int32_t>(),
      .context = slot_table.size(1),
      .rows = rows.const_data_ptr<int64_t>(),
      .seq_lens = seq_lens.const_data_ptr<int64_t>(),
      .starts = data_or_null<int64_t>(starts),
      .num_requests = num_requests,
      .heads = heads,
      .kv_heads = kv_heads,
      .head_dim = dim,
      .window = window.value_or(kEverything),
  };
  const auto call = [&]<typename T, bool kInPanels>() {
    const AttentionInputs<T> inputs{
        .batch = batch,
        .q = q.const_data_ptr<T>(),
        .q_stride = q.stride(0),
        .k_pool = k_pool.const_data_ptr<T>(),
        .v_pool = v_pool.const_data_ptr<T>(),
        .block_stride = pool.stride,
        .scale = static_cast<float>(scale),
        .out = out.data_ptr<T>(),
    };
    perform(num_requests, [inputs, plan = step_plan(batch, sizeof(T))](int64_t requests) {
      Attention<T, kInPanels>(inputs, plan->get(requests, Pool::get().num_threads())).run();
    });
  };
  if (pool.in_panels)
    TERCET_DOT_FLOAT(type, [&] { call.template operator()<scalar_t, true>(); });
  else
    TERCET_ANY_FLOAT(type, [&] { call.template operator()<scalar_t, false>(); });
  return out;
}

Tensor argmax_op(const Tensor& logits) {
  TORCH_CHECK(!Graph::recording(), "the choice of a token cannot be recorded");
  check(logits, "logits", at::kFloat, {logits.size(0), logits.size(1)});
  auto tokens = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  argmax(logits.const_data_ptr<float>(), logits.size(0), logits.size(1), tokens.data_ptr<int64_t>());
  return tokens;
}

/// One number for each of n draws, any stride.
at::TensorAccessor<const double, 1> column(const Tensor& tensor, const char* name, int64_t n) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == at::kDouble, name, " must be float64 on the CPU");
  TORCH_CHECK(tensor.sizes() == at::IntArrayRef{n}, name, " must have shape [", n, "], got ", tensor.sizes());
  return tensor.accessor<const double, 1>();
}

Tensor sample_op(
    const Tensor& logits,
    const Tensor& lines,
    const Tensor& temperature,
    const Tensor& top_k,
    const Tensor& top_p,
    const Tensor& max_gap,
    const Tensor& draw) {
  const int64_t n = lines.size(0), vocab = logits.size(1);
  check(logits, "logits", at::kFloat, {logits.size(0), vocab});
  check(lines, "lines", at::kLong, {n});
  const auto temperatures = column(temperature, "temperature", n), top_ks = column(top_k, "top_k", n);
  const auto top_ps = column(top_p, "top_p", n), max_gaps = column(max_gap, "max_gap", n);
  const auto draws = column(draw, "draw", n);
  const float* all = logits.const_data_ptr<float>();
  const int64_t* line = lines.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(0 <= line[i] && line[i] < logits.size(0), "lines must be lines of logits, got ", line[i]);
    TORCH_CHECK(
        temperatures[i] > 0 && top_ks[i] >= 1 && top_ps[i] > 0 && max_gaps[i] >= 0 && 0 <= draws[i] && draws[i] < 1,
        "temperature, top_k and top_p must be positive, max_gap not negative, and draw in [0, 1)");
  }
  auto tokens = at::empty({n}, lines.options());
  int64_t* chosen = tokens.data_ptr<int64_t>();
  Pool::get().run(n, [&](int64_t i) {
    const Selection selection{
        static_cast<float>(temperatures[i]), static_cast<int64_t>(top_ks[i]), top_ps[i],
        static_cast<float>(max_gaps[i])};
    chosen[i] = Distribution(all + line[i] * vocab, vocab, selection).sample(draws[i]);
  });
  return tokens;
}

int64_t lanes() { return kLanes; }

}  // namespace

TORCH_LIBRARY(tercet_cpu, m) {
  m.class_<Graph>("Graph")
      .def(torch::init<>())
      .def("record", &Graph::record)
      .def("finish", &Graph::finish)
      .def("run", &Graph::run)
      .def("num_operations", &Graph::num_operations);
  m.def("lanes() -> int", &lanes);
  m.def("num_threads() -> int", [] { return Pool::get().num_threads(); });
  m.def("set_num_threads(int n) -> ()", [](int64_t n) {
    TORCH_CHECK(n >= 0, "the number of threads must not be negative, got ", n);
    Pool::get().set_num_threads(n);
  });
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int n, bool to_float=False) -> Tensor", &linear_op);
  m.def("linear_silu_mul(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor", &linear_silu_mul_op);
  m.def("embedding(Tensor ids, Tensor packed) -> Tensor", &embedding_op);
  m.def("quantized_embedding(Tensor ids, Tensor packed, ScalarType dtype) -> Tensor", &quantized_embedding_op);
  m.def(
      "quantized_linear(Tensor x, Tensor packed, Tensor? bias, int n, int bits, bool to_float=False) -> Tensor",
      &quantized_linear_op);
  m.def(
      "quantized_linear_silu_mul(Tensor x, Tensor packed, Tensor? bias, int n, int bits) -> Tensor",
      &quantized_linear_silu_mul_op);
  m.def("rms_norm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps) -> Tensor", &rms_norm_op);
  m.def(
      "rotate_and_store(Tensor(a!) qkv, Tensor positions, Tensor slots, Tensor cos_sin, Tensor? q_norm, "
      "Tensor? k_norm, float eps, Tensor(b!) k_pool, Tensor(c!) v_pool) -> ()",
      &rotate_and_store_op);
  m.def(
      "attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor slot_table, Tensor rows, Tensor seq_lens, "
      "Tensor? starts, int? window, float scale) -> Tensor",
      &attention_op);
  m.def("argmax(Tensor logits) -> Tensor", &argmax_op);
  m.def(
      "sample(Tensor logits, Tensor lines, Tensor temperature, Tensor top_k, Tensor top_p, Tensor max_gap, "
      "Tensor draw) -> Tensor",
      &sample_op);
}

}  // namespace tercet
