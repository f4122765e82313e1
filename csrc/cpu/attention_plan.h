// Plans a call of attention: which queries share a pass over keys and values, and which work can run in parallel.
//
// Keys come in tiles of kTile positions, tiles in splits of kSplit positions. Both are counted from position 0 of the
// request. The arithmetic behind a query's result (attention.h) is the same in every plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "dot.h"
#include "op_checks.h"

namespace tercet {

constexpr int64_t kTile = 64;
constexpr int64_t kSplit = 256;
constexpr int64_t kTilesPerSplit = kSplit / kTile;
static_assert(kSplit % kTile == 0 && kTile % kPanel == 0);
/// Most query rows that share one pass over keys and values. A token has as many rows for a KV head as query heads use it.
constexpr int64_t kQueryRows = 96;
/// Most numbers of these rows together, which stay in the L2 cache. A row has a query, the result of the split that is
/// computed, and the merged result of the splits before it.
constexpr int64_t kRowNumbers = 80 * 1024;
/// Fewest rows of a task that has only some query heads of a group.
constexpr int64_t kFewestRows = 16;
/// Bytes of keys and values of a tile, for all KV heads of a task. The next tile is prefetched into L2 beside it.
constexpr int64_t kTileBytes = 128 * 1024;

/// Requests with new tokens.
struct AttentionBatch {
  const int32_t* slot_table;  // [num_rows, context]: the slot of each position of each row
  int64_t num_rows, context, num_slots;
  const int64_t* rows;       // [num_requests] the row of each request
  const int64_t* seq_lens;   // [num_requests] its number of tokens, the new ones included
  const int64_t* starts;     // [num_requests + 1] its first new token; nullptr: each request has one new token
  int64_t max_tokens;        // new tokens that there is room for
  int64_t num_requests, heads, kv_heads;
  int64_t head_dim, value_dim;  // numbers of a key and of a value
  int64_t window;            // positions that a token sees, its own included

  bool operator==(const AttentionBatch&) const = default;
  int64_t start(int64_t request) const { return starts ? starts[request] : request; }
  int64_t num_tokens(int64_t request) const { return start(request + 1) - start(request); }
  int64_t group() const { return heads / kv_heads; }
  const int32_t* slots(int64_t request) const { return slot_table + rows[request] * context; }
  /// The first position that a token at `position` sees.
  int64_t first_seen(int64_t position) const { return std::max<int64_t>(0, position + 1 - window); }

  /// Checks the numbers that it points to.
  void check_numbers() const {
    check_indices(rows, num_requests, "rows", num_rows);
    TORCH_CHECK(
        num_requests == 0 || (0 <= start(0) && start(num_requests) <= max_tokens),
        "starts must be in [0, ", max_tokens, "]");
    for (int64_t request = 0; request < num_requests; ++request) {
      const int64_t num_new = num_tokens(request), len = seq_lens[request];
      TORCH_CHECK(num_new >= 0, "starts must not fall");
      TORCH_CHECK(num_new <= len && len <= context, "seq_lens must be in [", num_new, ", ", context, "], got ", len);
      if (num_new == 0) continue;
      const int64_t first = first_seen(len - num_new) / kTile * kTile;  // whole tiles are read
      check_indices(slots(request) + first, len - first, "slots", num_slots);
    }
  }
};

/// The integers from `from` to `end`, without `end`.
struct Range {
  int64_t from, end;

  int64_t size() const { return end - from; }
};

/// A new token.
struct Query {
  int64_t request, token, position;
  Range splits;        // splits of the keys that it sees
  int64_t saved = -1;  // number of its first saved split; -1: no split is saved
  int64_t shared = 0;  // tasks that several requests share attend to the keys before this position
};

/// Queries that attend to the same keys. The slots of the keys are those of `request`.
struct Task {
  int64_t request;
  Range queries, keys, kv_heads;
  Range group;  // of the query heads that use a KV head, those of this task
  /// Whether the result of each split is saved for the tasks that finish the queries. Otherwise this task finishes them.
  bool saves = false;
};

class AttentionPlan {
 public:
  AttentionPlan(const AttentionBatch& batch, int64_t bytes_per_number, int64_t num_threads)
      : batch_(batch),
        group_(batch.group()),
        max_rows_(std::clamp(kRowNumbers / (batch.head_dim + 2 * batch.value_dim), kFewestRows, kQueryRows)),
        max_tokens_(std::max<int64_t>(1, max_rows_ / group_)) {
    for (int64_t request = 0; request < batch.num_requests; ++request)
      if (batch.num_tokens(request) > 1) add_prompt(request);
    const int64_t first_decode = queries.size();
    for (int64_t request = 0; request < batch.num_requests; ++request)
      if (batch.num_tokens(request) == 1) add_query(request, 0);
    const Range decodes{first_decode, static_cast<int64_t>(queries.size())};
    share_prefixes(decodes);
    const int64_t heads_per_tile = kTileBytes / (kTile * (batch.head_dim + batch.value_dim) * bytes_per_number);
    add_decodes(decodes, std::clamp<int64_t>(heads_per_tile, 1, batch.kv_heads), num_threads);
  }

