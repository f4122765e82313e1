// Attention of new tokens to all keys that their requests have in the pool: prefill, decode, and both in one call.
// README.md follows one call step by step.
//
// Keys and values come in tiles, tiles in splits (attention_plan.h). A query's softmax runs over the tiles of a split,
// and the splits are merged in order (softmax_partial.h). Neither depends on the queries beside it, so a token's result
// has the same bits in a decode step, in a chunk of any size and after a cache hit.
#pragma once

#include <cmath>
#include <vector>

#include "attention_plan.h"
#include "attention_scratch.h"
#include "kv_tiles.h"
#include "saved_splits.h"
#include "soft_cap.h"
#include "softmax_partial.h"
#include "thread_pool.h"

namespace tercet {

template <typename T>
struct AttentionInputs {
  AttentionBatch batch;
  const T* q;          // token t, head h at q + t * q_stride + h * head_dim
  int64_t q_stride;
  KVPool<T> pool;
  float scale;
  float cap_scale;     // scores become tanh(score * cap_scale) * scale; 0: they have no soft cap
  const float* sinks;  // [heads] logits that join the softmax without a value; nullptr: none
  T* out;              // [tokens, heads * value_dim]
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
        value_dim_(batch_.value_dim),
        key_width_(round_up(head_dim_, kPanel)),
        value_width_(round_up(value_dim_, kPanel)),
        scale_(in.scale * kLog2E),
        plan_(plan),
        saved_(plan.num_saved, batch_.heads, group_, value_width_) {}

  void run() {
    ThreadPool& pool = ThreadPool::get();
    run_tasks(plan_.shared_tasks);
    run_tasks(plan_.own_tasks);
    pool.run(plan_.merges.size(), [&](int64_t i) { merge_splits(plan_.merges[i]); });
  }

 private:
  using Scratch = AttentionScratch<C, Reader>;

  /// Rows of a task for one KV head. The rows of a task are those of its first KV head, then those of the next.
  int64_t rows_per_head(const Task& task) const { return task.queries.size() * task.group.size(); }
  int64_t num_rows(const Task& task) const { return task.kv_heads.size() * rows_per_head(task); }

  /// The partial result of a task in a thread's memory.
  static Partial partial(std::vector<float>& memory, int64_t rows) {
    const int64_t padded = padded_rows(rows);
    return {memory.data(), memory.data() + padded, memory.data() + 2 * padded};
  }

  void run_tasks(const std::vector<Task>& tasks) const {
    ThreadPool& pool = ThreadPool::get();
    const int64_t last = static_cast<int64_t>(tasks.size()) - 1, threads = pool.num_threads();
    // The task that this thread will probably claim next. Its first tile is prefetched.
    pool.run(last + 1, [&](int64_t i) { attend(tasks[i], tasks[std::min(i + threads, last)]); });
  }

  /// A split of a task while it is computed.
  struct Split {
    const Task& task;
    Scratch& scratch;
    Partial result;
    int64_t num_tiles;
    int64_t tiles_at_once;   // whose keys are multiplied first, and then their values
    Range weighed = {0, 0};  // tiles whose weights are computed and whose values are not yet added to acc
    bool is_empty = true;    // nothing was added to acc, which is not set yet
  };

  /// Attends to the keys of a task. Then it saves the result of each split, or it finishes its queries: it merges the splits
  /// that shared tasks saved, then its own, and writes the output.
  void attend(const Task& task, const Task& next_task) const {
    const int64_t heads = task.kv_heads.size(), rows = num_rows(task);
    Scratch& s = Scratch::with_room_for(heads, rows, key_width_, value_width_);
    for (int64_t head = 0; head < heads; ++head)
      gather_queries(task, task.kv_heads.from + head, s.q.data() + head * rows_per_head(task) * key_width_);
    const Partial total = partial(s.total, rows), one = partial(s.split, rows);
    bool first = true;
    if (const Query& query = plan_.queries[task.queries.from]; !task.saves && query.saved >= 0) {
      const Range before{query.splits.from, task.keys.from / kSplit};
      saved_.merge(query, before, task, total, one);
      first = before.size() == 0;
    }
    for (int64_t from = task.keys.from, end; from < task.keys.end; from = end, first = false) {
      end = std::min((from / kSplit + 1) * kSplit, task.keys.end);
      const int64_t tiles = ceil_div(end - from, kTile);
      // With several pieces of rows, acc is loaded and stored once for all tiles. A single query waits for the memory, and
      // is faster in its order, tile by tile.
      const int64_t at_once = task.queries.size() > 1 && rows_per_head(task) > kMaxRows ? tiles : 1;
      Split split{task, s, first || task.saves ? total : one, tiles, at_once};
      begin_split(split, from);
      attend_split(split, from, end < task.keys.end ? task : next_task, end < task.keys.end ? end : next_task.keys.from);
      if (task.saves)
        save_split(task, from / kSplit, split.result);
      else if (!first)
        merge(total, one, rows, value_width_);
    }
    if (!task.saves) write_output(task, total);
  }

