// The most probable token of each row: the output head and `argmax` in one pass. No logit is written to memory.
#pragma once

#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "linear.h"
#include "soft_cap.h"

namespace tercet {

/// The first largest of the logits that it was given.
struct Largest {
  /// NaN if any logit is.
  float logit = -std::numeric_limits<float>::infinity();
  /// -1: no logit is larger than -inf.
  int64_t column = -1;

  /// Columns may come in any order, so the result does not depend on which thread had which.
  void add(float other, int64_t other_column) {
    if (other > logit || (other == logit && other_column < column) || std::isnan(other)) {
      logit = other;
      column = other_column;
    }
  }
  int64_t token() const { return std::isnan(logit) ? -1 : column; }
};

/// A `Store` of `multiply` that keeps only the largest logit of each row. Its parts have some columns each, and are merged
/// at the end. An item of a job takes a part that no other item has, so there are as many parts as threads.
class KeepLargest {
 public:
  /// cap: that of the logits, if they have one
  KeepLargest(int64_t rows, int64_t n, std::optional<SoftCap> cap) : rows_(rows), n_(n), cap_(cap) {}

  class Item {
   public:
    explicit Item(const KeepLargest& all) : all_(all), largest_(all.take()) {}
    ~Item() { all_.give_back(largest_); }
    Item(const Item&) = delete;

    void operator()(int64_t row, int64_t panel, Vec left, Vec right) const {
      if (all_.cap_) return add_capped(row, panel, left, right);
      // After the first panels, few have a new largest logit.
      if (!all_less(left, right, largest_[row].logit)) add_panel(row, panel, left, right);
    }
    void prefetch(int64_t, int64_t) const {}

   private:
    [[gnu::noinline]] void add_capped(int64_t row, int64_t panel, Vec left, Vec right) const {
      const SoftCap cap = *all_.cap_;
      left = cap(left);
      right = cap(right);
      if (!all_less(left, right, largest_[row].logit)) add_panel(row, panel, left, right);
    }

    [[gnu::noinline]] void add_panel(int64_t row, int64_t panel, Vec left, Vec right) const {
      float logits[kPanel];
      left.store(logits);
      right.store(logits + kLanes);
      const int64_t first = panel * kPanel, count = std::min(kPanel, all_.n_ - first);
      for (int64_t i = 0; i < count; ++i) largest_[row].add(logits[i], first + i);
    }

    const KeepLargest& all_;
    Largest* largest_;  // [rows]
  };

  Item for_item() const { return Item(*this); }

  /// After the last item.
  int64_t token(int64_t row) const {
    Largest largest;
    for (const auto& part : parts_) largest.add(part[row].logit, part[row].column);
    return largest.token();
  }

 private:
  /// Keeps two parts out of one cache line.
  static constexpr int64_t kPadding = 64 / sizeof(Largest);

  Largest* take() const {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return parts_.emplace_back(rows_ + kPadding).data();
    Largest* part = free_.back();
    free_.pop_back();
    return part;
  }
  void give_back(Largest* part) const {
    const std::lock_guard lock(mutex_);
    free_.push_back(part);
  }

  int64_t rows_, n_;
  std::optional<SoftCap> cap_;
  mutable std::mutex mutex_;
  mutable std::vector<std::vector<Largest>> parts_;
  mutable std::vector<Largest*> free_;
};

/// x [rows, k] -> what `argmax` gives for the logits [rows, n] of `linear`, after `cap` if there is one
template <typename X, typename Weight>
void linear_argmax(
    const X& x, int64_t rows, const Weight& weight, const NextWeight& next, int64_t n, std::optional<SoftCap> cap,
    int64_t* tokens) {
  const KeepLargest largest(rows, n, cap);
  multiply(x, rows, weight, ceil_div(n, kPanel), next, largest);
  for (int64_t row = 0; row < rows; ++row) tokens[row] = largest.token(row);
}

}  // namespace tercet
