// The operations of linear layers, embeddings and norms, as torch calls them.
#pragma once

#include "compact.h"
#include "graph.h"
#include "linear.h"
#include "linear_argmax.h"
#include "norm.h"
#include "op_checks.h"
#include "rounded.h"
#include "widened.h"

namespace tercet {

inline void set_tuning_op(int64_t block_bytes, int64_t chunk, bool widens_bfloat16, bool prefetches_into_l1) {
  TORCH_CHECK(block_bytes > 0, "block_bytes must be positive, got ", block_bytes);
  TORCH_CHECK(
      0 < chunk && chunk <= Tuning::kMaxChunk && chunk % kProductsOfSum == 0,
      "chunk must be a multiple of ", kProductsOfSum, " and at most ", Tuning::kMaxChunk, ", got ", chunk);
  TORCH_CHECK(widens_bfloat16 || kMultipliesBFloat16, "this build can multiply bfloat16 only as float");
  Tuning::get() = {block_bytes, chunk, widens_bfloat16, prefetches_into_l1};
}

/// Checks the rows that a linear layer with so many columns multiplies.
inline void check_rows(const Tensor& x, int64_t columns) {
  check(x, "x", x.scalar_type(), {x.size(0), x.size(1)});
  TORCH_CHECK(x.size(1) > 0 && columns > 0, "x and the result must have columns, got ", x.size(1), " and ", columns);
}

template <typename T, typename X>
Packed<T, X> packed_weight(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns) {
  const int64_t k = x.size(1), per_word = Dot<T, X>::kPerWord, panels = ceil_div(columns, kPanel);
  TORCH_CHECK(k % per_word == 0, "rows of x must be whole words");
  check(packed, "packed", c10::CppTypeToScalarType<T>::value, {panels, k / per_word, kPanel, per_word});
  return {packed.const_data_ptr<T>(), data_or_null<float>(bias), k};
}

/// `Weight`: QuantizedPacked, WidenedPacked or RoundedPacked
template <typename Weight>
Weight quantized_weight(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns) {
  const int64_t k = x.size(1);
  TORCH_CHECK(k % Weight::kMultiple == 0, "rows of x must have a multiple of ", Weight::kMultiple, " numbers, got ", k);
  check(packed, "packed", at::kByte, {ceil_div(columns, kPanel), k / kGroup, Weight::kGroupBytes});
  return {packed.const_data_ptr<uint8_t>(), data_or_null<float>(bias), k};
}

/// Whether a packed weight is that of `CompactPacked`.
inline bool is_compact(const Tensor& packed) { return packed.scalar_type() == at::kByte && packed.dim() == 2; }

/// A compact weight. Its first panel tells the size of the headers, and so k.
inline CompactPacked compact_weight(const Tensor& packed, const optional<Tensor>& bias) {
  check(packed, "packed", at::kByte, {packed.size(0), packed.size(1)});
  const auto* panels = packed.const_data_ptr<uint8_t>();
  const bool has_header = packed.size(0) > 0 && packed.size(1) >= CompactHeader::kMultiple;
  const int64_t header_bytes = has_header ? CompactHeader(panels).num_bytes() : 0;
  const int64_t bytes = packed.size(1) - header_bytes;
  TORCH_CHECK(header_bytes > 0 && bytes >= 0 && bytes % CompactGroup::kBytes == 0, "packed is no compact weight");
  return {panels, data_or_null<float>(bias), bytes / CompactGroup::kBytes * CompactGroup::kNumbers, header_bytes};
}

/// Packs the panels of a weight of bfloat16 in 12 bits for each number, uint8 [panels, bytes]. None: that does not pay.
inline optional<Tensor> compact_op(const Tensor& panels) {
  TORCH_CHECK(kMultipliesBFloat16, "this build has no products of compact weights");
  const int64_t count = panels.size(0), words = panels.size(1), per_word = CompactPacked::kPerWord;
  check(panels, "panels", at::kBFloat16, {count, words, kPanel, per_word});
  const int64_t numbers = words * kPanel * per_word;
  if (panels.numel() == 0 || numbers % CompactGroup::kPlaces != 0 || numbers >= CompactHeader::kMaxPlaces) return {};
  const Compactor compactor(reinterpret_cast<const uint16_t*>(panels.const_data_ptr()), count, numbers);
  if (!compactor.pays()) return {};
  const auto packed = at::empty({count, compactor.panel_bytes()}, panels.options().dtype(at::kByte)).zero_();
  compactor.write(packed.data_ptr<uint8_t>());
  return packed;
}

/// The rows of x as floats, in a tensor that this call may record.
template <typename X = at::BFloat16>
Tensor widened_rows(const Tensor& x) {
  const int64_t k = x.size(1);
  auto floats = empty_result({x.size(0), k}, x.options().dtype(at::kFloat));
  run_or_record(x.size(0), [=, x = x.const_data_ptr<X>(), out = floats.template data_ptr<float>()](int64_t rows) {
    widen_rows(x, rows, k, out);
  });
  return floats;
}

/// x [rows, k] of bfloat16 -> the same as floats
inline Tensor widened_op(const Tensor& x) {
  check_rows(x, 1);
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "x must be bfloat16, got ", x.scalar_type());
  return widened_rows(x);
}

