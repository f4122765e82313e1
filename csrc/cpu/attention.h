// Attention of new tokens to all keys that their requests have in the pool: prefill, decode, and both in one call.
// README.md follows one call step by step.
//
// Keys and values come in tiles, tiles in splits (attention_plan.h). A query's softmax runs over the tiles of a split,
// and the splits are merged in order (softmax_partial.h). Neither depends on the queries beside it, so a token's result
// has the same bits in a decode step, in a chunk of any size and after a cache hit.
#pragma once

#include <memory>
#include <vector>

#include "attention_plan.h"
#include "kv_tiles.h"
#include "thread_pool.h"
#include "softmax_partial.h"

namespace tercet {

template <typename T>
struct AttentionInputs {
  AttentionBatch batch;
  const T* q;        // token t, head h at q + t * q_stride + h * head_dim
  int64_t q_stride;
  KVPool<T> pool;
  float scale;
  T* out;            // [tokens, heads * head_dim]
};

/// kInPanels: the pools are in panels (kv_panels.h).
template <typename T, bool kInPanels>
class Attention {
  using C = typename ComputeTypeOf<T>::type;
  using Reader = TileReader<T, kInPanels>;
  using Tile = typename Reader::Tile;
  using Panels = typename Reader::Panels;
  static constexpr int64_t kPerWord = Dot<C>::kPerWord;

 public:
  /// plan: of in.batch
  Attention(const AttentionInputs<T>& in, const AttentionPlan& plan)
      : in_(in),
        batch_(in_.batch),
        reader_(batch_, in_.pool),
        group_(batch_.group()),
        head_dim_(batch_.head_dim),
        width_(round_up(head_dim_, kPanel)),
        plan_(plan),
        saved_size_(batch_.heads * (width_ + 2)),
        saved_(std::make_unique_for_overwrite<float[]>(plan_.num_saved * saved_size_)) {}

  void run() {
    ThreadPool& pool = ThreadPool::get();
    pool.run(plan_.shared_tasks.size(), [&](int64_t i) { attend(plan_.shared_tasks[i], true); });
    pool.run(plan_.own_tasks.size(), [&](int64_t i) {
      const Task& task = plan_.own_tasks[i];
      attend(task, plan_.queries[task.queries.from].saved >= 0);
    });
    pool.run(plan_.queries_to_merge.size(), [&](int64_t i) { merge_splits(plan_.queries_to_merge[i]); });
  }

 private:
  /// The memory of one thread for one task.
  struct Scratch {
    std::vector<C> q, k_panels, v_panels, weights;
    std::vector<float> scores, split, total;
    Tile tiles[2];

    static Scratch& with_room_for(int64_t heads, int64_t rows, int64_t width) {
      static thread_local Scratch scratch;
      scratch.grow(scratch.q, heads * rows * width);
      scratch.grow(scratch.k_panels, kTile * width);
      scratch.grow(scratch.v_panels, kTile * width);
      scratch.grow(scratch.weights, rows * kTile);
      scratch.grow(scratch.scores, rows * kTile);
      scratch.grow(scratch.split, heads * rows * (width + 2));
      scratch.grow(scratch.total, heads * rows * (width + 2));
      return scratch;
    }

    template <typename N>
    static void grow(std::vector<N>& numbers, size_t size) {
      if (numbers.size() < size) numbers.resize(size);
    }
  };

  int64_t num_rows(const Task& task) const { return task.queries.size() * group_; }
  /// Rows that memory is reserved for: m and l have whole vectors.
  static int64_t padded_rows(int64_t rows) { return round_up(rows, kLanes); }

  /// The partial result of the task's head `head` in a thread's memory.
  Partial partial(std::vector<float>& memory, int64_t rows, int64_t head) const {
    const int64_t padded = padded_rows(rows);
    float* start = memory.data() + head * padded * (width_ + 2);
    return {start, start + padded, start + 2 * padded};
  }