  /// Attends to the tiles of a split, from position `from` on. After them, this thread will probably attend to the tile
  /// at `next_from` of `next_task`.
  void attend_split(Split& split, int64_t from, const Task& next_task, int64_t next_from) const {
    Scratch& s = split.scratch;
    for (int64_t t = 0; t < split.num_tiles; ++t) reader_.find(split.task, from + t * kTile, s.tiles[t]);
    reader_.find(next_task, next_from, s.tiles[split.num_tiles]);
    for (int64_t t = 0; t < split.num_tiles; ++t) {
      compute_scores(split, t);
      compute_weights(split, t);
      split.weighed.end = t + 1;
      if ((t + 1) % split.tiles_at_once == 0) add_values(split);
    }
  }

  /// Sets the result that a split starts with: nothing, or what shared tasks saved of the same split.
  void begin_split(Split& split, int64_t from) const {
    const Task& task = split.task;
    const Partial into = split.result;
    const int64_t padded = padded_rows(num_rows(task));
    std::fill_n(into.m, padded, kNoScore);
    std::fill_n(into.l, padded, 0.f);
    const Query& query = plan_.queries[task.queries.from];
    if (from % kSplit == 0 || from != query.shared) return;
    saved_.load(query, from / kSplit, task, into);
    split.is_empty = false;
  }

  void save_split(const Task& task, int64_t split, Partial result) const {
    int64_t row = 0;
    for (int64_t head = task.kv_heads.from; head < task.kv_heads.end; ++head)
      for (int64_t i = task.queries.from; i < task.queries.end; ++i, row += task.group.size())
        saved_.store(result, row, plan_.queries[i], split, head, task.group);
  }

  /// Merges the saved splits of the query of a task and writes its output.
  void merge_splits(const Task& task) const {
    const Query& query = plan_.queries[task.queries.from];
    const int64_t rows = num_rows(task);
    Scratch& s = Scratch::with_room_for(1, rows, key_width_, value_width_);
    const Partial total = partial(s.total, rows), one = partial(s.split, rows);
    saved_.merge(query, query.splits, task, total, one);
    write_output(task, total);
  }

  /// Copies the queries of a KV head: [num_queries * group, key_width], zeros beyond head_dim.
  void gather_queries(const Task& task, int64_t kv_head, C* to) const {
    for (int64_t i = task.queries.from; i < task.queries.end; ++i)
      for (int64_t g = task.group.from; g < task.group.end; ++g, to += key_width_)
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
    if (head_dim_ < key_width_) std::fill(to + head_dim_, to + key_width_, C(0.f));
  }

  /// scores [rows, kTile] = q k' of tile `t` of a split
  void compute_scores(const Split& split, int64_t t) const {
    const Task& task = split.task;
    Scratch& s = split.scratch;
    const int64_t rows = rows_per_head(task), at = t % split.tiles_at_once;
    for (int64_t head = 0; head < task.kv_heads.size(); ++head) {
      Panels& panels = s.panels[head * kTilesPerSplit + t];
      panels = reader_.panels(
          s.tiles + t - at,
          at,
          split.tiles_at_once,
          task.kv_heads.from + head,
          s.k_panels.data() + head * kTile * key_width_,
          s.v_panels.data() + (head * kTilesPerSplit + t) * kTile * value_width_);
      const C* q = s.q.data() + head * rows * key_width_;
      float* scores = s.scores.data() + head * rows * kTile;
      for (int64_t i = 0; i < s.tiles[t].num_keys; i += kPanel)
        for_each_piece(rows, [&](int64_t first, auto count) {
          multiply_keys<count>(q + first * key_width_, panels.k[i / kPanel], first == 0, scores + first * kTile + i);
        });
    }
  }