/// Calls f.operator()<Kind<W>>() with the form W of a packed quantised weight, which its bytes per group tell.
template <template <typename> typename Kind, typename F>
void with_form(const Tensor& packed, const F& f) {
  switch (packed.size(-1)) {
    case Kind<Int4Weights>::kGroupBytes: f.template operator()<Kind<Int4Weights>>(); break;
    case Kind<E2m1Weights>::kGroupBytes: f.template operator()<Kind<E2m1Weights>>(); break;
    case Kind<Q4KWeights>::kGroupBytes: f.template operator()<Kind<Q4KWeights>>(); break;
    case Kind<Q6KWeights>::kGroupBytes: f.template operator()<Kind<Q6KWeights>>(); break;
    case Kind<MixedKWeights>::kGroupBytes: f.template operator()<Kind<MixedKWeights>>(); break;
    case Kind<MixedWeights>::kGroupBytes: f.template operator()<Kind<MixedWeights>>(); break;
    default: f.template operator()<Kind<Int8Weights>>();
  }
}

/// Calls f(X(), X(), weight) with a quantised weight whose numbers are converted to X, the type of x. `Kind`:
/// WidenedPacked or RoundedPacked
template <template <typename> typename Kind, typename X, typename F>
void with_stored_weight(
    const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns, const F& f) {
  with_form<Kind>(
      packed, [&]<typename Weight>() { f(X(), X(), quantized_weight<Weight>(x, packed, bias, columns)); });
}

/// Calls f(T(), X(), weight) with the type of x, T, and the type X that its numbers are converted to: T, or float. The
/// weight has the type T, or is compact or quantised; under an x of float it may also be bfloat16. X depends on T alone.
template <typename F>
void with_kind(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns, const F& f) {
  check_rows(x, columns);
  if (bias) check(*bias, "bias", at::kFloat, {ceil_div(columns, kPanel), kPanel});
  if (is_compact(packed)) {
    TORCH_CHECK(
        kMultipliesBFloat16 && !Tuning::get().widens_bfloat16 && x.scalar_type() == at::kBFloat16,
        "compact weights need products of bfloat16 and an x of bfloat16");
    if constexpr (kMultipliesBFloat16) {
      const CompactPacked weight = compact_weight(packed, bias);
      TORCH_CHECK(
          packed.size(0) == ceil_div(columns, kPanel) && weight.k == x.size(1),
          "packed has ", packed.size(0), " panels of ", weight.k, " numbers a column");
      f(at::BFloat16(), at::BFloat16(), weight);
    }
  } else if (packed.scalar_type() == at::kByte) {
    if (x.scalar_type() == at::kFloat) {
      with_stored_weight<WidenedPacked, float>(x, packed, bias, columns, f);
      return;
    }
    TORCH_CHECK(
        kMultipliesBFloat16 && !Tuning::get().widens_bfloat16 && x.scalar_type() == at::kBFloat16,
        "x of quantised weights must be float, or bfloat16 with products of bfloat16; got ", x.scalar_type());
#ifdef __AVX512BF16__
    with_stored_weight<RoundedPacked, at::BFloat16>(x, packed, bias, columns, f);
#endif
  } else if (x.scalar_type() == at::kBFloat16 && Tuning::get().widens_bfloat16) {
    f(at::BFloat16(), float(), packed_weight<at::BFloat16, float>(x, packed, bias, columns));
  } else {
    with_packed_types(x, packed, [&]<typename X, typename T>(X, T) {
      if constexpr (kMultipliesBFloat16 || std::is_same_v<X, float>)
        f(X(), X(), packed_weight<T, X>(x, packed, bias, columns));
    });
  }
}