  /// The saved result of a query's split, for the rows of a KV head.
  Partial saved(const Query& query, int64_t split, int64_t kv_head) const {
    const int64_t number = query.saved + split - query.splits.from;
    float* start = saved_.get() + number * saved_size_ + kv_head * group_ * (width_ + 2);
    return {start, start + group_, start + 2 * group_};
  }

  /// Copies the rows of one query.
  void copy_rows(Partial from, int64_t from_row, Partial to, int64_t to_row) const {
    std::copy_n(from.m + from_row, group_, to.m + to_row);
    std::copy_n(from.l + from_row, group_, to.l + to_row);
    std::copy_n(from.acc + from_row * width_, group_ * width_, to.acc + to_row * width_);
  }

  /// Attends to the keys of a task. With `save` the result of each split is saved for `merge_splits`; without, the
  /// task has all splits of its queries, merges them and writes the output.
  void attend(const Task& task, bool save) const {
    const int64_t heads = task.kv_heads.size(), rows = num_rows(task);
    Scratch& s = Scratch::with_room_for(heads, padded_rows(rows), width_);
    for (int64_t head = 0; head < heads; ++head)
      gather_queries(task, task.kv_heads.from + head, s.q.data() + head * rows * width_);
    Tile *tile = &s.tiles[0], *next = &s.tiles[1];
    reader_.find(task, task.keys.from, *tile);
    for (int64_t from = task.keys.from, end; from < task.keys.end; from = end) {
      const int64_t split = from / kSplit;
      end = std::min((split + 1) * kSplit, task.keys.end);
      const bool first = save || from == task.keys.from;
      std::vector<float>& into = first ? s.total : s.split;
      for (int64_t head = 0; head < heads; ++head) begin_split(task, from, head, partial(into, rows, head));
      for (; from < end; from += kTile, std::swap(tile, next)) {
        reader_.find(task, from + kTile, *next);
        for (int64_t head = 0; head < heads; ++head)
          attend_tile(task, *tile, *next, head, s, partial(into, rows, head));
      }
      for (int64_t head = 0; head < heads; ++head) {
        const Partial result = partial(into, rows, head);
        if (save)
          for (int64_t i = 0; i < task.queries.size(); ++i)
            copy_rows(
                result, i * group_, saved(plan_.queries[task.queries.from + i], split, task.kv_heads.from + head), 0);
        else if (!first)
          merge(partial(s.total, rows, head), result, rows, width_);
      }
    }
    if (!save)
      for (int64_t head = 0; head < heads; ++head)
        write_output(task.queries, task.kv_heads.from + head, partial(s.total, rows, head));
  }

  void attend_tile(
      const Task& task, const Tile& tile, const Tile& next, int64_t head, Scratch& s, Partial result) const {
    const int64_t rows = num_rows(task);
    const Panels panels =
        reader_.panels(tile, next, task.kv_heads.from + head, s.k_panels.data(), s.v_panels.data());
    compute_scores(s.q.data() + head * rows * width_, rows, tile.num_keys, panels, s.scores.data());
    compute_weights(task, tile, s, result);
    add_values(s.weights.data(), rows, tile.num_keys, panels, result.acc);
  }

  /// Sets the result that a split starts with: nothing, or what shared tasks saved of the same split.
  void begin_split(const Task& task, int64_t from, int64_t head, Partial into) const {
    const int64_t rows = num_rows(task), padded = padded_rows(rows);
    std::fill_n(into.m, padded, kNoScore);
    std::fill_n(into.l, padded, 0.f);
    const Query& query = plan_.queries[task.queries.from];
    if (from % kSplit > 0 && from == query.shared)
      copy_rows(saved(query, from / kSplit, task.kv_heads.from + head), 0, into, 0);
    else
      std::fill_n(into.acc, rows * width_, 0.f);
  }

