// Results of splits that tasks save, because other tasks merge them.
#pragma once

#include <algorithm>
#include <memory>

#include "softmax_partial.h"

namespace tercet {

class SavedSplits {
 public:
  /// num: splits of queries. heads: query heads. group: those that use a KV head. width: of values.
  SavedSplits(int64_t num, int64_t heads, int64_t group, int64_t width)
      : group_(group),
        width_(width),
        size_(heads * (width + 2)),
        numbers_(std::make_unique_for_overwrite<float[]>(num * size_)) {}

  /// Saves the result of a query's split for one KV head and some of its query heads: the rows of `from` from `row` on.
  void store(Partial from, int64_t row, const Query& query, int64_t split, int64_t kv_head, Range group) const {
    copy(from, row, at(query, split, kv_head), group.from, group.size());
  }

  /// Copies the result of a query's split for the heads of a task.
  void load(const Query& query, int64_t split, const Task& task, Partial to) const {
    const int64_t rows = task.group.size();
    for (int64_t head = 0; head < task.kv_heads.size(); ++head)
      copy(at(query, split, task.kv_heads.from + head), task.group.from, to, head * rows, rows);
  }

  /// total = the results of a query's splits for the heads of a task, merged in order. `one`: memory for one of them.
  void merge(const Query& query, Range splits, const Task& task, Partial total, Partial one) const {
    for (int64_t split = splits.from; split < splits.end; ++split) {
      const bool first = split == splits.from;
      load(query, split, task, first ? total : one);
      if (!first) tercet::merge(total, one, task.kv_heads.size() * task.group.size(), width_);
    }
  }

 private:
  Partial at(const Query& query, int64_t split, int64_t kv_head) const {
    const int64_t number = query.saved + split - query.splits.from;
    float* start = numbers_.get() + number * size_ + kv_head * group_ * (width_ + 2);
    return {start, start + group_, start + 2 * group_};
  }

  /// Copies the rows of one query and KV head.
  void copy(Partial from, int64_t from_row, Partial to, int64_t to_row, int64_t rows) const {
    std::copy_n(from.m + from_row, rows, to.m + to_row);
    std::copy_n(from.l + from_row, rows, to.l + to_row);
    std::copy_n(from.acc + from_row * width_, rows * width_, to.acc + to_row * width_);
  }

  const int64_t group_, width_;
  const int64_t size_;  // numbers of a split
  const std::unique_ptr<float[]> numbers_;
};

}  // namespace tercet