  std::vector<Query> queries;
  std::vector<Task> shared_tasks;  // to be finished before own_tasks begin
  std::vector<Task> own_tasks;
  std::vector<Task> merges;        // of one query, whose splits are all saved; to be merged when all tasks are finished
  int64_t num_saved = 0;

 private:
  void add_query(int64_t request, int64_t index) {
    const int64_t token = batch_.start(request) + index;
    const int64_t position = batch_.seq_lens[request] - (batch_.start(request + 1) - token);
    queries.push_back({request, token, position, {batch_.first_seen(position) / kSplit, position / kSplit + 1}});
  }

  /// Keys that the query sees and that no shared task attends to, from the start of a tile.
  Range own_keys(const Query& query) const {
    return {std::max(query.shared, batch_.first_seen(query.position) / kTile * kTile), query.position + 1};
  }

  void add_prompt(int64_t request) {
    const int64_t tokens = batch_.num_tokens(request), first = queries.size();
    for (int64_t i = 0; i < tokens; ++i) add_query(request, i);
    const int64_t pieces = ceil_div(tokens, max_tokens_);
    for (int64_t kv_head = 0; kv_head < batch_.kv_heads; ++kv_head)
      // The last tokens see the most keys: the longest tasks start first.
      for (int64_t piece = pieces - 1; piece >= 0; --piece) {
        const Range part{first + tokens * piece / pieces, first + tokens * (piece + 1) / pieces};
        const Range keys{own_keys(queries[part.from]).from, queries[part.end - 1].position + 1};
        for_each_part(fewest_parts(), [&](Range group) {
          own_tasks.push_back({request, part, keys, {kv_head, kv_head + 1}, group});
        });
      }
  }

  /// The fewest parts that a group must be divided into, so that a task of one token has at most max_rows_ rows.
  int64_t fewest_parts() const { return ceil_div(group_, max_rows_); }

  /// Divides the query heads of a group into parts of nearly equal size. Calls f(part) for each.
  template <typename F>
  void for_each_part(int64_t parts, const F& f) const {
    for (int64_t part = 0; part < parts; ++part) f(Range{group_ * part / parts, group_ * (part + 1) / parts});
  }

  /// Finds decoding queries whose first keys are in the same slots. Compares one split after the other.
  void share_prefixes(Range decodes) {
    std::vector<int64_t> left;
    for (int64_t i = decodes.from; i < decodes.end; ++i)
      if (queries[i].position < batch_.window) left.push_back(i);
    for (int64_t from = 0; left.size() > 1; from += kSplit) {
      const auto slots = [&](int64_t i) { return batch_.slots(queries[i].request) + from; };
      std::erase_if(left, [&](int64_t i) { return queries[i].position + 1 < from + kTile; });
      std::stable_sort(left.begin(), left.end(), [&](int64_t a, int64_t b) { return *slots(a) < *slots(b); });
      std::vector<int64_t> next;
      for (size_t first = 0, end; first < left.size(); first = end) {
        for (end = first + 1; end < left.size() && *slots(left[end]) == *slots(left[first]);) ++end;
        const int64_t tiles = num_common_tiles(left, first, end, from);
        if (end - first == 1 || tiles == 0) continue;
        add_shared({left.begin() + first, left.begin() + end}, {from, from + tiles * kTile});
        if (tiles == kTilesPerSplit) next.insert(next.end(), left.begin() + first, left.begin() + end);
      }
      left = std::move(next);
    }
  }

  /// The number of whole tiles of the split at `from` that queries members[first, end) have in common.
  int64_t num_common_tiles(const std::vector<int64_t>& members, size_t first, size_t end, int64_t from) const {
    const int32_t* slots = batch_.slots(queries[members[first]].request) + from;
    int64_t tiles = std::min(kSplit, queries[members[first]].position + 1 - from) / kTile;
    for (size_t i = first + 1; i < end; ++i) {
      const Query& other = queries[members[i]];
      tiles = std::min(tiles, (other.position + 1 - from) / kTile);
      const int32_t* other_slots = batch_.slots(other.request) + from;
      int64_t equal = 0;
      while (equal < tiles &&
             std::memcmp(slots + equal * kTile, other_slots + equal * kTile, kTile * sizeof(int32_t)) == 0)
        ++equal;
      tiles = equal;
    }
    return tiles;
  }

