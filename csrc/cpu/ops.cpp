// Registers the operations with torch. They check their arguments, so loops need no checks. Most of them have a twin in
// plain torch, in model_executor/layers or in model_executor/sampling.
#include <torch/library.h>

#include "attention_ops.h"
#include "choice_ops.h"
#include "experts_ops.h"
#include "gated_ops.h"
#include "convolution_ops.h"
#include "delta_net_ops.h"
#include "head_gates.h"
#include "latent_ops.h"
#include "layer_ops.h"
#include "lora_ops.h"
#include "onednn.h"
#include "rates.h"
#include "step_ops.h"

/// model_executor/cpu_build.py reads it from the compiled file, before that is loaded: the version of torch and a
/// digest of these sources.
extern "C" __attribute__((used)) const char tercet_build[] = TERCET_BUILD;

namespace tercet {

TORCH_LIBRARY(tercet_cpu, m) {
  m.class_<Graph>("Graph")
      .def(torch::init<>())
      .def("record", &Graph::record)
      .def("begin_ending", &Graph::begin_ending)
      .def("finish", &Graph::finish)
      .def("run", &Graph::run)
      .def("run_ending", &Graph::run_ending)
      .def("num_operations", &Graph::num_operations);
  m.def("lanes() -> int", [] { return kLanes; });
  m.def("odd_bytes_are_signed() -> bool", [] { return kOddBytesAreSigned; });
  m.def("num_threads() -> int", [] { return ThreadPool::get().num_threads(); });
  m.def("set_num_threads(int n) -> ()", [](int64_t n) {
    TORCH_CHECK(n >= 0, "the number of threads must not be negative, got ", n);
    ThreadPool::get().set_num_threads(n);
  });
  m.def("multiplies_bfloat16() -> bool", [] { return kMultipliesBFloat16; });
  m.def(
      "set_tuning(int block_bytes, int chunk, bool widens_bfloat16, bool prefetches_into_l1) -> ()", &set_tuning_op);
  m.def("instruction_rates(ScalarType type, float seconds) -> Dict(str, float)", &instruction_rates_op);
  m.def("compact(Tensor panels) -> Tensor?", &compact_op);
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int n, bool to_float=False) -> Tensor", &linear_op);
  m.def(
      "linear_argmax(Tensor x, Tensor packed, Tensor? bias, int n, float? soft_cap=None) -> Tensor", &linear_argmax_op);
  m.def(
      "gated_linear(Tensor x, Tensor packed, Tensor? bias, int n, str activation=\"silu\", Tensor[]? lora=None) -> Tensor",
      &gated_linear_op);
  m.def("pack_for_onednn(Tensor weight) -> Tensor", &pack_for_onednn_op);
  m.def(
      "onednn_linear(Tensor x, Tensor[] parts, Tensor[] biases, int n, str activation=\"\", Tensor[]? lora=None) -> Tensor",
      &onednn_linear_op);
  m.def(
      "shrink_lora(Tensor x, Tensor a, Tensor ranks, Tensor adapters, int matrices) -> Tensor", &shrink_lora_op);
  m.def(
      "expand_lora(Tensor shrunk, Tensor(a!) out, Tensor b, Tensor ranks, Tensor adapters, int[] rows) -> ()",
      &expand_lora_op);
  m.def("select_rows(Tensor x, Tensor indices) -> Tensor", &select_rows_op);
  m.def("plain_embedding(Tensor ids, Tensor weight, ScalarType dtype) -> Tensor", &plain_embedding_op);
  m.def("embedding(Tensor ids, Tensor packed, ScalarType dtype) -> Tensor", &embedding_op);
  m.def("quantized_embedding(Tensor ids, Tensor packed, ScalarType dtype) -> Tensor", &quantized_embedding_op);
  m.def(
      "quantized_linear(Tensor x, Tensor packed, Tensor? bias, int n, int bits, bool to_float=False) -> Tensor",
      &quantized_linear_op);
  m.def(
      "quantized_linear_argmax(Tensor x, Tensor packed, Tensor? bias, int n, int bits, float? soft_cap=None) -> Tensor",
      &quantized_linear_argmax_op);
  m.def(
      "quantized_gated_linear(Tensor x, Tensor packed, Tensor? bias, int n, int bits, str activation=\"silu\", "
      "Tensor[]? lora=None) -> Tensor",
      &quantized_gated_linear_op);
  m.def(
      "experts(Tensor x, Tensor logits, Tensor[] gate_ups, Tensor[] downs, Tensor[] gate_up_biases, "
      "Tensor[] down_biases, int n, int per_token, bool normalized, float? alpha, float? limit, bool sigmoids=False, "
      "Tensor? corrections=None, float least_sum=0.0, float scale=1.0, int num_groups=1, int groups_per_token=1) "
      "-> Tensor",
      &experts_op);
  m.def(
      "quantized_experts(Tensor x, Tensor logits, Tensor[] gate_ups, Tensor[] downs, Tensor[] gate_up_biases, "
      "Tensor[] down_biases, int n, int per_token, bool normalized, float? alpha, float? limit, int bits, "
      "bool sigmoids=False, Tensor? corrections=None, float least_sum=0.0, float scale=1.0, int num_groups=1, "
      "int groups_per_token=1) -> Tensor",
      &quantized_experts_op);
  m.def("rms_norm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps) -> Tensor", &rms_norm_op);
  m.def("widened(Tensor x) -> Tensor", &widened_op);
  m.def("scale_rows(Tensor(a!) x, float factor) -> ()", &scale_rows_op);
  m.def("square_relu(Tensor(a!) x) -> ()", &square_relu_op);
  m.def("add_gated(Tensor(a!) out, Tensor x, Tensor? gates) -> ()", &add_gated_op);
  m.def("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> ()", &add_rms_norm_op);
  m.def(
      "rotate_and_store(Tensor(a!) qkv, Tensor positions, Tensor slots, Tensor cos_sin, Tensor? q_norm, "
      "Tensor? k_norm, float eps, Tensor(b!) k_pool, Tensor(c!) v_pool, Tensor? q_scales=None, "
      "bool norm_after=False) -> ()",
      &rotate_and_store_op);
  m.def(
      "rotate_and_store_latent(Tensor q, Tensor(a!) q_out, Tensor(b!) projected, Tensor positions, Tensor slots, "
      "Tensor cos_sin, Tensor norm, float eps, Tensor(c!) k_pool, Tensor(d!) v_pool) -> ()",
      &rotate_and_store_latent_op);
  m.def(
      "short_convolution(Tensor projected, Tensor weight, Tensor? bias, Tensor positions, Tensor slots, "
      "Tensor slot_table, Tensor rows, Tensor? starts, Tensor(a!) stored) -> Tensor",
      &short_convolution_op);
  m.def(
      "delta_net(Tensor projected, Tensor convolution, Tensor decay_rate, Tensor decay_bias, Tensor norm, float eps, "
      "int num_key_heads, Tensor positions, Tensor rows, Tensor? starts, Tensor? saved_lens, Tensor? saved_rows, "
      "Tensor(a!) recent, Tensor(b!) states) -> Tensor",
      &delta_net_op);
  m.def("gate_heads(Tensor(a!) x, Tensor gates) -> ()", &gate_heads_op);
  m.def("head_linear(Tensor x, Tensor packed, int n, int room=0) -> Tensor", &head_linear_op);
  m.def(
      "attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor slot_table, Tensor rows, Tensor seq_lens, "
      "Tensor? starts, int? window, float scale, Tensor? sinks=None, float? soft_cap=None) -> Tensor",
      &attention_op);
  m.def(
      "set_decode_inputs(Tensor rows, Tensor seq_lens, Tensor slots, Tensor newest, Tensor(a!) slot_table, "
      "Tensor(b!) of_tokens, Tensor(c!) of_requests, Tensor(d!) starts) -> int",
      &set_decode_inputs_op);
  m.def("store_newest(Tensor tokens, Tensor rows, Tensor(a!) newest) -> ()", &store_newest_op);
  m.def("argmax(Tensor logits) -> Tensor", &argmax_op);
  m.def("soft_cap(Tensor(a!) logits, float cap) -> ()", &soft_cap_op);
  m.def("mask_tokens(Tensor(a!) logits, Tensor lines, Tensor bits) -> ()", &mask_tokens_op);
  m.def(
      "sample(Tensor logits, Tensor lines, Tensor temperature, Tensor top_k, Tensor top_p, Tensor max_gap, "
      "Tensor draw) -> Tensor",
      &sample_op);
  m.def(
      "choose_tokens(Tensor logits, Tensor rows, Tensor positions, Tensor params, Tensor seeds, Tensor(a!)? newest) "
      "-> Tensor",
      &choose_tokens_op);
  m.def(
      "token_logprobs(Tensor logits, Tensor lines, Tensor ids, int k) -> (Tensor, Tensor, Tensor)",
      &token_logprobs_op);
}

}  // namespace tercet
