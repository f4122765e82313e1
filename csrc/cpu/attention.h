// Attention of new tokens to all that their requests have in the pool by then: prefill, decode and both at once.
//
// Keys and values come in tiles, tiles in splits (attention_plan.h). A query's softmax runs over the tiles of a split
// (online, arXiv 1805.02867), and splits are merged in order. None of this depends on the queries beside it, so a
// token's result has the same bits in a decode step, in a chunk of any size and after a cache hit. What a query does
// not see weighs exactly zero.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "dot.h"
#include "kv_panels.h"
#include "pool.h"

namespace tercet {

/// Less than any score, and finite: exp(kNothing - kNothing) is 1, not NaN.
constexpr float kNothing = -1e30f;
/// The score of a key that is not seen.
constexpr float kNever = -std::numeric_limits<float>::infinity();

/// What T is multiplied as: bfloat16 where the processor can, else float.
template <typename T>
struct ComputeOf {
  using type = float;
};
#ifdef __AVX512BF16__
template <>
struct ComputeOf<at::BFloat16> {
  using type = at::BFloat16;
};
#endif

template <typename T>
struct AttentionInputs {
  AttentionBatch batch;
  const T* q;                // token t, head h at q + t * q_stride + h * head_dim
  int64_t q_stride;
  const T* k_pool;           // [slots, kv_heads, head_dim], or panels (kv_panels.h)
  const T* v_pool;
  int64_t block_stride;      // of panels
  float scale;
  T* out;                    // [tokens, heads * head_dim]
};

/// Softmax of query rows over some keys: m the largest score, l the sum of exp(score - m), acc the values weighed so.
struct Partial {
  float* m;
  float* l;
  float* acc;  // [rows, width]
};

/// acc [width] *= factor
inline void shrink_row(float* acc, int64_t width, float factor) {
  for (int64_t d = 0; d < width; d += kLanes) store_floats(acc + d, load_floats(acc + d) * factor);
}

/// Both have room for whole vectors of rows.
inline void merge(Partial into, Partial from, int64_t rows, int64_t width) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    const Vec old = Vec::loadu(into.m + first), other = Vec::loadu(from.m + first);
    const Vec m = at::vec::maximum(old, other), a = (old - m).exp(), b = (other - m).exp();
    m.store(into.m + first);
    (Vec::loadu(into.l + first) * a + Vec::loadu(from.l + first) * b).store(into.l + first);
    float of_into[kLanes], of_from[kLanes];
    a.store(of_into);
    b.store(of_from);
    for (int64_t r = first; r < std::min(rows, first + kLanes); ++r)
      for (int64_t d = r * width; d < (r + 1) * width; d += kLanes)
        store_floats(
            into.acc + d,
            load_floats(into.acc + d) * of_into[r - first] + load_floats(from.acc + d) * of_from[r - first]);
  }
}

/// kInPanels: the pools are (kv_panels.h), and are multiplied from as they are.
template <typename T, bool kInPanels>
class Attention {
  using C = typename ComputeOf<T>::type;
  static constexpr int64_t kPerWord = Dot<C>::kPerWord;
  static_assert(!kInPanels || std::is_same_v<T, C>);

 public:
  /// plan: of in.batch
  Attention(const AttentionInputs<T>& in, const AttentionPlan& plan)
      : in_(in),
        batch_(in_.batch),
        group_(batch_.group()),
        dim_(batch_.head_dim),
        width_(round_up(dim_, kPanel)),
        plan_(plan),
        kept_size_(batch_.heads * (width_ + 2)),
        kept_(std::make_unique_for_overwrite<float[]>(plan_.num_kept * kept_size_)),
        zeros_(batch_.kv_heads * dim_) {}

  void run() {
    Pool& pool = Pool::get();
    pool.run(plan_.shared.size(), [&](int64_t i) { attend(plan_.shared[i], true); });
    pool.run(plan_.own.size(), [&](int64_t i) {
      const Work& work = plan_.own[i];
      attend(work, plan_.queries[work.queries.from].kept >= 0);
    });
    pool.run(plan_.in_parts.size(), [&](int64_t i) { finish(plan_.in_parts[i]); });
  }

