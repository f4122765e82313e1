// Attention of new tokens to all that their requests have in the pool by then: prefill, decode and both at once.
//
// Keys and values come in tiles of kTile positions, tiles in splits of kSplit positions, both counted from position 0
// of the request. A query's softmax runs over the tiles of a split (online, arXiv 1805.02867), and splits are merged in
// order. None of this depends on the queries beside it, so a token's result has the same bits in a decode step, in a
// chunk of any size and after a cache hit. What a query does not see weighs exactly zero.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "dot.h"
#include "pool.h"

namespace tercet {

constexpr int64_t kTile = 64;
constexpr int64_t kSplit = 256;
static_assert(kSplit % kTile == 0 && kTile % kPanel == 0);
/// Query rows (tokens times the query heads of a KV head) that share one pass over keys and values.
constexpr int64_t kQueryRows = 96;
/// Less than any score, and finite: exp(kNothing - kNothing) is 1, not NaN.
constexpr float kNothing = -1e30f;

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
  const T* q;                // token t, head h at q + t * q_stride + h * head_dim
  int64_t q_stride;
  const T* k_pool;           // [slots, kv_heads, head_dim]
  const T* v_pool;
  const int32_t* slot_table;  // [rows, context]: slot of each position of each row
  int64_t context;
  const int64_t* rows;       // [B] row of each request
  const int64_t* seq_lens;   // [B] its tokens, the new ones included
  const int64_t* starts;     // [B + 1] its first new token; nullptr: one new token each
  int64_t num_requests, heads, kv_heads, head_dim;
  int64_t window;            // positions that a token sees, itself included
  float scale;
  T* out;                    // [tokens, heads * head_dim]

  int64_t start(int64_t request) const { return starts ? starts[request] : request; }
  int64_t group() const { return heads / kv_heads; }
};

/// Some new tokens of a request and a KV head, and the splits of keys and values to attend to.
struct Work {
  int64_t request, token, num_tokens, kv_head, first_split, end_split;
  /// where the result waits to be merged with other splits; -1: this is all of it
  int64_t partial;
};

/// Positions [from, end).
struct Range {
  int64_t from, end;
};

/// Softmax of query rows over some keys: m the largest score, l the sum of exp(score - m), acc the values weighed so.
struct Partial {
  float* m;
  float* l;
  float* acc;  // [rows, width]
};

inline void merge(Partial into, Partial from, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    const float m = std::max(into.m[r], from.m[r]);
    const float a = std::exp(into.m[r] - m), b = std::exp(from.m[r] - m);
    into.m[r] = m;
    into.l[r] = into.l[r] * a + from.l[r] * b;
    for (int64_t d = 0; d < width; d += kLanes) {
      float* sum = into.acc + r * width + d;
      store_floats(sum, load_floats(sum) * a + load_floats(from.acc + r * width + d) * b);
    }
  }
}

template <typename T>
class Attention {
  using C = typename ComputeOf<T>::type;
  static constexpr int64_t kPerWord = Dot<C>::kPerWord;

 public:
  explicit Attention(const AttentionInputs<T>& in)
      : in_(in),
        width_(round_up(in.head_dim, kPanel)),
        partial_size_(in.group() * (width_ + 2)),
        zeros_(in.head_dim) {}

  void run() {
    plan();
    partials_.resize(num_partials_ * partial_size_);
    Pool::get().run(work_.size(), [&](int64_t i) { attend(work_[i]); });
    if (num_partials_ > 0) Pool::get().run(merges_.size(), [&](int64_t i) { finish(merges_[i]); });
  }

 private:
  /// Memory of one thread.
  struct Scratch {
    std::vector<C> q, k_panels, v_panels, p;
    std::vector<float> scores, split, all;

    void make_room(int64_t num_rows, int64_t width) {
      grow(q, num_rows * width);
      grow(k_panels, kTile * width);
      grow(v_panels, kTile * width);
      grow(p, num_rows * kTile);
      grow(scores, num_rows * kTile);
      grow(split, num_rows * (width + 2));
      grow(all, num_rows * (width + 2));
    }

    template <typename N>
    static void grow(std::vector<N>& numbers, size_t size) {
      if (numbers.size() < size) numbers.resize(size);
    }
  };

  Partial partial(float* memory, int64_t rows) const { return {memory, memory + rows, memory + 2 * rows}; }