/// Calls f(T(), numbers of x, weight) as `with_kind` says. The numbers may have been widened to float.
template <typename F>
void with_weight(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns, const F& f) {
  with_kind(x, packed, bias, columns, [&]<typename T, typename X>(T, X, const auto& weight) {
    if constexpr (std::is_same_v<T, X>)
      f(T(), x.const_data_ptr<X>(), weight);
    else
      f(T(), widened_rows(x).const_data_ptr<float>(), weight);
  });
}

inline Tensor linear_op(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t n, bool to_float) {
  const auto out = empty_result({x.size(0), n}, to_float ? x.options().dtype(at::kFloat) : x.options());
  with_weight(x, packed, bias, n, [&]<typename T>(T, const auto* numbers, const auto& weight) {
    const auto next = next_weight(weight, ceil_div(n, kPanel));
    const auto to = [&](auto* out) {
      run_or_record(x.size(0), [=](int64_t rows) { linear(numbers, rows, weight, *next, n, out); });
    };
    to_float ? to(out.template data_ptr<float>()) : to(out.template data_ptr<T>());
  });
  return out;
}

/// int64 [rows]
inline Tensor linear_argmax_op(
    const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t n, optional<double> soft_cap) {
  const auto tokens = empty_result({x.size(0)}, x.options().dtype(at::kLong));
  with_weight(x, packed, bias, n, [&](auto, const auto* numbers, const auto& weight) {
    const auto next = next_weight(weight, ceil_div(n, kPanel));
    run_or_record(x.size(0), [=, cap = cap_of(soft_cap), tokens = tokens.template data_ptr<int64_t>()](int64_t rows) {
      linear_argmax(numbers, rows, weight, *next, n, cap, tokens);
    });
  });
  return tokens;
}

/// The rows of x with these indices. While a graph records, all operations from here on are on selected rows.
inline Tensor select_rows_op(const Tensor& x, const Tensor& indices) {
  const int64_t rows = x.size(0), n = x.size(1), row_bytes = n * x.element_size();
  check(x, "x", x.scalar_type(), {rows, n});
  check(indices, "indices", at::kLong, {indices.size(0)});
  if (Graph* graph = Graph::recording()) graph->select();
  const auto out = empty_result({indices.size(0), n}, x.options());
  run_or_record(
      indices.size(0),
      [=,
       x = static_cast<const char*>(x.const_data_ptr()),
       index = indices.const_data_ptr<int64_t>(),
       out = static_cast<char*>(out.data_ptr())](int64_t count) {
        for (int64_t i = 0; i < count; ++i)
          TORCH_CHECK(0 <= index[i] && index[i] < rows, "there is no row ", index[i], ", but ", rows, " rows");
        for_each_row_block(count, n, [&](int64_t first, int64_t end) {
          for (int64_t i = first; i < end; ++i) std::memcpy(out + i * row_bytes, x + index[i] * row_bytes, row_bytes);
        });
      });
  return out;
}

/// Calls write(ids, number of ids), which looks up the vectors of these ids, now or when the graph runs.
template <typename F>
void look_up(const Tensor& ids, int64_t num_vectors, F write) {
  check(ids, "ids", at::kLong, {ids.size(0)});
  run_or_record(ids.size(0), [=, id = ids.const_data_ptr<int64_t>()](int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      TORCH_CHECK(0 <= id[i] && id[i] < num_vectors, "there is no vector for id ", id[i]);
    write(id, count);
  });
}