 private:
  static constexpr int64_t kPanels = kTile / kPanel;

  /// Where a tile's slots are in the pools, all KV heads of one after the other; beyond the last key there are zeros.
  /// Of a pool in panels only the first slot of each is looked up.
  struct Tile {
    int64_t first, num_keys = 0;
    const T* k[kTile];
    const T* v[kTile];
  };

  struct Panel {
    const C* numbers;
    const C* next = nullptr;  // what to bring from memory meanwhile: packing has seen to it otherwise

    /// A word's worth with every word from there on, for the first of the rows only.
    auto fetch(int64_t number, int64_t first_row) const {
      constexpr int64_t kBytes = kPanel * kPerWord * sizeof(C);
      if constexpr (kInPanels)
        return Fetch{reinterpret_cast<const char*>(next + number), first_row == 0 ? kBytes : 0};
      else
        return FetchNothing{};
    }
  };

  /// A KV head's part of a tile, kPanel keys each: keys [width / kPerWord][kPanel][kPerWord], values
  /// [width / kPanel][kPanel / kPerWord][kPanel][kPerWord].
  struct Panels {
    Panel k[kPanels];
    Panel v[kPanels];
  };

  /// Memory of one thread for one work.
  struct Scratch {
    std::vector<C> q, k_panels, v_panels, p;
    std::vector<float> scores, split, all;
    Tile tiles[2];

    static Scratch& with_room(int64_t heads, int64_t rows, int64_t width) {
      static thread_local Scratch scratch;
      scratch.grow(scratch.q, heads * rows * width);
      scratch.grow(scratch.k_panels, kTile * width);
      scratch.grow(scratch.v_panels, kTile * width);
      scratch.grow(scratch.p, rows * kTile);
      scratch.grow(scratch.scores, rows * kTile);
      scratch.grow(scratch.split, heads * rows * (width + 2));
      scratch.grow(scratch.all, heads * rows * (width + 2));
      return scratch;
    }

    template <typename N>
    static void grow(std::vector<N>& numbers, size_t size) {
      if (numbers.size() < size) numbers.resize(size);
    }
  };

  int64_t rows_of(const Work& work) const { return work.queries.size() * group_; }
  /// Rows that there is room for: whole vectors of m and l.
  static int64_t room_of(int64_t rows) { return round_up(rows, kLanes); }

  /// Of the work's head `head`, in memory of a thread.
  Partial partial(std::vector<float>& memory, int64_t rows, int64_t head) const {
    const int64_t room = room_of(rows);
    float* start = memory.data() + head * room * (width_ + 2);
    return {start, start + room, start + 2 * room};
  }

  /// A query's rows of a KV head, where they wait to be merged.
  Partial kept(const Query& query, int64_t split, int64_t kv_head) const {
    const int64_t number = query.kept + split - query.splits.from;
    float* start = kept_.get() + number * kept_size_ + kv_head * group_ * (width_ + 2);
    return {start, start + group_, start + 2 * group_};
  }

  void copy_rows(Partial from, int64_t from_row, Partial to, int64_t to_row) const {
    std::copy_n(from.m + from_row, group_, to.m + to_row);
    std::copy_n(from.l + from_row, group_, to.l + to_row);
    std::copy_n(from.acc + from_row * width_, group_ * width_, to.acc + to_row * width_);
  }

