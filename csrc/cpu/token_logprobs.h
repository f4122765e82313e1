// Log probabilities: the log-softmax of a row of logits, at given tokens and at the most probable ones.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace tercet {

/// The log-softmax of one row. Every sum has an order that depends on the vocabulary only.
class RowLogprobs {
 public:
  RowLogprobs(const float* logits, int64_t vocab) : logits_(logits), vocab_(vocab) {
    find_peaks();
    log_sum_ = peak_ + std::log(sum_of_exp());
  }

  /// NaN if any logit of the row is NaN or +inf, or if all are -inf.
  float of(int64_t token) const { return static_cast<float>(logits_[token] - log_sum_); }

  /// Finds the k <= vocab most probable tokens, the most probable first. Equal ones are in order of id.
  void find_top(int64_t k, float* values, int32_t* ids) const {
    if (std::isnan(log_sum_)) {  // NaN has no rank
      std::fill_n(values, k, std::numeric_limits<float>::quiet_NaN());
      std::fill_n(ids, k, 0);
      return;
    }
    auto& best = scratch().best;
    best.clear();
    if (k == 0) return;
    for (int64_t start = 0; start < vocab_; start += kChunk) {
      const bool is_full = static_cast<int64_t>(best.size()) == k;
      // A later token of equal probability has a larger id, so it is not better.
      if (is_full && !(scratch().peaks[start / kChunk] > best.front().logit)) continue;
      const int64_t end = std::min(start + kChunk, vocab_);
      for (int64_t i = start; i < end; ++i) offer({logits_[i], static_cast<int32_t>(i)}, k);
    }
    std::sort_heap(best.begin(), best.end(), is_better);
    for (int64_t rank = 0; rank < k; ++rank) {
      values[rank] = of(best[rank].id);
      ids[rank] = best[rank].id;
    }
  }

 private:
  /// Tokens of a chunk. A chunk without a token that is probable enough is skipped.
  static constexpr int64_t kChunk = 256;

  struct Token {
    float logit;
    int32_t id;
  };

  /// The memory of one thread.
  struct Scratch {
    std::vector<float> peaks;  // the largest logit of each chunk
    std::vector<Token> best;   // a heap; its front is the worst
  };

  static Scratch& scratch() {
    static thread_local Scratch scratch;
    return scratch;
  }

  static bool is_better(Token a, Token b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

  static void offer(Token token, int64_t k) {
    auto& best = scratch().best;
    if (static_cast<int64_t>(best.size()) == k) {
      if (!is_better(token, best.front())) return;
      std::pop_heap(best.begin(), best.end(), is_better);
      best.pop_back();
    }
    best.push_back(token);
    std::push_heap(best.begin(), best.end(), is_better);
  }

  void find_peaks() {
    auto& peaks = scratch().peaks;
    peaks.clear();
    peak_ = -std::numeric_limits<float>::infinity();
    for (int64_t start = 0; start < vocab_; start += kChunk) {
      const int64_t end = std::min(start + kChunk, vocab_);
      Vec largest(-std::numeric_limits<float>::infinity());
      int64_t i = start;
      for (; i + kLanes <= end; i += kLanes) largest = at::vec::maximum(largest, Vec::loadu(logits_ + i));
      float peak = max_of(largest);  // NaN if any logit is
      for (; i < end; ++i) peak = logits_[i] > peak || std::isnan(logits_[i]) ? logits_[i] : peak;
      peaks.push_back(peak);
      if (peak > peak_ || std::isnan(peak)) peak_ = peak;
    }
  }

  /// The sum of exp(logit - peak). A chunk is summed in floats, and the chunks in doubles.
  double sum_of_exp() const {
    double total = 0;
    for (int64_t start = 0; start < vocab_; start += kChunk) {
      const int64_t end = std::min(start + kChunk, vocab_);
      Vec sums(0.f);
      int64_t i = start;
      for (; i + kLanes <= end; i += kLanes) sums = sums + accurate_exp(Vec::loadu(logits_ + i) - Vec(peak_));
      total += sum_of(sums);
      for (; i < end; ++i) total += std::exp(logits_[i] - peak_);
    }
    return total;
  }

  const float* logits_;
  int64_t vocab_;
  float peak_ = 0;
  double log_sum_ = 0;
};

}  // namespace tercet
