// Linear layers of oneDNN, which multiply bfloat16 faster than `Dot` on processors with matrix units (AMX). They are
// called through torch, because torch exports no other way to oneDNN.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>

#include <bit>
#include <string>
#include <string_view>
#include <vector>

#include "activation.h"
#include "graph.h"
#include "lora_ops.h"
#include "op_checks.h"

namespace tercet {

/// Calls oneDNN with one thread: the thread pool divides the work.
class OneThread {
 public:
  OneThread() {
    if (before_ != 1) at::set_num_threads(1);
  }
  ~OneThread() {
    if (before_ != 1) at::set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;

 private:
  const int before_ = at::get_num_threads();
};

/// x @ weight.T + bias. `weight`: packed by oneDNN.
inline Tensor multiply_by_onednn(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias) {
  using Text = std::string_view;
  using Op = Tensor(
      const Tensor&, const Tensor&, const optional<Tensor>&, Text, c10::List<optional<at::Scalar>>, optional<Text>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Op>();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const OneThread one_thread;
  return op.call(x, weight, bias, "none", c10::List<optional<at::Scalar>>(), "");
}

/// A weight [n, k] in parts of neighbouring columns. A part of a gated layer has columns of gate, then the same of up.
struct OneDnnWeight {
  std::vector<Tensor> parts;
  /// One for each part, or none.
  std::vector<Tensor> biases;
  int64_t k;
  /// Of a gated layer; "": the layer is not gated.
  std::string activation;

  bool is_gated() const { return !activation.empty(); }
  /// Columns of the result that a part computes.
  int64_t columns(size_t part) const { return parts[part].size(0) / (is_gated() ? 2 : 1); }
};

/// The sizes of blocks of rows are powers of two up to this one. Each size has kernels of its own, compiled at its first
/// use, and its bits are compared when a model is loaded (onednn_layers.py).
constexpr int64_t kMaxOneDnnRows = 256;

/// Copies y [rows, columns of a part] to `columns` columns of out, n apart. y of a gated layer has gate and up.
/// `parts`: added to them, or nullptr. first_row, first_column: the place in the result of the layer.
template <typename T>
void store_part(
    const T* y,
    int64_t rows,
    int64_t columns,
    std::string_view activation,
    int64_t n,
    T* out,
    const GateParts* parts,
    int64_t first_row,
    int64_t first_column) {
  out += first_row * n + first_column;
  if (activation.empty()) {
    for (int64_t row = 0; row < rows; ++row, y += columns, out += n) std::copy_n(y, columns, out);
    return;
  }
  with_activation(activation, [&]<typename Activation>(Activation) {
    for (int64_t row = 0; row < rows; ++row, y += 2 * columns, out += n) {
      for (int64_t i = 0; i < columns; i += kPanel) {
        FloatPair gate = load_pair(y + i, columns - i), up = load_pair(y + columns + i, columns - i);
        if (parts) {
          RowSums sums[] = {{to_floats(gate.left), to_floats(up.left)}, {to_floats(gate.right), to_floats(up.right)}};
          for (int64_t side = 0; side < 2; ++side)
            parts->add(first_row + row, 1, (first_column + i) / kLanes + side, sums + side, 1);
          gate = {to_vec(sums[0][0]), to_vec(sums[1][0])};
          up = {to_vec(sums[0][1]), to_vec(sums[1][1])};
        }
        const FloatPair activated{
            Activation::template of<T>(gate.left), Activation::template of<T>(gate.right)};
        store_pair(out + i, activated * up, columns - i);
      }
    }
  });
}

/// x [rows, k] -> out [rows, n]. Rows are divided into blocks of equal size; the last block begins earlier if it would
/// have fewer rows, and computes some again.
template <typename T>
void onednn_linear(
    const T* x, int64_t rows, const OneDnnWeight& weight, int64_t n, T* out, const GateParts* parts) {
  std::vector<int64_t> first_columns{0};
  for (size_t part = 0; part < weight.parts.size(); ++part)
    first_columns.push_back(first_columns.back() + weight.columns(part));
  const int64_t size = std::min<int64_t>(std::bit_floor(static_cast<uint64_t>(rows)), kMaxOneDnnRows);
  const int64_t blocks = ceil_div(rows, size);
  ThreadPool::get().run(blocks * static_cast<int64_t>(weight.parts.size()), [&](int64_t item) {
    // All blocks of rows multiply a part before the next part begins, so it is read from memory once.
    const int64_t part = item / blocks, first = item % blocks * size, begin = std::min(first, rows - size);
    const auto options = at::TensorOptions(c10::CppTypeToScalarType<T>::value);
    const Tensor block = at::from_blob(const_cast<T*>(x + begin * weight.k), {size, weight.k}, options);
    const optional<Tensor> bias = weight.biases.empty() ? std::nullopt : optional(weight.biases[part]);
    const Tensor y = multiply_by_onednn(block, weight.parts[part], bias);
    const int64_t done = first - begin;
    store_part(
        y.const_data_ptr<T>() + done * y.size(1), size - done, weight.columns(part), weight.activation, n, out, parts,
        first, first_columns[part]);
  });
}

/// oneDNN's packed form of a part of a weight, for one thread.
inline Tensor pack_for_onednn_op(const Tensor& weight) {
  check(weight, "weight", weight.scalar_type(), {weight.size(0), weight.size(1)});
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
                             .typed<Tensor(const Tensor&, optional<int64_t>)>();
  const OneThread one_thread;
  return op.call(weight, std::nullopt);
}

inline Tensor onednn_linear_op(
    const Tensor& x,
    std::vector<Tensor> parts,
    std::vector<Tensor> biases,
    int64_t n,
    std::string_view activation,
    const optional<std::vector<Tensor>>& lora) {
  const int64_t k = x.size(1);
  const bool is_gated = !activation.empty();
  if (is_gated) with_activation(activation, [](auto) {});
  TORCH_CHECK(is_gated || !lora, "only gated layers add the parts of adapters");
  const auto gates = lora_gates(lora, x.size(0), n);
  check(x, "x", x.scalar_type(), {x.size(0), k});
  TORCH_CHECK(biases.empty() || biases.size() == parts.size(), "there must be a bias for each part, or none");
  int64_t rows_of_parts = 0;
  for (size_t part = 0; part < parts.size(); ++part) {
    TORCH_CHECK(parts[part].is_mkldnn() && parts[part].scalar_type() == x.scalar_type(), "parts must be packed, of x's type");
    TORCH_CHECK(parts[part].dim() == 2 && parts[part].size(1) == k, "parts must have rows as long as those of x");
    TORCH_CHECK(!is_gated || parts[part].size(0) % 2 == 0, "parts must have as many rows of gate as of up");
    if (!biases.empty()) check(biases[part], "bias", x.scalar_type(), {parts[part].size(0)});
    TORCH_CHECK(!gates || rows_of_parts / 2 % kPanel == 0, "with adapters, parts must begin at a multiple of ", kPanel);
    rows_of_parts += parts[part].size(0);
  }
  TORCH_CHECK(rows_of_parts == (is_gated ? 2 : 1) * n, "parts have ", rows_of_parts, " rows for ", n, " columns");
  const auto out = empty_result({x.size(0), n}, x.options());
  const OneDnnWeight weight{std::move(parts), std::move(biases), k, std::string(activation)};
  TERCET_DOT_FLOAT(x.scalar_type(), [&] {
    run_or_record(
        x.size(0), [=, x = x.const_data_ptr<scalar_t>(), out = out.template data_ptr<scalar_t>()](int64_t rows) {
          if (rows > 0) onednn_linear(x, rows, weight, n, out, parts_of(gates, rows));
        });
  });
  return out;
}

}  // namespace tercet