  /// keep: what a split comes to waits to be merged (`finish`), and is not the end of it.
  void attend(const Work& work, bool keep) const {
    const int64_t heads = work.kv_heads.size(), rows = rows_of(work);
    Scratch& s = Scratch::with_room(heads, room_of(rows), width_);
    for (int64_t head = 0; head < heads; ++head)
      gather_queries(work, work.kv_heads.from + head, s.q.data() + head * rows * width_);
    Tile *tile = &s.tiles[0], *next = &s.tiles[1];
    find_tile(work, work.keys.from, *tile);
    for (int64_t from = work.keys.from, end; from < work.keys.end; from = end) {
      const int64_t split = from / kSplit;
      end = std::min((split + 1) * kSplit, work.keys.end);
      const bool first = keep || from == work.keys.from;
      std::vector<float>& into = first ? s.all : s.split;
      for (int64_t head = 0; head < heads; ++head) begin(work, from, head, partial(into, rows, head));
      for (; from < end; from += kTile, std::swap(tile, next)) {
        find_tile(work, from + kTile, *next);
        for (int64_t head = 0; head < heads; ++head)
          attend_tile(work, *tile, *next, head, s, partial(into, rows, head));
      }
      for (int64_t head = 0; head < heads; ++head) {
        const Partial result = partial(into, rows, head);
        if (keep)
          for (int64_t i = 0; i < work.queries.size(); ++i)
            copy_rows(
                result, i * group_, kept(plan_.queries[work.queries.from + i], split, work.kv_heads.from + head), 0);
        else if (!first)
          merge(partial(s.all, rows, head), result, rows, width_);
      }
    }
    if (!keep)
      for (int64_t head = 0; head < heads; ++head)
        write(work.queries, work.kv_heads.from + head, partial(s.all, rows, head));
  }

  void attend_tile(
      const Work& work, const Tile& tile, const Tile& next, int64_t head, Scratch& s, Partial result) const {
    const int64_t rows = rows_of(work);
    const Panels panels = panels_of(tile, next, work.kv_heads.from + head, s);
    score(s.q.data() + head * rows * width_, rows, tile.num_keys, panels, s.scores.data());
    weigh(work, tile, s, result);
    add_values(s.p.data(), rows, tile.num_keys, panels, result.acc);
  }

  /// What a work starts a split with: nothing, or what works of several requests have left.
  void begin(const Work& work, int64_t from, int64_t head, Partial into) const {
    const int64_t rows = rows_of(work), room = room_of(rows);
    std::fill_n(into.m, room, kNothing);
    std::fill_n(into.l, room, 0.f);
    const Query& query = plan_.queries[work.queries.from];
    if (from % kSplit > 0 && from == query.shared)
      copy_rows(kept(query, from / kSplit, work.kv_heads.from + head), 0, into, 0);
    else
      std::fill_n(into.acc, rows * width_, 0.f);
  }

  /// Merges the splits of a query.
  void finish(int64_t index) const {
    const Query& query = plan_.queries[index];
    Scratch& s = Scratch::with_room(1, room_of(group_), width_);
    const Partial all = partial(s.all, group_, 0), one = partial(s.split, group_, 0);
    for (int64_t kv_head = 0; kv_head < batch_.kv_heads; ++kv_head) {
      for (int64_t split = query.splits.from; split < query.splits.end; ++split) {
        const bool first = split == query.splits.from;
        copy_rows(kept(query, split, kv_head), 0, first ? all : one, 0);
        if (!first) merge(all, one, group_, width_);
      }
      write({index, index + 1}, kv_head, all);
    }
  }

  /// Queries of the KV head, [num_queries * group, width], zeros beyond head_dim.
  void gather_queries(const Work& work, int64_t kv_head, C* to) const {
    for (int64_t i = work.queries.from; i < work.queries.end; ++i)
      for (int64_t g = 0; g < group_; ++g, to += width_)
        copy_row(in_.q + plan_.queries[i].token * in_.q_stride + (kv_head * group_ + g) * dim_, to);
  }

  void copy_row(const T* from, C* to) const {
    if constexpr (std::is_same_v<T, C>) {
      using Chunk = at::vec::Vectorized<T>;
      for (int64_t d = 0; d < dim_; d += Chunk::size())
        if (dim_ - d >= Chunk::size())
          Chunk::loadu(from + d).store(to + d);
        else
          std::memcpy(to + d, from + d, (dim_ - d) * sizeof(T));
    } else {
      for (int64_t d = 0; d < dim_; d += kPanel) store_pair(to + d, load_pair(from + d, dim_ - d), dim_ - d);
    }
    if (dim_ < width_) std::fill(to + dim_, to + width_, C(0.f));
  }

