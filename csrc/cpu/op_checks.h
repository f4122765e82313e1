// What the operations share: dispatch by type, and checks of their arguments.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

namespace tercet {

using at::Tensor;
using std::optional;

// Calls a lambda with scalar_t = float, bfloat16 or half.
#define TERCET_ANY_FLOAT(type, ...)                                              \
  AT_DISPATCH_SWITCH(                                                            \
      type, "tercet", AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)                  \
                          AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__)           \
                              AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

// The same for the types that `Dot` multiplies.
#define TERCET_DOT_FLOAT(type, ...)                                              \
  AT_DISPATCH_SWITCH(                                                            \
      type, "tercet", AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)                  \
                          AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__))

/// Calls f(X(), T()) with the types of the numbers of x and of a packed weight. The weight has the type of x, or bfloat16
/// under an x of float32.
template <typename F>
void with_packed_types(const Tensor& x, const Tensor& packed, const F& f) {
  if (x.scalar_type() == at::kFloat && packed.scalar_type() == at::kBFloat16) {
    f(float(), at::BFloat16());
  } else {
    TERCET_DOT_FLOAT(x.scalar_type(), [&] { f(scalar_t(), scalar_t()); });
  }
}

inline void check(const Tensor& tensor, const char* name, at::ScalarType type, at::IntArrayRef shape) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous(), name, " must be contiguous and on the CPU");
  TORCH_CHECK(tensor.scalar_type() == type, name, " must be ", type, ", got ", tensor.scalar_type());
  TORCH_CHECK(tensor.sizes() == shape, name, " must have shape ", shape, ", got ", tensor.sizes());
}

/// Checks a matrix, or a view of one, whose rows are contiguous.
inline void check_rows(const Tensor& tensor, const char* name, at::ScalarType type, at::IntArrayRef shape) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == type, name, " must be ", type, " on the CPU");
  TORCH_CHECK(tensor.sizes() == shape, name, " must have shape ", shape, ", got ", tensor.sizes());
  TORCH_CHECK(tensor.stride(1) == 1 || shape[1] == 1, "rows of ", name, " must be contiguous");
}

/// Checks `count` indices, of which each must be in [0, size). The loop has no branches, so that it is vectorised.
template <typename T>
void check_indices(const T* indices, int64_t count, const char* name, int64_t size) {
  T smallest = 0, largest = -1;
  for (int64_t i = 0; i < count; ++i) {
    smallest = std::min(smallest, indices[i]);
    largest = std::max(largest, indices[i]);
  }
  const T worst = smallest < 0 ? smallest : largest;
  TORCH_CHECK(0 <= smallest && largest < size, name, " must be in [0, ", size, "), got ", worst);
}

template <typename T>
const T* data_or_null(const optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

}  // namespace tercet
