// Tiles of keys and values: where their slots are in the pools, and their panels, which attention multiplies.
//
// A pool in panels (kv_panels.h) is multiplied from where it is. From a plain pool [slots, kv_heads, head_dim] the keys
// and values of a tile are packed into panels first. In a plain pool, the values of latent attention are views of keys.
#pragma once

#include <vector>

#include "attention_plan.h"
#include "kv_panels.h"

namespace tercet {

/// The type that numbers of type T are multiplied as: bfloat16 or float.
template <typename T>
struct ComputeTypeOf {
  using type = float;
};
template <>
struct ComputeTypeOf<at::BFloat16> {
  using type = at::BFloat16;
};

template <typename T>
struct KVPool {
  const T* k;
  const T* v;
  int64_t k_stride, v_stride;  // from slot to slot, or from block to block of a pool in panels
};

/// kInPanels: the pools are in panels.
template <typename T, bool kInPanels>
class TileReader {
  using C = typename ComputeTypeOf<T>::type;
  static constexpr int64_t kPerWord = Dot<C>::kPerWord;
  static constexpr int64_t kPanelsPerTile = kTile / kPanel;
  static_assert(!kInPanels || std::is_same_v<T, C>);

 public:
  TileReader(const AttentionBatch& batch, const KVPool<T>& pool)
      : batch_(batch),
        pool_(pool),
        head_dim_(batch.head_dim),
        value_dim_(batch.value_dim),
        key_width_(round_up(head_dim_, kPanel)),
        value_width_(round_up(value_dim_, kPanel)),
        zeros_(batch.kv_heads * std::max(head_dim_, value_dim_)) {}

  /// The addresses of a tile's slots. All KV heads of a slot lie one after the other. The addresses beyond the last key
  /// are those of zeros. For a pool in panels, only the first slot of each panel has addresses.
  struct Tile {
    int64_t first, num_keys = 0;
    Range kv_heads;
    const T* k[kTile];
    const T* v[kTile];
  };

  struct Panel {
    const C* numbers;
    const C* next = nullptr;  // the panel that is multiplied after this one, to be prefetched; packing prefetches by itself

    /// Prefetches, with every word from `number` on, as many bytes of the next panel. Only the first rows do so.
    template <bool kIsFirst>
    auto prefetcher(std::bool_constant<kIsFirst>, int64_t number) const {
      if constexpr (kInPanels && kIsFirst) {
        constexpr int64_t kBytes = kPanel * kPerWord * sizeof(C);
        return Prefetcher(reinterpret_cast<const char*>(next + number), kBytes);
      } else {
        return NoPrefetch{};
      }
    }
  };

  /// The panels of a tile for one KV head, kPanel keys each. Keys: [key_width / kPerWord][kPanel][kPerWord]; values:
  /// [value_width / kPanel][kPanel / kPerWord][kPanel][kPerWord].
  struct Panels {
    Panel k[kPanelsPerTile];
    Panel v[kPanelsPerTile];
  };

  /// Finds the slots of a tile of a task. It begins at position `first`.
  void find(const Task& task, int64_t first, Tile& tile) const {
    constexpr int64_t step = kInPanels ? kPanel : 1;
    tile.first = first;
    tile.num_keys = std::min(task.keys.end - first, kTile);
    tile.kv_heads = task.kv_heads;
    const int32_t* slots = batch_.slots(task.request) + first;
    for (int64_t i = 0; i < kTile; i += step) {
      const bool exists = i < tile.num_keys;
      tile.k[i] = exists ? pool_.k + slots[i] / step * pool_.k_stride : zeros_.data();
      tile.v[i] = exists ? pool_.v + slots[i] / step * pool_.v_stride : zeros_.data();
    }
  }