  /// Keys from `first` to the end of a tile, as far as the work goes: none at its end.
  void find_tile(const Work& work, int64_t first, Tile& tile) const {
    // A block begins with its first slot.
    constexpr int64_t step = kInPanels ? kPanel : 1;
    const int64_t stride = kInPanels ? in_.block_stride : batch_.kv_heads * dim_;
    tile.first = first;
    tile.num_keys = std::clamp<int64_t>(work.keys.end - first, 0, kTile);
    const int32_t* slots = batch_.slots(work.request) + first;
    for (int64_t i = 0; i < kTile; i += step) {
      const bool there = i < tile.num_keys;
      tile.k[i] = there ? in_.k_pool + slots[i] / step * stride : zeros_.data();
      tile.v[i] = there ? in_.v_pool + slots[i] / step * stride : zeros_.data();
    }
  }

  /// A KV head's part of the tile: where it is in the pools, or packed from there into `s`.
  Panels panels_of(const Tile& tile, const Tile& next, int64_t kv_head, Scratch& s) const {
    Panels panels;
    if constexpr (kInPanels) {
      const int64_t offset = kv_head * kPanel * dim_;
      for (int64_t i = 0; i < kPanels; ++i) {
        panels.k[i] = {tile.k[i * kPanel] + offset, next.k[i * kPanel] + offset};
        panels.v[i] = {tile.v[i * kPanel] + offset, next.v[i * kPanel] + offset};
      }
    } else {
      const int64_t padded = round_up(tile.num_keys, kPanel);
      pack_keys(tile, next, kv_head, padded, s.k_panels.data());
      pack_values(tile, next, kv_head, padded, s.v_panels.data());
      for (int64_t i = 0; i < kPanels; ++i) {
        panels.k[i].numbers = s.k_panels.data() + i * kPanel * width_;
        panels.v[i].numbers = s.v_panels.data() + i * kPanel * width_;
      }
    }
    return panels;
  }

  /// Has a KV head's part of a slot brought from memory.
  void fetch(const T* slot, int64_t kv_head) const {
    for (int64_t d = 0; d < dim_; d += 64 / static_cast<int64_t>(sizeof(T))) fetch_line(slot + kv_head * dim_ + d);
  }

  /// Numbers d, d + 1, ... of a row that fill a vector, zeros beyond head_dim, as words of whatever kind.
  Floats load_words(const T* row, int64_t d) const {
    constexpr int64_t kNumbers = kLanes * kPerWord;
    Floats words{};
    if constexpr (std::is_same_v<T, C>) {
      if (d + kNumbers <= dim_)
        words = load_floats(reinterpret_cast<const float*>(row + d));
      else if (d < dim_)
        std::memcpy(&words, row + d, (dim_ - d) * sizeof(T));
    } else {
      Vec loaded(0.f);
      if (d < dim_) loaded = load_pair(row + d, std::min(kLanes, dim_ - d)).left;
      std::memcpy(&words, &loaded, sizeof(words));
    }
    return words;
  }

  /// Has the keys of the next tile brought from memory meanwhile.
  void pack_keys(const Tile& tile, const Tile& next, int64_t kv_head, int64_t padded, C* panels) const {
    const int64_t words = width_ / kPerWord;
    for (int64_t i = 0; i < padded; i += kLanes) {
      for (int64_t r = 0; r < kLanes; ++r) fetch(next.k[i + r], kv_head);
      float* panel = reinterpret_cast<float*>(panels) + i / kPanel * words * kPanel + i % kPanel;
      for (int64_t w = 0; w < words; w += kLanes) {
        Floats block[kLanes];
#pragma GCC unroll 16
        for (int64_t r = 0; r < kLanes; ++r) block[r] = load_words(tile.k[i + r] + kv_head * dim_, w * kPerWord);
        transpose(block);
#pragma GCC unroll 16
        for (int64_t r = 0; r < kLanes; ++r) store_floats(panel + (w + r) * kPanel, block[r]);
      }
    }
  }