inline Tensor plain_embedding_op(const Tensor& ids, const Tensor& weight, at::ScalarType type) {
  const int64_t k = weight.size(1);
  check(weight, "weight", weight.scalar_type(), {weight.size(0), k});
  const auto out = empty_result({ids.size(0), k}, weight.options().dtype(type));
  TERCET_ANY_FLOAT(weight.scalar_type(), [&] {
    using T = scalar_t;
    TERCET_ANY_FLOAT(type, [&] {
      look_up(
          ids, weight.size(0),
          [k, from = weight.const_data_ptr<T>(), to = out.data_ptr<scalar_t>()](const int64_t* ids, int64_t count) {
            copy_rows(ids, count, from, k, to);
          });
    });
  });
  return out;
}

inline Tensor embedding_op(const Tensor& ids, const Tensor& packed, at::ScalarType type) {
  const int64_t num_vectors = packed.size(0) * kPanel;
  if (is_compact(packed)) {
    TORCH_CHECK(type == at::kBFloat16, "the vectors of compact weights are bfloat16");
    const CompactPacked weight = compact_weight(packed, {});
    const auto out = empty_result({ids.size(0), weight.k}, packed.options().dtype(type));
    look_up(ids, num_vectors, [=, to = out.data_ptr<at::BFloat16>()](const int64_t* ids, int64_t count) {
      unpack_rows(ids, count, weight, to);
    });
    return out;
  }
  const int64_t words = packed.size(1), per_word = 4 / c10::elementSize(packed.scalar_type()), k = words * per_word;
  check(packed, "packed", packed.scalar_type(), {packed.size(0), words, kPanel, per_word});
  const auto out = empty_result({ids.size(0), k}, packed.options().dtype(type));
  with_packed_types(out, packed, [&]<typename X, typename T>(X, T) {
    look_up(
        ids, num_vectors,
        [k, panels = packed.const_data_ptr<T>(), to = out.data_ptr<X>()](const int64_t* ids, int64_t count) {
          unpack_rows(ids, count, panels, k, to);
        });
  });
  return out;
}

inline Tensor quantized_embedding_op(const Tensor& ids, const Tensor& packed, at::ScalarType type) {
  const int64_t groups = packed.size(1);
  const auto out = empty_result({ids.size(0), groups * kGroup}, packed.options().dtype(type));
  with_form<StoredPanels>(packed, [&]<typename Weight>() {
    TORCH_CHECK(groups * kGroup % Weight::kMultiple == 0, "packed must have whole super-blocks");
    check(packed, "packed", at::kByte, {packed.size(0), groups, Weight::kGroupBytes});
    const Weight weight{packed.const_data_ptr<uint8_t>(), nullptr, groups * kGroup};
    TERCET_ANY_FLOAT(type, [&] {
      look_up(ids, packed.size(0) * kPanel, [=, to = out.data_ptr<scalar_t>()](const int64_t* ids, int64_t count) {
        unpack_rows(ids, count, weight, to);
      });
    });
  });
  return out;
}

/// Quantises x, then calls f(quantised x, number of rows, weight, next weight) with a weight of so many bits.
template <typename F>
void with_quantized(
    const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns, int64_t bits, const F& f) {
  const int64_t k = x.size(1), panels = ceil_div(columns, kPanel);
  check_rows(x, columns);
  TORCH_CHECK(bits == 4 || bits == 8, "weights must have 4 or 8 bits");
  if (bias) check(*bias, "bias", at::kFloat, {panels, kPanel});
  const auto call = [&]<typename Weights>() {
    using Weight = QuantizedPacked<Weights>;
    const auto weight = quantized_weight<Weight>(x, packed, bias, columns);
    const auto scratch = empty_result({x.size(0), weight.row_bytes()}, x.options().dtype(at::kByte));
    const typename Weight::Rows quantized{scratch.template data_ptr<uint8_t>(), k};
    TERCET_ANY_FLOAT(x.scalar_type(), [&] {
      run_or_record(
          x.size(0), [=, x = x.const_data_ptr<scalar_t>()](int64_t rows) { quantize_rows(x, rows, quantized); });
    });
    const auto next = next_weight(weight, panels);
    run_or_record(x.size(0), [=](int64_t rows) { f(quantized, rows, weight, *next); });
  };
  bits == 4 ? call.template operator()<Int4Weights>() : call.template operator()<Int8Weights>();
}

