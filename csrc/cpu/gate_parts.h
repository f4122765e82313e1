// What is added to the sums of a gate and up projection before its activation.
#pragma once

#include <memory>

#include "vectors.h"

namespace tercet {

/// The sums of a row with the columns of a panel.
using RowSums = Floats[2];

class GateParts {
 public:
  virtual ~GateParts() = default;
  /// Whether the first `rows` rows have any. Raises an error if they are invalid.
  virtual bool is_needed(int64_t rows) const = 0;
  /// Adds to the sums of rows with a panel of StoreGated, `stride` apart: first those of gate, then those of up.
  virtual void add(int64_t first, int64_t rows, int64_t panel, RowSums* sums, int64_t stride) const = 0;
};

inline const GateParts* parts_of(const std::shared_ptr<const GateParts>& parts, int64_t rows) {
  return parts && parts->is_needed(rows) ? parts.get() : nullptr;
}

/// Adds the parts of a store that has some.
template <typename Store>
inline void add_parts(
    const Store& store, int64_t first, int64_t rows, int64_t panel, RowSums* sums, int64_t stride = 1) {
  if constexpr (requires { store.parts; })
    if (store.parts) store.parts->add(first, rows, panel, sums, stride);
}

}  // namespace tercet