  /// The scores of kRows rows with a panel of keys. With AVX2, calls of this and of `multiply_values` took 4 % of decode
  /// attention, so they are inlined.
  template <int kRows>
  [[gnu::always_inline]] void multiply_keys(
      const C* q, const typename Reader::Panel& panel, bool is_first, float* scores) const {
    Floats sums[kRows][2];
    // For `= {}` GCC sets the array in memory, by an instruction that took a tenth of this function's time.
    unrolled<kRows>([&](auto r) { sums[r][0] = sums[r][1] = Floats{}; });
    const auto multiply = [&](auto is_first) __attribute__((always_inline)) {
      multiply_panel<Dot<C>, kRows>(
          q, key_width_, panel.numbers, kPanel * kPerWord, key_width_ / kPerWord, sums, panel.prefetcher(is_first, 0));
    };
    is_first ? multiply(std::true_type()) : multiply(std::false_type());
    unrolled<kRows>([&](auto r) {
      store_floats(scores + r * kTile, sums[r][0]);
      store_floats(scores + r * kTile + kLanes, sums[r][1]);
    });
  }

  /// The weights of tile `t` of a split [rows, kTile] = 2^(scale * score - m). If the weights of a row are too large, m is
  /// raised to the largest score of this tile, l and acc are scaled to it, and the weights are computed again. One softmax
  /// has the rows of all heads, because a head alone has few of them.
  void compute_weights(Split& split, int64_t t) const {
    const Task& task = split.task;
    const Tile& tile = split.scratch.tiles[t];
    const int64_t rows = num_rows(task), panels = ceil_div(tile.num_keys, kPanel);
    float* scores = split.scratch.scores.data();
    if (in_.cap_scale > 0) cap_scores(scores, in_.cap_scale, rows, panels * kPanel, kTile);
    for (int64_t head = 0; head < task.kv_heads.size(); ++head)
      mask_scores(task, tile, panels * kPanel, scores + head * rows_per_head(task) * kTile);
    C* weights = split.scratch.weights.data() + t * rows * kTile;
    const bool begins = t == 0 && split.is_empty;
    // It takes as many rows at once as a vector has lanes, so their m and l are a vector each.
    for_each_piece<kTile / kPanel>(panels, [&](int64_t, auto panels) {
      for (int64_t first = 0; first < rows; first += kLanes)
        weigh_rows<panels>(
            split, first, std::min(kLanes, rows - first), begins, scores + first * kTile, weights + first * kTile);
    });
  }

  /// The same for `count` rows from `first` on, with keys in kPanels panels. `count` is at most kLanes. begins: no row has
  /// seen a key yet, so m must be set first.
  template <int kPanels>
  void weigh_rows(
      Split& split, int64_t first, int64_t count, bool begins, const float* scores, C* weights) const {
    const Partial into = split.result;
    const auto write = [&] { return write_weights<kPanels>(scores, count, scale_, into.m + first, weights); };
    Vec sums = begins ? Vec(0.f) : write();
    if (begins || !all_at_most(sums, Vec(kMaxTileSum))) {
      const Vec m = Vec::loadu(into.m + first), largest = largest_scores<kPanels>(scores, count) * Vec(scale_);
      raise(split, first, count, begins ? at::vec::maximum(m, largest) : Vec::blendv(m, largest, sums > Vec(kMaxTileSum)));
      sums = write();
    }
    (Vec::loadu(into.l + first) + sums).store(into.l + first);
  }

  /// Sets m of `count` rows from `first` on, and scales l and acc to it.
  void raise(Split& split, int64_t first, int64_t count, Vec m) const {
    const Partial into = split.result;
    const Vec rescale = accurate_exp2(Vec::loadu(into.m + first) - m);
    m.store(into.m + first);
    (Vec::loadu(into.l + first) * rescale).store(into.l + first);
    add_values(split);  // those of earlier tiles have weights for the old m
    if (split.is_empty) return;
    float factors[kLanes];
    rescale.store(factors);
    for (int64_t r = 0; r < count; ++r)
      if (factors[r] != 1.f) scale_row(into.acc + (first + r) * value_width_, value_width_, factors[r]);
  }

