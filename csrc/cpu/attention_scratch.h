// The memory that a thread needs while it attends.
#pragma once

#include <vector>

#include "kv_tiles.h"

namespace tercet {

/// Rows that memory is reserved for: m and l of a `Partial` have whole vectors.
inline int64_t padded_rows(int64_t rows) { return round_up(rows, kLanes); }

/// The memory of one thread for one task. C: the type of products. Reader: a TileReader
template <typename C, typename Reader>
struct AttentionScratch {
  std::vector<C> q, k_panels, v_panels, weights;
  std::vector<float> scores, split, total;
  std::vector<typename Reader::Panels> panels;
  typename Reader::Tile tiles[kTilesPerSplit + 1];  // of a split, and the one after it

  /// That of this thread, with room for so many KV heads, and so many rows of all heads together. Widths: of keys and of
  /// values
  static AttentionScratch& with_room_for(int64_t heads, int64_t rows, int64_t key_width, int64_t value_width) {
    static thread_local AttentionScratch scratch;
    scratch.grow(scratch.q, rows * key_width);
    scratch.grow(scratch.k_panels, heads * kTile * key_width);
    scratch.grow(scratch.v_panels, heads * kSplit * value_width);
    scratch.grow(scratch.weights, rows * kSplit);
    scratch.grow(scratch.scores, rows * kTile);
    scratch.grow(scratch.split, padded_rows(rows) * (value_width + 2));
    scratch.grow(scratch.total, padded_rows(rows) * (value_width + 2));
    scratch.grow(scratch.panels, heads * kTilesPerSplit);
    return scratch;
  }

 private:
  template <typename N>
  static void grow(std::vector<N>& numbers, size_t size) {
    if (numbers.size() < size) numbers.resize(size);
  }
};

}  // namespace tercet