  void plan() {
    const int64_t block = std::max<int64_t>(1, kQueryRows / in_.group());
    for (int64_t request = 0; request < in_.num_requests; ++request) {
      const int64_t first = in_.start(request), end = in_.start(request + 1);
      const int64_t prefix = in_.seq_lens[request] - (end - first);
      const int64_t pieces = ceil_div(end - first, block);
      for (int64_t kv_head = 0; kv_head < in_.kv_heads; ++kv_head) {
        // The last tokens see most: they go first.
        for (int64_t piece = pieces - 1; piece >= 0; --piece) {
          const int64_t token = (end - first) * piece / pieces, next = (end - first) * (piece + 1) / pieces;
          const int64_t first_split = std::max<int64_t>(0, prefix + token + 1 - in_.window) / kSplit;
          const int64_t end_split = ceil_div(prefix + next, kSplit);
          Work work{request, first + token, next - token, kv_head, first_split, end_split, -1};
          if (work.num_tokens > 1 || end_split - first_split == 1) {
            work_.push_back(work);
            continue;
          }
          // One token with a long context: its splits are shared out.
          work.partial = num_partials_;
          merges_.push_back(work);
          for (int64_t split = first_split; split < end_split; ++split) {
            Work part = work;
            part.first_split = split;
            part.end_split = split + 1;
            part.partial = num_partials_++;
            work_.push_back(part);
          }
        }
      }
    }
  }

  void attend(const Work& work) const {
    static thread_local Scratch scratch;
    const int64_t group = in_.group(), rows = work.num_tokens * group;
    scratch.make_room(rows, width_);
    gather_queries(work, scratch.q.data());
    const Partial all = partial(scratch.all.data(), rows), one = partial(scratch.split.data(), rows);
    for (int64_t split = work.first_split; split < work.end_split; ++split) {
      const Partial into = split == work.first_split ? all : one;
      attend_split(work, split, scratch, into);
      if (split > work.first_split) merge(all, one, rows, width_);
    }
    if (work.partial < 0)
      write(work, all);
    else
      std::copy_n(scratch.all.data(), partial_size_, partials_.data() + work.partial * partial_size_);
  }

  void finish(const Work& work) const {
    const auto part = [&](int64_t index) {
      return partial(partials_.data() + (work.partial + index) * partial_size_, in_.group());
    };
    for (int64_t i = 1; i < work.end_split - work.first_split; ++i) merge(part(0), part(i), in_.group(), width_);
    write(work, part(0));
  }

  /// Queries of the KV head, [num_tokens * group, width], zeros beyond head_dim.
  void gather_queries(const Work& work, C* to) const {
    const int64_t group = in_.group();
    for (int64_t t = 0; t < work.num_tokens; ++t)
      for (int64_t g = 0; g < group; ++g)
        copy_row(
            in_.q + (work.token + t) * in_.q_stride + (work.kv_head * group + g) * in_.head_dim,
            to + (t * group + g) * width_);
  }

  void copy_row(const T* from, C* to) const {
    const int64_t dim = in_.head_dim;
    if constexpr (std::is_same_v<T, C>) {
      using Chunk = at::vec::Vectorized<T>;
      for (int64_t d = 0; d < dim; d += Chunk::size())
        if (dim - d >= Chunk::size())
          Chunk::loadu(from + d).store(to + d);
        else
          std::memcpy(to + d, from + d, (dim - d) * sizeof(T));
    } else {
      for (int64_t d = 0; d < dim; d += kPanel) store_pair(to + d, load_pair(from + d, dim - d), dim - d);
    }
    if (dim < width_) std::fill(to + dim, to + width_, C(0.f));
  }

  /// Tokens of the request before those of this work.
  int64_t prefix_of(const Work& work) const {
    return in_.seq_lens[work.request] - (in_.start(work.request + 1) - work.token);
  }

  /// Positions of a split that some query of this work sees, from the start of a tile.
  Range range_of(const Work& work, int64_t split) const {
    const int64_t prefix = prefix_of(work);
    return {
        std::max(split * kSplit, (prefix + 1 - in_.window) / kTile * kTile),
        std::min((split + 1) * kSplit, prefix + work.num_tokens)};
  }

  void attend_split(const Work& work, int64_t split, Scratch& s, Partial into) const {
    const int64_t rows = work.num_tokens * in_.group(), prefix = prefix_of(work);
    const Range range = range_of(work, split);
    std::fill_n(into.m, rows, kNothing);
    std::fill_n(into.l, rows, 0.f);
    std::fill_n(into.acc, rows * width_, 0.f);
    Tile found = find_tile(work, range, range.from);
    for (int64_t tile = range.from; tile < range.end; tile += kTile) {
      const int64_t keys = found.num_keys, padded = round_up(keys, kPanel);
      pack_keys(found.keys, padded, s.k_panels.data());
      pack_values(found.values, padded, s.v_panels.data());
      if (tile + kTile < range.end) found = find_tile(work, range, tile + kTile);
      score(rows, keys, s);
      weigh(work, prefix, tile, keys, s, into);
      add_values(rows, keys, s, into.acc);
    }
  }