inline Tensor quantized_linear_op(
    const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t n, int64_t bits, bool to_float) {
  const auto out = empty_result({x.size(0), n}, to_float ? x.options().dtype(at::kFloat) : x.options());
  TERCET_ANY_FLOAT(out.scalar_type(), [&] {
    with_quantized(
        x, packed, bias, n, bits,
        [n, out = out.data_ptr<scalar_t>()](const auto& x, int64_t rows, const auto& weight, const NextWeight& next) {
          linear(x, rows, weight, next, n, out);
        });
  });
  return out;
}

inline Tensor quantized_linear_argmax_op(
    const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t n, int64_t bits,
    optional<double> soft_cap) {
  const auto out = empty_result({x.size(0)}, x.options().dtype(at::kLong));
  with_quantized(
      x, packed, bias, n, bits,
      [n, cap = cap_of(soft_cap), tokens = out.data_ptr<int64_t>()](
          const auto& x, int64_t rows, const auto& weight, const NextWeight& next) {
        linear_argmax(x, rows, weight, next, n, cap, tokens);
      });
  return out;
}

inline Tensor rms_norm_op(const Tensor& x, const optional<Tensor>& residual, const Tensor& weight, double eps) {
  const int64_t rows = x.size(0), n = x.size(1), stride = x.stride(0);
  TORCH_CHECK(
      x.dim() == 2 && x.device().is_cpu() && x.stride(1) == 1,
      "x must be a matrix on the CPU whose rows are contiguous, got shape ", x.sizes());
  if (residual) check(*residual, "residual", x.scalar_type(), {rows, n});
  check(weight, "weight", at::kFloat, {n});
  const auto out = empty_result({rows, n}, x.options());
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    run_or_record(
        rows,
        [=,
         x = x.const_data_ptr<scalar_t>(),
         residual = residual ? residual->data_ptr<scalar_t>() : nullptr,
         weight = weight.const_data_ptr<float>(),
         out = out.data_ptr<scalar_t>()](int64_t rows) { rms_norm(x, stride, residual, weight, eps, rows, n, out); });
  });
  return out;
}

inline void scale_rows_op(const Tensor& x, double factor) {
  const int64_t n = x.size(1);
  check(x, "x", x.scalar_type(), {x.size(0), n});
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    run_or_record(x.size(0), [=, x = x.data_ptr<scalar_t>()](int64_t rows) { scale_rows(x, factor, rows, n); });
  });
}

inline void square_relu_op(const Tensor& x) {
  const int64_t n = x.size(1);
  check(x, "x", x.scalar_type(), {x.size(0), n});
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    run_or_record(x.size(0), [=, x = x.data_ptr<scalar_t>()](int64_t rows) { square_relu(x, rows, n); });
  });
}

inline void add_gated_op(const Tensor& out, const Tensor& x, const optional<Tensor>& gates) {
  const int64_t rows = x.size(0), n = x.size(1);
  check(x, "x", x.scalar_type(), {rows, n});
  check(out, "out", x.scalar_type(), {rows, n});
  if (gates) check(*gates, "gates", at::kFloat, {rows, 1});
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    run_or_record(
        rows,
        [=, x = x.const_data_ptr<scalar_t>(), gates = data_or_null<float>(gates), out = out.data_ptr<scalar_t>()](
            int64_t rows) { add_gated(x, gates, rows, n, out); });
  });
}

inline void add_rms_norm_op(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  const int64_t rows = x.size(0), n = x.size(1);
  check(x, "x", x.scalar_type(), {rows, n});
  check(residual, "residual", x.scalar_type(), {rows, n});
  check(weight, "weight", at::kFloat, {n});
  TERCET_ANY_FLOAT(x.scalar_type(), [&] {
    run_or_record(
        rows,
        [=,
         x = x.const_data_ptr<scalar_t>(),
         residual = residual.data_ptr<scalar_t>(),
         weight = weight.const_data_ptr<float>()](int64_t rows) { add_rms_norm(x, residual, weight, eps, rows, n); });
  });
}

}  // namespace tercet
