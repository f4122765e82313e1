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
      : in_(in), width_(round_up(in.head_dim, kPanel)), partial_size_(in.group() * (width_ + 2)) {}

  void run() {
    plan();
    partials_.resize(num_partials_ * partial_size_);
    Pool::get().run(work_.size(), [&](int64_t i) { attend(work_[i]); });
    if (num_partials_ > 0) Pool::get().run(merges_.size(), [&](int64_t i) { finish(merges_[i]); });
  }

 private:
  /// Memory of one thread.
  struct Scratch {
    std::vector<C> q, rows, k_panels, v_panels, p;
    std::vector<float> scores, split, all;
    std::vector<T> zeros;

    void make_room(int64_t num_rows, int64_t width) {
      grow(q, num_rows * width);
      grow(zeros, width);
      grow(rows, kLanes * width);
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

  void attend_split(const Work& work, int64_t split, Scratch& s, Partial into) const {
    const int64_t rows = work.num_tokens * in_.group();
    const int64_t prefix = in_.seq_lens[work.request] - (in_.start(work.request + 1) - work.token);
    const int64_t from = std::max(split * kSplit, (prefix + 1 - in_.window) / kTile * kTile);
    const int64_t end = std::min((split + 1) * kSplit, prefix + work.num_tokens);
    std::fill_n(into.m, rows, kNothing);
    std::fill_n(into.l, rows, 0.f);
    std::fill_n(into.acc, rows * width_, 0.f);
    for (int64_t tile = from; tile < end; tile += kTile) {
      const int64_t keys = std::min(kTile, end - tile), padded = round_up(keys, kPanel);
      pack_keys(rows_of(in_.k_pool, work, tile, keys, s), padded, s);
      pack_values(rows_of(in_.v_pool, work, tile, keys, s), padded, s);
      if (const int64_t left = std::min(kTile, end - tile - kTile); left > 0) {
        prefetch(rows_of(in_.k_pool, work, tile + kTile, left, s));
        prefetch(rows_of(in_.v_pool, work, tile + kTile, left, s));
      }
      score(rows, keys, s);
      weigh(work, prefix, tile, keys, s, into);
      add_values(rows, keys, s, into.acc);
    }
  }

  /// Where the tile's rows of a pool are; rows beyond the last key are zeros.
  struct TileRows {
    const T* row[kTile];
  };

  TileRows rows_of(const T* pool, const Work& work, int64_t tile, int64_t keys, const Scratch& s) const {
    const int32_t* slots = in_.slot_table + in_.rows[work.request] * in_.context + tile;
    const int64_t stride = in_.kv_heads * in_.head_dim;
    const T* head = pool + work.kv_head * in_.head_dim;
    TileRows rows;
    for (int64_t i = 0; i < kTile; ++i) rows.row[i] = i < keys ? head + slots[i] * stride : s.zeros.data();
    return rows;
  }

  /// The next tile is on its way from memory while this one is attended to.
  void prefetch(const TileRows& rows) const {
    for (const T* row : rows.row)
      for (int64_t d = 0; d < in_.head_dim; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
  }

  /// Keys as panels [tile / kPanel][width / kPerWord][kPanel].
  void pack_keys(const TileRows& keys, int64_t padded, Scratch& s) const {
    const int64_t words = width_ / kPerWord;
    // Words are transposed, whatever is in them.
    const auto* rows = reinterpret_cast<const float*>(s.rows.data());
    for (int64_t i = 0; i < padded; i += kLanes) {
      copy_rows(keys.row + i, kLanes, s.rows.data());
      auto* panel = reinterpret_cast<float*>(s.k_panels.data()) + i / kPanel * words * kPanel + i % kPanel;
      for (int64_t w = 0; w < words; w += kLanes)
        at::vec::transpose_mxn<float, kLanes, kLanes>(rows + w, words, panel + w * kPanel, kPanel);
    }
  }

  /// Values as panels [width / kPanel][tile / kPerWord][kPanel]; as they are, [tile, width], where a word is one number.
  void pack_values(const TileRows& values, int64_t padded, Scratch& s) const {
#ifdef __AVX512BF16__
    if constexpr (kPerWord == 2) {
      alignas(64) static constexpr auto kOrder = [] {
        struct Order {
          uint16_t low[32], high[32];
        } order{};
        for (int i = 0; i < 32; ++i) {
          order.low[i] = i / 2 + i % 2 * 32;
          order.high[i] = 16 + i / 2 + i % 2 * 32;
        }
        return order;
      }();
      const __m512i low = _mm512_load_si512(kOrder.low), high = _mm512_load_si512(kOrder.high);
      const int64_t width = width_;
      for (int64_t d = 0; d < width; d += kPanel) {
        const int64_t left = in_.head_dim - d;
        const __mmask32 valid = left >= kPanel ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
        C* words = s.v_panels.data() + d * kTile;
        for (int64_t i = 0; i < padded; i += 2, words += 2 * kPanel) {
          const __m512i even = _mm512_maskz_loadu_epi16(valid, values.row[i] + d);
          const __m512i odd = _mm512_maskz_loadu_epi16(valid, values.row[i + 1] + d);
          _mm512_storeu_si512(words, _mm512_permutex2var_epi16(even, low, odd));
          _mm512_storeu_si512(words + kPanel, _mm512_permutex2var_epi16(even, high, odd));
        }
      }
      return;
    }
#endif
    copy_rows(values.row, padded, s.v_panels.data());
  }

  void copy_rows(const T* const* rows, int64_t count, C* to) const {
    for (int64_t i = 0; i < count; ++i) copy_row(rows[i], to + i * width_);
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
    constexpr bool kPaired = kPerWord == 2;
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
            s.v_panels.data() + (kPaired ? d * kTile : d),
            kPaired ? kPanel * kPerWord : width_,
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
  std::vector<Work> work_, merges_;
  int64_t num_partials_ = 0;
  mutable std::vector<float> partials_;
};

}  // namespace tercet