  /// Where the tile's rows of a pool are; rows beyond the last key are zeros.
  struct TileRows {
    const T* row[kTile];
  };

  struct Tile {
    int64_t num_keys;
    TileRows keys, values;
  };

  /// Finds the tile, and has it brought from memory while something else is done.
  Tile find_tile(const Work& work, Range range, int64_t tile) const {
    const int64_t num_keys = std::min(kTile, range.end - tile);
    return {num_keys, find_rows(in_.k_pool, work, tile, num_keys), find_rows(in_.v_pool, work, tile, num_keys)};
  }

  TileRows find_rows(const T* pool, const Work& work, int64_t tile, int64_t num_keys) const {
    const int32_t* slots = in_.slot_table + in_.rows[work.request] * in_.context + tile;
    const int64_t stride = in_.kv_heads * in_.head_dim;
    const T* head = pool + work.kv_head * in_.head_dim;
    TileRows rows;
    for (int64_t i = 0; i < num_keys; ++i) {
      rows.row[i] = head + slots[i] * stride;
      for (int64_t d = 0; d < in_.head_dim; d += 64 / static_cast<int64_t>(sizeof(T))) fetch_line(rows.row[i] + d);
    }
    std::fill(rows.row + num_keys, rows.row + kTile, zeros_.data());
    return rows;
  }

  /// Numbers d, d + 1, ... of a row that fill a vector, zeros beyond head_dim, as words of whatever kind.
  Floats load_words(const T* row, int64_t d) const {
    constexpr int64_t kNumbers = kLanes * kPerWord;
    Floats words{};
    if constexpr (std::is_same_v<T, C>) {
      if (d + kNumbers <= in_.head_dim)
        words = load_floats(reinterpret_cast<const float*>(row + d));
      else if (d < in_.head_dim)
        std::memcpy(&words, row + d, (in_.head_dim - d) * sizeof(T));
    } else {
      Vec loaded(0.f);
      if (d < in_.head_dim) loaded = load_pair(row + d, std::min(kLanes, in_.head_dim - d)).left;
      std::memcpy(&words, &loaded, sizeof(words));
    }
    return words;
  }

  /// Keys as panels [tile / kPanel][width / kPerWord][kPanel].
  void pack_keys(const TileRows& keys, int64_t padded, C* panels) const {
    const int64_t words = width_ / kPerWord;
    for (int64_t i = 0; i < padded; i += kLanes) {
      float* panel = reinterpret_cast<float*>(panels) + i / kPanel * words * kPanel + i % kPanel;
      for (int64_t w = 0; w < words; w += kLanes) {
        Floats block[kLanes];
#pragma GCC unroll 16
        for (int64_t r = 0; r < kLanes; ++r) block[r] = load_words(keys.row[i + r], w * kPerWord);
        transpose(block);
#pragma GCC unroll 16
        for (int64_t r = 0; r < kLanes; ++r) store_floats(panel + (w + r) * kPanel, block[r]);
      }
    }
  }