  void pack_values(const Tile& tile, const Tile& next, int64_t kv_head, int64_t padded, C* panels) const {
    for (int64_t i = 0; i < padded; ++i) fetch(next.v[i], kv_head);
    for (int64_t panel = 0; panel < padded; panel += kPanel)
      for (int64_t d = 0; d < width_; d += kPanel) {
        float* words = reinterpret_cast<float*>(panels + panel * width_ + d * kPanel);
        for (int64_t i = panel; i < panel + kPanel; i += kPerWord, words += kPanel) {
          const auto value = [&](int64_t at, int64_t d) { return load_words(tile.v[at] + kv_head * dim_, d); };
          if constexpr (kPerWord == 1) {
            store_floats(words, value(i, d));
            store_floats(words + kLanes, value(i, d + kLanes));
          } else {
            // A word is the value of two neighbouring positions.
            typedef uint16_t Numbers __attribute__((vector_size(kPanel * sizeof(uint16_t))));
            const auto even = reinterpret_cast<Numbers>(value(i, d)), odd = reinterpret_cast<Numbers>(value(i + 1, d));
            const auto pairs = interleave(even, odd, std::make_index_sequence<kPanel>());
            store_floats(words, reinterpret_cast<Floats>(pairs.first));
            store_floats(words + kLanes, reinterpret_cast<Floats>(pairs.second));
          }
        }
      }
  }

  /// a[0], b[0], a[1], b[1] ...
  template <typename V, size_t... kAt>
  static std::pair<V, V> interleave(V a, V b, std::index_sequence<kAt...>) {
    constexpr int kSize = sizeof...(kAt);
    return {
        shuffle<static_cast<int>(kAt / 2 + kAt % 2 * kSize)...>(a, b),
        shuffle<static_cast<int>(kSize / 2 + kAt / 2 + kAt % 2 * kSize)...>(a, b)};
  }

  /// scores [rows, kTile] = q k'
  void score(const C* q, int64_t rows, int64_t keys, const Panels& panels, float* scores) const {
    for (int64_t i = 0; i < keys; i += kPanel)
      in_pieces(rows, [&](int64_t first, auto count) {
        Floats sums[count][2] = {};
        multiply_panel<C, count>(
            q + first * width_,
            width_,
            panels.k[i / kPanel].numbers,
            kPanel * kPerWord,
            width_ / kPerWord,
            sums,
            panels.k[i / kPanel].fetch(0, first));
        for (int r = 0; r < count; ++r) {
          store_floats(scores + (first + r) * kTile + i, sums[r][0]);
          store_floats(scores + (first + r) * kTile + i + kLanes, sums[r][1]);
        }
      });
  }