  /// The panels of tile `t` for one KV head. The keys of `count` tiles are multiplied first, tile by tile, and then their
  /// values, head by head. `tiles` has these tiles and the one after them. From a plain pool a tile is packed into k_buffer
  /// and v_buffer, which have kTile keys and values, and the same head of the next tile is prefetched.
  Panels panels(const Tile* tiles, int64_t t, int64_t count, int64_t kv_head, C* k_buffer, C* v_buffer) const {
    Panels panels;
    const Tile& tile = tiles[t];
    if constexpr (kInPanels) {
      // Keys prefetch those of the next head or tile. Values are multiplied for kPanel components of all tiles, then for the
      // next components. Such a product is short, so it prefetches values of two tiles later, if there are as many.
      const int64_t k_size = kPanel * head_dim_, v_size = kPanel * value_dim_;
      const int64_t first_head = tile.kv_heads.from, heads = tile.kv_heads.size(), head = kv_head - first_head;
      const int64_t later = head * count + t + std::min<int64_t>(count, 2), excess = later - heads * count;
      const Tile& after = tiles[count];
      for (int64_t i = 0; i < kTile; i += kPanel) {
        const C *k = tile.k[i] + kv_head * k_size, *v = tile.v[i] + kv_head * v_size;
        const C* next_k = head + 1 < heads ? k + k_size
                          : t + 1 < count  ? tiles[t + 1].k[i] + first_head * k_size
                                           : tiles[0].v[i] + first_head * v_size;
        const C* next_v = excess < 0
            ? tiles[later % count].v[i] + (first_head + later / count) * v_size
            : after.k[i] + std::min(after.kv_heads.from + excess, after.kv_heads.end - 1) * k_size;
        panels.k[i / kPanel] = {k, next_k};
        panels.v[i / kPanel] = {v, next_v};
      }
    } else {
      const int64_t padded_keys = round_up(tile.num_keys, kPanel);
      pack_keys(tile, tiles[t + 1], kv_head, padded_keys, k_buffer);
      pack_values(tile, tiles[t + 1], kv_head, padded_keys, v_buffer);
      for (int64_t i = 0; i < kPanelsPerTile; ++i) {
        panels.k[i].numbers = k_buffer + i * kPanel * key_width_;
        panels.v[i].numbers = v_buffer + i * kPanel * value_width_;
      }
    }
    return panels;
  }

 private:
  /// Prefetches a key or a value.
  static void prefetch_numbers(const T* from, int64_t dim) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    for (int64_t d = 0; d < dim; d += kLine) prefetch_line(from + d);
  }

  /// A vector of words: the numbers of a row from number d on, as C, with zeros from number dim on. `Floats` is only the
  /// container: a word may hold two numbers.
  static Floats load_words(const T* row, int64_t d, int64_t dim) {
    constexpr int64_t kNumbers = kLanes * kPerWord;
    Floats words{};
    if constexpr (std::is_same_v<T, C>) {
      if (d + kNumbers <= dim)
        words = load_floats(reinterpret_cast<const float*>(row + d));
      else if (d < dim)
        std::memcpy(&words, row + d, (dim - d) * sizeof(T));
    } else {
      Vec loaded(0.f);
      if (d < dim) loaded = load_pair(row + d, std::min(kLanes, dim - d)).left;
      std::memcpy(&words, &loaded, sizeof(words));
    }
    return words;
  }

  /// Transposes the keys: word w of every key of a panel lies side by side.
  void pack_keys(const Tile& tile, const Tile& next, int64_t kv_head, int64_t padded_keys, C* panels) const {
    const int64_t words = key_width_ / kPerWord;
    for (int64_t i = 0; i < padded_keys; i += kLanes) {
      for (int64_t r = 0; r < kLanes; ++r) prefetch_numbers(next.k[i + r] + kv_head * head_dim_, head_dim_);
      float* panel = reinterpret_cast<float*>(panels) + i / kPanel * words * kPanel + i % kPanel;
      for (int64_t w = 0; w < words; w += kLanes)
        store_key_words(panel + w * kPanel, [&](int64_t r) {
          return load_words(tile.k[i + r] + kv_head * head_dim_, w * kPerWord, head_dim_);
        });
    }
  }

  /// A word of a value panel holds one component of the values of kPerWord neighbouring positions.
  void pack_values(const Tile& tile, const Tile& next, int64_t kv_head, int64_t padded_keys, C* panels) const {
    for (int64_t i = 0; i < padded_keys; ++i) prefetch_numbers(next.v[i] + kv_head * value_dim_, value_dim_);
    for (int64_t panel = 0; panel < padded_keys; panel += kPanel)
      for (int64_t d = 0; d < value_width_; d += kPanel) {
        float* words = reinterpret_cast<float*>(panels + panel * value_width_ + d * kPanel);
        for (int64_t i = panel; i < panel + kPanel; i += kPerWord, words += kPanel) {
          const auto value = [&](int64_t at, int64_t d) {
            return load_words(tile.v[at] + kv_head * value_dim_, d, value_dim_);
          };
          if constexpr (kPerWord == 1) {
            store_floats(words, value(i, d));
            store_floats(words + kLanes, value(i, d + kLanes));
          } else {
            const auto [left, right] = value_words(value(i, d), value(i + 1, d));
            store_floats(words, left);
            store_floats(words + kLanes, right);
          }
        }
      }
  }

  const AttentionBatch& batch_;
  const KVPool<T> pool_;
  const int64_t head_dim_, value_dim_;
  const int64_t key_width_, value_width_;  // these, rounded up to whole panels
  const std::vector<T> zeros_;
};

}  // namespace tercet