  /// Values as panels [width / kPanel][tile / kPerWord][kPanel].
  void pack_values(const TileRows& values, int64_t padded, C* panels) const {
    for (int64_t d = 0; d < width_; d += kPanel) {
      float* words = reinterpret_cast<float*>(panels) + d * kTile / kPerWord;
      for (int64_t i = 0; i < padded; i += kPerWord, words += kPanel) {
        if constexpr (kPerWord == 1) {
          store_floats(words, load_words(values.row[i], d));
          store_floats(words + kLanes, load_words(values.row[i], d + kLanes));
        } else {
          // A word is the value of two neighbouring positions.
          typedef uint16_t Numbers __attribute__((vector_size(kPanel * sizeof(uint16_t))));
          const auto even = reinterpret_cast<Numbers>(load_words(values.row[i], d));
          const auto odd = reinterpret_cast<Numbers>(load_words(values.row[i + 1], d));
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
        __builtin_shufflevector(a, b, static_cast<int>(kAt / 2 + kAt % 2 * kSize)...),
        __builtin_shufflevector(a, b, static_cast<int>(kSize / 2 + kAt / 2 + kAt % 2 * kSize)...)};
  }

  /// scores [rows, kTile] = q k'
  void score(int64_t rows, int64_t keys, Scratch& s) const {
    for (int64_t i = 0; i < keys; i += kPanel)
      in_pieces(rows, [&](int64_t first, auto count) {
        Floats sums[count][2] = {};
        multiply_panel<C, count>(
            s.q.data() + first * width_,
            width_,
            s.k_panels.data() + i * width_,
            kPanel * kPerWord,
            width_ / kPerWord,
            sums);
        for (int r = 0; r < count; ++r) {
          store_floats(s.scores.data() + (first + r) * kTile + i, sums[r][0]);
          store_floats(s.scores.data() + (first + r) * kTile + i + kLanes, sums[r][1]);
        }
      });
  }

  static Vec exp_of(Vec x) {
    if constexpr (std::is_same_v<C, float>)
      return x.exp();
    else
      return x.exp_u20();  // off by less than rounding to bfloat16 is
  }

  /// p [rows, kTile] = exp(score - m), after m, l and acc have been brought up to this tile's largest score.
  void weigh(const Work& work, int64_t prefix, int64_t tile, int64_t keys, Scratch& s, Partial into) const {
    const int64_t rows = work.num_tokens * in_.group(), padded = round_up(keys, kPanel);
    const Vec scale(in_.scale);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = prefix + r / in_.group();
      const int64_t seen_from = std::max<int64_t>(0, position + 1 - in_.window - tile);
      const int64_t seen_to = std::min(keys, position + 1 - tile);
      float* scores = s.scores.data() + r * kTile;
      C* p = s.p.data() + r * kTile;
      if (seen_from >= seen_to) {
        std::fill_n(p, padded, C(0.f));
        continue;
      }
      std::fill(scores, scores + seen_from, -std::numeric_limits<float>::infinity());
      std::fill(scores + seen_to, scores + padded, -std::numeric_limits<float>::infinity());
      Vec most(kNothing);
      for (int64_t i = 0; i < padded; i += kLanes) most = at::vec::maximum(most, Vec::loadu(scores + i) * scale);
      const float m = std::max(into.m[r], max_of(most));
      const float shrink = std::exp(into.m[r] - m);
      Vec sum(0.f);
      for (int64_t i = 0; i < padded; i += kPanel) {
        const Vec left = exp_of(at::vec::fmsub(Vec::loadu(scores + i), scale, Vec(m)));
        const Vec right = exp_of(at::vec::fmsub(Vec::loadu(scores + i + kLanes), scale, Vec(m)));
        sum = sum + (left + right);
        store_pair(p + i, {left, right});
      }
      into.l[r] = into.l[r] * shrink + sum_of(sum);
      into.m[r] = m;
      if (shrink != 1.f)
        for (int64_t d = 0; d < width_; d += kLanes)
          store_floats(into.acc + r * width_ + d, load_floats(into.acc + r * width_ + d) * shrink);
    }
  }

  /// acc += p v
  void add_values(int64_t rows, int64_t keys, const Scratch& s, float* acc) const {
    for (int64_t d = 0; d < width_; d += kPanel)
      in_pieces(rows, [&](int64_t first, auto count) {
        Floats sums[count][2];
        for (int r = 0; r < count; ++r) {
          sums[r][0] = load_floats(acc + (first + r) * width_ + d);
          sums[r][1] = load_floats(acc + (first + r) * width_ + d + kLanes);
        }
        multiply_panel<C, count>(
            s.p.data() + first * kTile,
            kTile,
            s.v_panels.data() + d * kTile,
            kPanel * kPerWord,
            ceil_div(keys, kPerWord),
            sums);
        for (int r = 0; r < count; ++r) {
          store_floats(acc + (first + r) * width_ + d, sums[r][0]);
          store_floats(acc + (first + r) * width_ + d + kLanes, sums[r][1]);
        }
      });
  }

  void write(const Work& work, Partial result) const {
    const int64_t group = in_.group(), dim = in_.head_dim;
    for (int64_t r = 0; r < work.num_tokens * group; ++r) {
      T* out = in_.out + ((work.token + r / group) * in_.heads + work.kv_head * group + r % group) * dim;
      const Vec inverse(1.f / result.l[r]);
      for (int64_t d = 0; d < dim; d += kPanel)
        store_pair(out + d, load_pair(result.acc + r * width_ + d) * inverse, dim - d);
    }
  }

  const AttentionInputs<T> in_;
  const int64_t width_;  // head_dim, padded to whole panels
  const int64_t partial_size_;
  const std::vector<T> zeros_;
  std::vector<Work> work_, merges_;
  int64_t num_partials_ = 0;
  mutable std::vector<float> partials_;
};

}  // namespace tercet