  /// p [rows, kTile] = exp(score - m), after m, l and acc have been brought up to this tile's largest score.
  void weigh(const Work& work, const Tile& tile, Scratch& s, Partial into) const {
    const int64_t rows = rows_of(work), padded = round_up(tile.num_keys, kPanel);
    hide(work, tile, padded, s.scores.data());
    const Vec scale(in_.scale);
    // As many rows at once as a vector has lanes: their largest scores and sums are then a vector each.
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = std::min(kLanes, rows - first);
      float* scores = s.scores.data() + first * kTile;
      Floats of_rows[kLanes];
      for (int64_t r = 0; r < count; ++r) {
        Vec most(kNever);
        for (int64_t i = r * kTile; i < r * kTile + padded; i += kLanes)
          most = at::vec::clamp_min(Vec::loadu(scores + i), most);
        of_rows[r] = floats_of(most);
      }
      std::fill(of_rows + count, of_rows + kLanes, Floats{});
      const Vec old = Vec::loadu(into.m + first);
      const Vec most = in_lanes(of_rows, [](Vec a, Vec b) { return at::vec::clamp_min(a, b); });
      const Vec m = at::vec::clamp_min(most * scale, old);
      const Vec shrink = (old - m).exp();
      m.store(into.m + first);
      for (int64_t r = 0; r < count; ++r) {
        const Vec m_of_row(into.m[first + r]);
        Vec sum(0.f);
        for (int64_t i = 0; i < padded; i += kPanel) {
          const float* at = scores + r * kTile + i;
          const Vec left = exp_for<C>(at::vec::fmsub(Vec::loadu(at), scale, m_of_row));
          const Vec right = exp_for<C>(at::vec::fmsub(Vec::loadu(at + kLanes), scale, m_of_row));
          sum = sum + (left + right);
          store_pair(s.p.data() + (first + r) * kTile + i, {left, right});
        }
        of_rows[r] = floats_of(sum);
      }
      const Vec sums = in_lanes(of_rows, [](Vec a, Vec b) { return a + b; });
      (Vec::loadu(into.l + first) * shrink + sums).store(into.l + first);
      float factors[kLanes];
      shrink.store(factors);
      for (int64_t r = 0; r < count; ++r)
        if (factors[r] != 1.f) shrink_row(into.acc + (first + r) * width_, width_, factors[r]);
    }
  }

  /// Scores of keys that a query does not see become kNever.
  void hide(const Work& work, const Tile& tile, int64_t padded, float* scores) const {
    for (int64_t i = work.queries.from; i < work.queries.end; ++i) {
      const int64_t position = plan_.queries[i].position - tile.first;
      const int64_t from = std::clamp<int64_t>(position + 1 - batch_.window, 0, padded);
      const int64_t end = std::clamp<int64_t>(position + 1, 0, tile.num_keys);
      if (from == 0 && end == padded) {
        scores += group_ * kTile;
        continue;
      }
      for (int64_t g = 0; g < group_; ++g, scores += kTile) {
        std::fill(scores, scores + from, kNever);
        std::fill(scores + end, scores + padded, kNever);
      }
    }
  }

  /// acc += p v
  void add_values(const C* p, int64_t rows, int64_t keys, const Panels& panels, float* acc) const {
    for (int64_t d = 0; d < width_; d += kPanel)
      in_pieces(rows, [&](int64_t first, auto count) {
        Floats sums[count][2];
        for (int r = 0; r < count; ++r) {
          sums[r][0] = load_floats(acc + (first + r) * width_ + d);
          sums[r][1] = load_floats(acc + (first + r) * width_ + d + kLanes);
        }
        for (int64_t i = 0; i < keys; i += kPanel)
          multiply_panel<C, count>(
              p + first * kTile + i,
              kTile,
              panels.v[i / kPanel].numbers + d * kPanel,
              kPanel * kPerWord,
              ceil_div(std::min(kPanel, keys - i), kPerWord),
              sums,
              panels.v[i / kPanel].fetch(d * kPanel, first));
        for (int r = 0; r < count; ++r) {
          store_floats(acc + (first + r) * width_ + d, sums[r][0]);
          store_floats(acc + (first + r) * width_ + d + kLanes, sums[r][1]);
        }
      });
  }

  void write(Range queries, int64_t kv_head, Partial result) const {
    for (int64_t i = queries.from, row = 0; i < queries.end; ++i)
      for (int64_t g = 0; g < group_; ++g, ++row) {
        T* out = in_.out + (plan_.queries[i].token * batch_.heads + kv_head * group_ + g) * dim_;
        const Vec inverse(1.f / result.l[row]);
        for (int64_t d = 0; d < dim_; d += kPanel)
          store_pair(out + d, load_pair(result.acc + row * width_ + d) * inverse, dim_ - d);
      }
  }

  const AttentionInputs<T> in_;
  const AttentionBatch& batch_;
  const int64_t group_, dim_;
  const int64_t width_;  // head_dim, padded to whole panels
  const AttentionPlan& plan_;
  const int64_t kept_size_;
  const std::unique_ptr<float[]> kept_;
  const std::vector<T> zeros_;
};

}  // namespace tercet
