// A KV pool in panels: keys and values lie in the order in which attention multiplies them. Nothing has to be packed,
// and memory is read from end to end. README.md has a picture.
//
// The pool consists of blocks of kPanel slots, [blocks, kv_heads, ...]. Keys of a block and head:
// [head_dim / kPerWord][kPanel][kPerWord]; values: [head_dim / kPanel][kPanel / kPerWord][kPanel][kPerWord]. A page is
// one block or several, so the slots of a block hold neighbouring positions of one request. Blocks of one layer are
// block_stride numbers apart.
#pragma once

#include "dot.h"

namespace tercet {

template <typename T>
struct KVPanels {
  static constexpr int64_t kPerWord = Dot<T>::kPerWord;

  int64_t block_stride, head_dim;

  /// The offset of the numbers of a KV head in the block of `slot`.
  int64_t block(int64_t slot, int64_t kv_head) const {
    return slot / kPanel * block_stride + kv_head * kPanel * head_dim;
  }

  void store_key(const T* key, int64_t slot, int64_t kv_head, T* pool) const {
    T* to = pool + block(slot, kv_head) + slot % kPanel * kPerWord;
    for (int64_t d = 0; d < head_dim; d += kPerWord, to += kPanel * kPerWord) std::copy_n(key + d, kPerWord, to);
  }

  /// Stores a value. A word holds the values of kPerWord neighbouring slots. With `clear_rest` it writes zeros for the
  /// later slots of the word: no value is stored there now, but attention multiplies the whole word, and zero times
  /// what memory happens to hold may be NaN.
  void store_value(const T* value, int64_t slot, int64_t kv_head, bool clear_rest, T* pool) const {
    const int64_t word = slot % kPanel / kPerWord, at = slot % kPerWord;
    T* block_start = pool + block(slot, kv_head);
    for (int64_t d = 0; d < head_dim; d += kPanel, value += kPanel) {
      T* to = block_start + d * kPanel + word * kPanel * kPerWord;
      for (int64_t i = 0; i < kPanel; ++i) {
        to[i * kPerWord + at] = value[i];
        if (clear_rest)
          for (int64_t after = at + 1; after < kPerWord; ++after) to[i * kPerWord + after] = T(0.f);
      }
    }
  }
};

}  // namespace tercet
