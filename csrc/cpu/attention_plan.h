// Which queries attend to which keys together, and in what order.
//
// Keys come in tiles of kTile positions, tiles in splits of kSplit positions, both counted from position 0 of the
// request. What a query's result is made of (attention.h) is the same in every plan; a plan only decides who shares
// the work of packing a tile and what can run side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "dot.h"

namespace tercet {

constexpr int64_t kTile = 64;
constexpr int64_t kSplit = 256;
static_assert(kSplit % kTile == 0 && kTile % kPanel == 0);
/// Query rows (tokens times the query heads of a KV head) that share one pass over keys and values.
constexpr int64_t kQueryRows = 96;
/// Bytes of keys and values that one tile of a work has at most: the next tile is fetched into the second level of
/// cache beside it.
constexpr int64_t kTileBytes = 128 * 1024;

/// Requests with new tokens.
struct AttentionBatch {
  const int32_t* slot_table;  // [rows, context]: slot of each position of each row
  int64_t context;
  const int64_t* rows;       // [B] row of each request
  const int64_t* seq_lens;   // [B] its tokens, the new ones included
  const int64_t* starts;     // [B + 1] its first new token; nullptr: one new token each
  int64_t num_requests, heads, kv_heads, head_dim;
  int64_t window;            // positions that a token sees, itself included

  bool operator==(const AttentionBatch&) const = default;
  int64_t start(int64_t request) const { return starts ? starts[request] : request; }
  int64_t group() const { return heads / kv_heads; }
  const int32_t* slots(int64_t request) const { return slot_table + rows[request] * context; }
};

/// From `from` to before `end`.
struct Range {
  int64_t from, end;

  int64_t size() const { return end - from; }
};

/// A new token. Where several works see to its keys, their results wait, split by split, to be merged.
struct Query {
  int64_t request, token, position;
  Range splits;
  int64_t kept = -1;   // number of the first split's result; -1: one work does it all
  int64_t shared = 0;  // keys before this position are seen to by works of several requests
};

/// Queries that attend to the same keys, from a request whose slots these are.
struct Work {
  int64_t request;
  Range queries, keys, kv_heads;
};

class AttentionPlan {
 public:
  AttentionPlan(const AttentionBatch& batch, int64_t bytes_per_number, int64_t num_threads)
      : batch_(batch), most_tokens_(std::max<int64_t>(1, kQueryRows / batch.group())) {
    for (int64_t request = 0; request < batch.num_requests; ++request)
      if (batch.start(request + 1) - batch.start(request) > 1) add_prompt(request);
    const int64_t first_single = queries.size();
    for (int64_t request = 0; request < batch.num_requests; ++request)
      if (batch.start(request + 1) - batch.start(request) == 1) add_query(request, 0);
    const Range singles{first_single, static_cast<int64_t>(queries.size())};
    share(singles);
    const int64_t heads_of_tile = kTileBytes / (2 * kTile * batch.head_dim * bytes_per_number);
    add_singles(singles, std::clamp<int64_t>(heads_of_tile, 1, batch.kv_heads), num_threads);
  }

  std::vector<Query> queries;
  std::vector<Work> shared;  // to be done before the others
  std::vector<Work> own;
  std::vector<int64_t> in_parts;  // queries whose results are merged when all works are done
  int64_t num_kept = 0;

 private:
  void add_query(int64_t request, int64_t index) {
    const int64_t token = batch_.start(request) + index;
    const int64_t position = batch_.seq_lens[request] - (batch_.start(request + 1) - token);
    const int64_t from = std::max<int64_t>(0, position + 1 - batch_.window);
    queries.push_back({request, token, position, {from / kSplit, position / kSplit + 1}});
  }

  /// Keys that a query sees and no work of several requests has seen to, from the start of a tile.
  Range own_keys(const Query& query) const {
    const int64_t from = std::max<int64_t>(0, query.position + 1 - batch_.window);
    return {std::max(query.shared, from / kTile * kTile), query.position + 1};
  }

  void add_prompt(int64_t request) {
    const int64_t tokens = batch_.start(request + 1) - batch_.start(request), first = queries.size();
    for (int64_t i = 0; i < tokens; ++i) add_query(request, i);
    const int64_t pieces = ceil_div(tokens, most_tokens_);
    for (int64_t kv_head = 0; kv_head < batch_.kv_heads; ++kv_head)
      // The last tokens see most: they go first.
      for (int64_t piece = pieces - 1; piece >= 0; --piece) {
        const Range part{first + tokens * piece / pieces, first + tokens * (piece + 1) / pieces};
        const Range keys{own_keys(queries[part.from]).from, queries[part.end - 1].position + 1};
        own.push_back({request, part, keys, {kv_head, kv_head + 1}});
      }
  }