  /// Overwrites the scores of keys that a query does not see.
  void mask_scores(const Task& task, const Tile& tile, int64_t padded_keys, float* scores) const {
    for (int64_t i = task.queries.from; i < task.queries.end; ++i) {
      const int64_t position = plan_.queries[i].position - tile.first;
      const int64_t from = std::clamp<int64_t>(position + 1 - batch_.window, 0, padded_keys);
      const int64_t end = std::clamp<int64_t>(position + 1, 0, tile.num_keys);
      if (from == 0 && end == padded_keys) {
        scores += task.group.size() * kTile;
        continue;
      }
      for (int64_t g = 0; g < task.group.size(); ++g, scores += kTile) {
        std::fill(scores, scores + from, kMasked);
        std::fill(scores + end, scores + padded_keys, kMasked);
      }
    }
  }

  /// acc += weights v, for all weighed tiles of a split
  void add_values(Split& split) const {
    if (split.weighed.size() == 0) return;
    const Task& task = split.task;
    const int64_t rows = rows_per_head(task);
    for (int64_t head = 0; head < task.kv_heads.size(); ++head)
      for (int64_t d = 0; d < value_width_; d += kPanel)
        for_each_piece(rows, [&](int64_t first, auto count) { multiply_values<count>(split, head, first, d); });
    split.weighed.from = split.weighed.end;
    split.is_empty = false;
  }

  /// The same for kRows rows of a head, and a panel of components from component `d` on.
  template <int kRows>
  [[gnu::always_inline]] void multiply_values(const Split& split, int64_t head, int64_t first, int64_t d) const {
    const Scratch& s = split.scratch;
    const int64_t rows = num_rows(split.task), row = head * rows_per_head(split.task) + first;
    float* acc = split.result.acc + row * value_width_ + d;
    Floats sums[kRows][2];
    if (split.is_empty)
      unrolled<kRows>([&](auto r) { sums[r][0] = sums[r][1] = Floats{}; });
    else
      unrolled<kRows>([&](auto r) {
        sums[r][0] = load_floats(acc + r * value_width_);
        sums[r][1] = load_floats(acc + r * value_width_ + kLanes);
      });
    const auto multiply_tiles = [&](auto is_first) __attribute__((always_inline)) {
      for (int64_t t = split.weighed.from; t < split.weighed.end; ++t) {
        const C* weights = s.weights.data() + (t * rows + row) * kTile;
        const Panels& panels = s.panels[head * kTilesPerSplit + t];
        const int64_t keys = s.tiles[t].num_keys;
        for (int64_t i = 0; i < keys; i += kPanel) {
          const auto& panel = panels.v[i / kPanel];
          multiply_panel<Dot<C>, kRows>(
              weights + i,
              kTile,
              panel.numbers + d * kPanel,
              kPanel * kPerWord,
              ceil_div(std::min(kPanel, keys - i), kPerWord),
              sums,
              panel.prefetcher(is_first, d * kPanel));
        }
      }
    };
    first == 0 ? multiply_tiles(std::true_type()) : multiply_tiles(std::false_type());
    unrolled<kRows>([&](auto r) {
      store_floats(acc + r * value_width_, sums[r][0]);
      store_floats(acc + r * value_width_ + kLanes, sums[r][1]);
    });
  }

  /// out = acc / (l + the weight of the sink)
  void write_output(const Task& task, Partial result) const {
    int64_t row = 0;
    for (int64_t kv_head = task.kv_heads.from; kv_head < task.kv_heads.end; ++kv_head)
      for (int64_t i = task.queries.from; i < task.queries.end; ++i)
        for (int64_t g = task.group.from; g < task.group.end; ++g, ++row) {
          T* out = in_.out + (plan_.queries[i].token * batch_.heads + kv_head * group_ + g) * value_dim_;
          float total = result.l[row];
          // A weight that overflows is infinite, and then the output is zero.
          if (in_.sinks) total += std::exp2(in_.sinks[kv_head * group_ + g] * kLog2E - result.m[row]);
          const Vec inverse(1.f / total);
          for (int64_t d = 0; d < value_dim_; d += kPanel)
            store_pair(out + d, load_pair(result.acc + row * value_width_ + d) * inverse, value_dim_ - d);
        }
  }

  const AttentionInputs<T> in_;
  const AttentionBatch& batch_;
  const Reader reader_;
  const int64_t group_;  // query heads that use a KV head
  const int64_t head_dim_, value_dim_;
  const int64_t key_width_, value_width_;  // these, rounded up to whole panels
  const float scale_;                      // of scores, times log2(e)
  const AttentionPlan& plan_;
  const SavedSplits saved_;
};

}  // namespace tercet
