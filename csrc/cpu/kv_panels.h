// A KV pool in panels: keys and values lie in the order in which attention multiplies them. Nothing has to be packed,
// and memory is read from end to end. README.md has a picture.
//
// The pool consists of blocks of kPanel slots, [blocks, kv_heads, ...]. Keys of a block and head:
// [head_dim / kPerWord][kPanel][kPerWord]; values: [value_dim / kPanel][kPanel / kPerWord][kPanel][kPerWord]. A page is
// one block or several, so the slots of a block hold neighbouring positions of one request. Blocks of one layer are
// block_stride numbers apart.
#pragma once

#include "dot.h"

namespace tercet {

/// Stores words of kLanes keys in a panel: word w of all keys lies side by side. words(i) has kLanes words of key i.
template <typename Words>
inline void store_key_words(float* panel, const Words& words) {
  Floats block[kLanes];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) block[i] = words(i);
  transpose(block);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) store_floats(panel + i * kPanel, block[i]);
}

/// kPanel words, each with a component of two neighbouring values of 16 bits. Each vector of arguments has kPanel
/// components.
inline std::pair<Floats, Floats> value_words(Floats even, Floats odd) {
  typedef uint16_t Numbers __attribute__((vector_size(kPanel * sizeof(uint16_t))));
  const auto pairs = interleave(
      reinterpret_cast<Numbers>(even), reinterpret_cast<Numbers>(odd), std::make_index_sequence<kPanel>());
  return {reinterpret_cast<Floats>(pairs.first), reinterpret_cast<Floats>(pairs.second)};
}

/// The keys or the values of a layer. dim: the numbers of one of them.
template <typename T>
struct KVPanels {
  static constexpr int64_t kPerWord = Dot<T>::kPerWord;

  int64_t block_stride, dim;

  /// The words of a KV head in the block of `slot`.
  float* block(T* pool, int64_t slot, int64_t kv_head) const {
    return reinterpret_cast<float*>(pool + slot / kPanel * block_stride + kv_head * kPanel * dim);
  }

  /// Stores the keys of `count` slots from `slot` on, in one group of kLanes slots. Keys are `stride` numbers apart.
  void store_keys(const T* keys, int64_t stride, int64_t slot, int64_t count, int64_t kv_head, T* pool) const {
    const int64_t words = dim / kPerWord;
    float* to = block(pool, slot, kv_head) + slot % kPanel;
    if (count == kLanes)
      for (int64_t w = 0; w < words; w += kLanes)
        store_key_words(to + w * kPanel, [&](int64_t i) { return load_words(keys + i * stride + w * kPerWord); });
    else
      for (int64_t i = 0; i < count; ++i, keys += stride, ++to)
        for (int64_t w = 0; w < words; ++w) std::memcpy(to + w * kPanel, keys + w * kPerWord, sizeof(float));
  }

  /// Stores the values of `count` slots from `slot` on. Values are `stride` numbers apart. Slots after the last one get
  /// zeros if they share its words: attention multiplies whole words, and zero times what memory happens to hold may be
  /// NaN.
  void store_values(const T* values, int64_t stride, int64_t slot, int64_t count, int64_t kv_head, T* pool) const {
    float* const start = block(pool, slot, kv_head);
    for (int64_t i = -(slot % kPerWord); i < count; i += kPerWord)
      for (int64_t d = 0; d < dim; d += kLanes * kPerWord) {
        const auto value = [&](int64_t i) {
          return 0 <= i && i < count ? load_words(values + i * stride + d) : Floats{};
        };
        float* to = start + (d / kPanel * (kPanel / kPerWord) + (slot + i) % kPanel / kPerWord) * kPanel + d % kPanel;
        if constexpr (kPerWord == 1) {
          store_floats(to, value(i));
        } else {
          const auto [left, right] = value_words(value(i), value(i + 1));
          store_floats(to, i < 0 ? with_even_halves(left, to) : left);
          store_floats(to + kLanes, i < 0 ? with_even_halves(right, to + kLanes) : right);
        }
      }
  }

 private:
  typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));

  static Floats load_words(const T* numbers) { return load_floats(reinterpret_cast<const float*>(numbers)); }

  /// Words with the numbers of even slots from memory.
  static Floats with_even_halves(Floats words, const float* from) {
    return reinterpret_cast<Floats>(reinterpret_cast<Bits>(words) | (reinterpret_cast<Bits>(load_floats(from)) & 0xffff));
  }
};

}  // namespace tercet