  /// Merges the saved splits of a query and writes its output.
  void merge_splits(int64_t index) const {
    const Query& query = plan_.queries[index];
    Scratch& s = Scratch::with_room_for(1, padded_rows(group_), width_);
    const Partial total = partial(s.total, group_, 0), one = partial(s.split, group_, 0);
    for (int64_t kv_head = 0; kv_head < batch_.kv_heads; ++kv_head) {
      for (int64_t split = query.splits.from; split < query.splits.end; ++split) {
        const bool first = split == query.splits.from;
        copy_rows(saved(query, split, kv_head), 0, first ? total : one, 0);
        if (!first) merge(total, one, group_, width_);
      }
      write_output({index, index + 1}, kv_head, total);
    }
  }

  /// Copies the queries of a KV head: [num_queries * group, width], zeros beyond head_dim.
  void gather_queries(const Task& task, int64_t kv_head, C* to) const {
    for (int64_t i = task.queries.from; i < task.queries.end; ++i)
      for (int64_t g = 0; g < group_; ++g, to += width_)
        copy_query(in_.q + plan_.queries[i].token * in_.q_stride + (kv_head * group_ + g) * head_dim_, to);
  }

  void copy_query(const T* from, C* to) const {
    if constexpr (std::is_same_v<T, C>) {
      using Chunk = at::vec::Vectorized<T>;
      for (int64_t d = 0; d < head_dim_; d += Chunk::size())
        if (head_dim_ - d >= Chunk::size())
          Chunk::loadu(from + d).store(to + d);
        else
          std::memcpy(to + d, from + d, (head_dim_ - d) * sizeof(T));
    } else {
      for (int64_t d = 0; d < head_dim_; d += kPanel)
        store_pair(to + d, load_pair(from + d, head_dim_ - d), head_dim_ - d);
    }
    if (head_dim_ < width_) std::fill(to + head_dim_, to + width_, C(0.f));
  }

  /// scores [rows, kTile] = q k'
  void compute_scores(const C* q, int64_t rows, int64_t keys, const Panels& panels, float* scores) const {
    for (int64_t i = 0; i < keys; i += kPanel)
      for_each_piece(rows, [&](int64_t first, auto count) {
        Floats sums[count][2];
        // For `= {}` GCC sets the array in memory, by an instruction that took a tenth of this function's time.
        unrolled<count>([&](auto r) { sums[r][0] = sums[r][1] = Floats{}; });
        multiply_panel<Dot<C>, count>(
            q + first * width_,
            width_,
            panels.k[i / kPanel].numbers,
            kPanel * kPerWord,
            width_ / kPerWord,
            sums,
            panels.k[i / kPanel].prefetch(0, first));
        for (int r = 0; r < count; ++r) {
          store_floats(scores + (first + r) * kTile + i, sums[r][0]);
          store_floats(scores + (first + r) * kTile + i + kLanes, sums[r][1]);
        }
      });
  }

  /// weights [rows, kTile] = exp(scale * score - m). Before that it raises m to this tile's largest score, and scales l
  /// and acc to the new m.
  void compute_weights(const Task& task, const Tile& tile, Scratch& s, Partial into) const {
    const int64_t rows = num_rows(task), padded_keys = round_up(tile.num_keys, kPanel);
    mask_scores(task, tile, padded_keys, s.scores.data());
    const Vec scale(in_.scale);
    // It takes as many rows at once as a vector has lanes, so their m and l are a vector each.
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = std::min(kLanes, rows - first);
      float* scores = s.scores.data() + first * kTile;
      Floats row_vectors[kLanes];
      for (int64_t r = 0; r < count; ++r) {
        Vec largest(kMasked);
        for (int64_t i = r * kTile; i < r * kTile + padded_keys; i += kLanes)
          largest = at::vec::clamp_min(Vec::loadu(scores + i), largest);
        row_vectors[r] = to_floats(largest);
      }
      std::fill(row_vectors + count, row_vectors + kLanes, Floats{});
      const Vec old_m = Vec::loadu(into.m + first);
      const Vec largest = reduce_each(row_vectors, [](Vec a, Vec b) { return at::vec::clamp_min(a, b); });
      const Vec m = at::vec::clamp_min(largest * scale, old_m);
      const Vec rescale = accurate_exp(old_m - m);
      m.store(into.m + first);
      for (int64_t r = 0; r < count; ++r) {
        const Vec row_m(into.m[first + r]);
        Vec sum(0.f);
        for (int64_t i = 0; i < padded_keys; i += kPanel) {
          const float* at = scores + r * kTile + i;
          const Vec left = exp_for<C>(at::vec::fmsub(Vec::loadu(at), scale, row_m));
          const Vec right = exp_for<C>(at::vec::fmsub(Vec::loadu(at + kLanes), scale, row_m));
          sum = sum + (left + right);
          store_pair(s.weights.data() + (first + r) * kTile + i, {left, right});
        }
        row_vectors[r] = to_floats(sum);
      }
      const Vec sums = reduce_each(row_vectors, [](Vec a, Vec b) { return a + b; });
      (Vec::loadu(into.l + first) * rescale + sums).store(into.l + first);
      float factors[kLanes];
      rescale.store(factors);
      for (int64_t r = 0; r < count; ++r)
        if (factors[r] != 1.f) scale_row(into.acc + (first + r) * width_, width_, factors[r]);
    }
  }

