// A KV pool whose keys and values lie as attention multiplies them: nothing has to be packed, and memory is read from
// end to end.
//
// Blocks of kPanel slots, [blocks, kv_heads, ...]: keys [head_dim / per word][kPanel][per word], values
// [head_dim / kPanel][kPanel / per word][kPanel][per word]. A page is whole blocks, so a block has neighbouring
// positions of one request. From one block of a layer to the next it is as far as the pool says.
#pragma once

#include "dot.h"

namespace tercet {

template <typename T>
struct KVPanels {
  static constexpr int64_t kPerWord = Dot<T>::kPerWord;

  int64_t block_stride, head_dim;

  /// Where the block's numbers of a KV head begin.
  int64_t block(int64_t slot, int64_t kv_head) const {
    return slot / kPanel * block_stride + kv_head * kPanel * head_dim;
  }

  void store_key(const T* key, int64_t slot, int64_t kv_head, T* pool) const {
    T* to = pool + block(slot, kv_head) + slot % kPanel * kPerWord;
    for (int64_t d = 0; d < head_dim; d += kPerWord, to += kPanel * kPerWord) std::copy_n(key + d, kPerWord, to);
  }

  /// `alone`: the position after this one is not stored now, and may never be. What shares a word with it must be a
  /// number, since attention multiplies it by zero.
  void store_value(const T* value, int64_t slot, int64_t kv_head, bool alone, T* pool) const {
    const int64_t word = slot % kPanel / kPerWord, at = slot % kPerWord;
    T* block_start = pool + block(slot, kv_head);
    for (int64_t d = 0; d < head_dim; d += kPanel, value += kPanel) {
      T* to = block_start + d * kPanel + word * kPanel * kPerWord;
      for (int64_t i = 0; i < kPanel; ++i) {
        to[i * kPerWord + at] = value[i];
        if (alone)
          for (int64_t after = at + 1; after < kPerWord; ++after) to[i * kPerWord + after] = T(0.f);
      }
    }
  }
};

}  // namespace tercet