  void add_shared(const std::vector<int64_t>& members, Range keys) {
    // A task has a range of queries, so the members are listed a second time, side by side.
    const int64_t first = queries.size(), num = members.size(), pieces = ceil_div(num, max_tokens_);
    for (int64_t i : members) {
      save_splits(queries[i]);
      queries[i].shared = keys.end;
      queries.push_back(queries[i]);
    }
    for (int64_t kv_head = 0; kv_head < batch_.kv_heads; ++kv_head)
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const Range part{first + num * piece / pieces, first + num * (piece + 1) / pieces};
        for_each_part(fewest_parts(), [&](Range group) {
          shared_tasks.push_back({queries[first].request, part, keys, {kv_head, kv_head + 1}, group, true});
        });
      }
  }

  /// Reserves room for the results of the query's splits.
  void save_splits(Query& query) {
    if (query.saved >= 0) return;
    query.saved = num_saved;
    num_saved += query.splits.size();
  }

  void add_decodes(Range decodes, int64_t heads_per_tile, int64_t num_threads) {
    int64_t splits = 0;
    for (int64_t i = decodes.from; i < decodes.end; ++i)
      splits += queries[i].splits.end - own_keys(queries[i]).from / kSplit;
    // With few splits, each head of each split is a task of its own, or several tasks, if its group is large. With many, a
    // task has as many splits and heads as leave enough tasks for all threads.
    const int64_t wanted = 8 * num_threads, max_splits = std::max<int64_t>(1, splits / wanted);
    const int64_t heads = splits < wanted ? 1 : heads_per_tile;
    const int64_t wanted_parts = ceil_div(wanted, std::max<int64_t>(1, splits * batch_.kv_heads));
    const int64_t group_parts = std::max(fewest_parts(), std::min(wanted_parts, group_ / kFewestRows));
    for (int64_t i = decodes.from; i < decodes.end; ++i) {
      const Range keys = own_keys(queries[i]);
      const int64_t first = keys.from / kSplit, num = ceil_div(keys.end, kSplit) - first;
      const int64_t parts = keys.size() > 0 ? ceil_div(num, max_splits) : 0;
      if (parts != 1) {
        save_splits(queries[i]);
        for_each_part(group_parts, [&](Range group) {
          merges.push_back({queries[i].request, {i, i + 1}, {0, 0}, {0, batch_.kv_heads}, group});
        });
      }
      for (int64_t part = 0; part < parts; ++part) {
        const Range part_keys{
            std::max(keys.from, (first + num * part / parts) * kSplit),
            std::min(keys.end, (first + num * (part + 1) / parts) * kSplit)};
        for (int64_t head = 0; head < batch_.kv_heads; head += heads)
          for_each_part(group_parts, [&](Range group) {
            const Range kv_heads{head, std::min(head + heads, batch_.kv_heads)};
            own_tasks.push_back({queries[i].request, {i, i + 1}, part_keys, kv_heads, group, parts > 1});
          });
      }
    }
  }

  const AttentionBatch& batch_;
  const int64_t group_;
  const int64_t max_rows_, max_tokens_;  // of a task
};

/// The plan of a batch. It is made when it is first asked for, and again after `forget`.
class StepPlan {
 public:
  StepPlan(const AttentionBatch& batch, int64_t bytes_per_number)
      : batch_(batch), bytes_per_number_(bytes_per_number) {}
  StepPlan(const StepPlan&) = delete;  // the plan refers to the batch

  bool is_for(const AttentionBatch& batch, int64_t bytes_per_number) const {
    return batch_ == batch && bytes_per_number_ == bytes_per_number;
  }

  const AttentionPlan& get(int64_t num_requests, int64_t num_threads) {
    if (!plan_) {
      batch_.num_requests = num_requests;
      batch_.check_numbers();  // once for all layers of a step
      plan_.emplace(batch_, bytes_per_number_, num_threads);
    }
    return *plan_;
  }

  /// To be called when the numbers have changed that the batch points to.
  void forget() { plan_.reset(); }

 private:
  AttentionBatch batch_;
  int64_t bytes_per_number_;
  std::optional<AttentionPlan> plan_;
};

}  // namespace tercet