  /// Overwrites the scores of keys that a query does not see.
  void mask_scores(const Task& task, const Tile& tile, int64_t padded_keys, float* scores) const {
    for (int64_t i = task.queries.from; i < task.queries.end; ++i) {
      const int64_t position = plan_.queries[i].position - tile.first;
      const int64_t from = std::clamp<int64_t>(position + 1 - batch_.window, 0, padded_keys);
      const int64_t end = std::clamp<int64_t>(position + 1, 0, tile.num_keys);
      if (from == 0 && end == padded_keys) {
        scores += group_ * kTile;
        continue;
      }
      for (int64_t g = 0; g < group_; ++g, scores += kTile) {
        std::fill(scores, scores + from, kMasked);
        std::fill(scores + end, scores + padded_keys, kMasked);
      }
    }
  }

  /// acc += weights v
  void add_values(const C* weights, int64_t rows, int64_t keys, const Panels& panels, float* acc) const {
    for (int64_t d = 0; d < width_; d += kPanel)
      for_each_piece(rows, [&](int64_t first, auto count) {
        Floats sums[count][2];
        for (int r = 0; r < count; ++r) {
          sums[r][0] = load_floats(acc + (first + r) * width_ + d);
          sums[r][1] = load_floats(acc + (first + r) * width_ + d + kLanes);
        }
        for (int64_t i = 0; i < keys; i += kPanel)
          multiply_panel<Dot<C>, count>(
              weights + first * kTile + i,
              kTile,
              panels.v[i / kPanel].numbers + d * kPanel,
              kPanel * kPerWord,
              ceil_div(std::min(kPanel, keys - i), kPerWord),
              sums,
              panels.v[i / kPanel].prefetch(d * kPanel, first));
        for (int r = 0; r < count; ++r) {
          store_floats(acc + (first + r) * width_ + d, sums[r][0]);
          store_floats(acc + (first + r) * width_ + d + kLanes, sums[r][1]);
        }
      });
  }

  /// out = acc / l
  void write_output(Range queries, int64_t kv_head, Partial result) const {
    for (int64_t i = queries.from, row = 0; i < queries.end; ++i)
      for (int64_t g = 0; g < group_; ++g, ++row) {
        T* out = in_.out + (plan_.queries[i].token * batch_.heads + kv_head * group_ + g) * head_dim_;
        const Vec inverse(1.f / result.l[row]);
        for (int64_t d = 0; d < head_dim_; d += kPanel)
          store_pair(out + d, load_pair(result.acc + row * width_ + d) * inverse, head_dim_ - d);
      }
  }

  const AttentionInputs<T> in_;
  const AttentionBatch& batch_;
  const Reader reader_;
  const int64_t group_;  // query heads that use a KV head
  const int64_t head_dim_;
  const int64_t width_;  // head_dim, rounded up to whole panels
  const AttentionPlan& plan_;
  const int64_t saved_size_;  // numbers of a saved split
  const std::unique_ptr<float[]> saved_;
};

}  // namespace tercet