  /// Finds single queries whose keys are in the same slots, tile by tile from the start.
  void share(Range singles) {
    std::vector<int64_t> left;
    for (int64_t i = singles.from; i < singles.end; ++i)
      if (queries[i].position < batch_.window) left.push_back(i);
    for (int64_t from = 0; left.size() > 1; from += kSplit) {
      const auto slots = [&](int64_t i) { return batch_.slots(queries[i].request) + from; };
      std::erase_if(left, [&](int64_t i) { return queries[i].position + 1 < from + kTile; });
      std::stable_sort(left.begin(), left.end(), [&](int64_t a, int64_t b) { return *slots(a) < *slots(b); });
      std::vector<int64_t> next;
      for (size_t first = 0, end; first < left.size(); first = end) {
        for (end = first + 1; end < left.size() && *slots(left[end]) == *slots(left[first]);) ++end;
        const int64_t tiles = common_tiles(left, first, end, from);
        if (end - first == 1 || tiles == 0) continue;
        add_shared({left.begin() + first, left.begin() + end}, {from, from + tiles * kTile});
        if (tiles == kSplit / kTile) next.insert(next.end(), left.begin() + first, left.begin() + end);
      }
      left = std::move(next);
    }
  }

  /// Whole tiles of the split that all of these queries have in common.
  int64_t common_tiles(const std::vector<int64_t>& of, size_t first, size_t end, int64_t from) const {
    const int32_t* slots = batch_.slots(queries[of[first]].request) + from;
    int64_t tiles = std::min(kSplit, queries[of[first]].position + 1 - from) / kTile;
    for (size_t i = first + 1; i < end; ++i) {
      const Query& other = queries[of[i]];
      tiles = std::min(tiles, (other.position + 1 - from) / kTile);
      const int32_t* others = batch_.slots(other.request) + from;
      int64_t equal = 0;
      while (equal < tiles && std::memcmp(slots + equal * kTile, others + equal * kTile, kTile * sizeof(int32_t)) == 0)
        ++equal;
      tiles = equal;
    }
    return tiles;
  }

  void add_shared(const std::vector<int64_t>& members, Range keys) {
    // Works name a range of queries: these are listed once more, side by side.
    const int64_t first = queries.size(), num = members.size(), pieces = ceil_div(num, most_tokens_);
    for (int64_t i : members) {
      keep(queries[i]);
      queries[i].shared = keys.end;
      queries.push_back(queries[i]);
    }
    for (int64_t kv_head = 0; kv_head < batch_.kv_heads; ++kv_head)
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const Range part{first + num * piece / pieces, first + num * (piece + 1) / pieces};
        shared.push_back({queries[first].request, part, keys, {kv_head, kv_head + 1}});
      }
  }

  void keep(Query& query) {
    if (query.kept >= 0) return;
    query.kept = num_kept;
    num_kept += query.splits.size();
  }

  void add_singles(Range singles, int64_t heads_of_tile, int64_t num_threads) {
    int64_t splits = 0;
    for (int64_t i = singles.from; i < singles.end; ++i)
      splits += queries[i].splits.end - own_keys(queries[i]).from / kSplit;
    // Few keys for many threads: every head and split for itself. Many: as long a run of keys as leaves enough works.
    const int64_t wanted = 8 * num_threads, longest = std::max<int64_t>(1, splits / wanted);
    const int64_t heads = splits < wanted ? 1 : heads_of_tile;
    for (int64_t i = singles.from; i < singles.end; ++i) {
      const Range keys = own_keys(queries[i]);
      const int64_t first = keys.from / kSplit, num = ceil_div(keys.end, kSplit) - first;
      const int64_t parts = ceil_div(num, longest);
      if (parts > 1) keep(queries[i]);
      if (queries[i].kept >= 0) in_parts.push_back(i);
      for (int64_t part = 0; part < parts; ++part) {
        const Range some{
            std::max(keys.from, (first + num * part / parts) * kSplit),
            std::min(keys.end, (first + num * (part + 1) / parts) * kSplit)};
        for (int64_t head = 0; head < batch_.kv_heads; head += heads)
          own.push_back({queries[i].request, {i, i + 1}, some, {head, std::min(head + heads, batch_.kv_heads)}});
      }
    }
  }

  const AttentionBatch& batch_;
  const int64_t most_tokens_;
};

/// The plan of a batch, made when it is first asked for.
class StepPlan {
 public:
  StepPlan(const AttentionBatch& batch, int64_t bytes_per_number) : batch_(batch), bytes_per_number_(bytes_per_number) {}
  StepPlan(const StepPlan&) = delete;  // the plan refers to the batch

  bool is_for(const AttentionBatch& batch, int64_t bytes_per_number) const {
    return batch_ == batch && bytes_per_number_ == bytes_per_number;
  }

  const AttentionPlan& get(int64_t num_requests, int64_t num_threads) {
    if (!plan_) {
      batch_.num_requests = num_requests;
      plan_.emplace(batch_, bytes_per_number_, num_threads);
    }
    return *plan_;
  }

  /// The numbers that the batch points to have changed.
  void forget() { plan_.reset(); }

 private:
  AttentionBatch batch_;
  int64_t bytes_per_number_;
  std::optional<AttentionPlan> plan_;
};

}  // namespace tercet
