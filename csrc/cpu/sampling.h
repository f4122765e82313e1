// Draws tokens under temperature, top-k, top-p and min-p. It does what model_executor/sampling/joint_sampling.py says,
// without sorting the vocabulary.
//
// A token's gap is the log-probability of the best token minus its own. A token's weight is its probability in units of
// 2**-34 of the best token's, as an integer, so sums are exact in any order. Tokens are counted and weighed in buckets
// of nearly equal gaps. Only two buckets are sorted: where the kept tokens end, and where the draw falls.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "dot.h"
#include "thread_pool.h"

namespace tercet {

/// The sampling parameters of a row. A comment names the value that switches a selection off.
struct Selection {
  float temperature;  // > 0 and finite
  int64_t top_k;      // >= vocab
  double top_p;       // 1
  float max_gap;      // infinite
};

/// The distribution of one row's next token, for one draw.
class Distribution {
 public:
  Distribution(const float* logits, int64_t vocab, Selection selection)
      : logits_(logits), vocab_(vocab), selection_(selection), chunks_(ceil_div(vocab, kChunk)), scratch_(scratch()) {
    std::fill_n(tail_, kChunk, -kInfinity);
    std::copy(logits + (chunks_ - 1) * kChunk, logits + vocab, tail_);
  }

  /// Draws a token; draw is in [0, 1). Returns -1 if a logit is NaN or no token is possible.
  int64_t sample(double draw) {
    const float peak = find_peaks();
    if (!(peak > -kInfinity)) return -1;
    best_ = std::min(peak, std::numeric_limits<float>::max());
    auto& nearest = scratch_.nearest;
    for (int64_t c = 0; c < chunks_; c += kLanes) gaps_of(Vec::loadu(&nearest[c])).store(&nearest[c]);
    return selection_.top_k >= vocab_ && selection_.top_p >= 1 ? sample_open(draw) : sample_ranked(draw);
  }

 private:
  /// Tokens of a chunk. A chunk whose tokens are all beyond the limit is skipped.
  static constexpr int64_t kChunk = 64;
  static constexpr int32_t kBuckets = 2048;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  /// exp(-24.3) * 2**34 < 0.5: the weight of tokens with a larger gap is rounded to zero.
  static constexpr float kWeightless = 24.3f;

  struct Bucket {
    int64_t weight = 0, count = 0;
  };

  struct Token {
    float gap;
    int32_t id;
    bool operator<(const Token& other) const { return gap != other.gap ? gap < other.gap : id < other.id; }
  };

  /// The memory of one thread.
  struct Scratch {
    std::vector<float> nearest;    // for each chunk, the smallest gap; before gaps are known, the largest logit
    std::vector<float> sorted;
    std::vector<int64_t> weights;  // for each chunk
    std::vector<Bucket> buckets;   // the last one is for tokens beyond the limit
    std::vector<Token> tokens;     // those of one bucket, sorted
  };

  static Scratch& scratch() {
    static thread_local Scratch scratch;
    return scratch;
  }

  /// Stores the largest logit of each chunk in scratch_.nearest. Returns the largest of all; NaN if any logit is NaN.
  float find_peaks() {
    scratch_.nearest.assign(round_up(chunks_, kLanes), -kInfinity);
    Vec best(-kInfinity);
    for (int64_t c = 0; c < chunks_; ++c) {
      Vec largest(-kInfinity);
      for (int64_t i = 0; i < kChunk; i += kLanes) largest = at::vec::maximum(largest, Vec::loadu(chunk(c) + i));
      scratch_.nearest[c] = max_of(largest);
      best = at::vec::maximum(best, largest);
    }
    return max_of(best);
  }

  /// The kChunk logits of a chunk, with -inf beyond the vocabulary.
  const float* chunk(int64_t c) const { return c + 1 < chunks_ ? logits_ + c * kChunk : tail_; }

  Vec gaps_of(Vec logits) const {
    return at::vec::maximum(Vec(best_) - logits, Vec(0.f)) / Vec(selection_.temperature);
  }

  static Vec weights_of(Vec gaps) { return (gaps.neg().exp() * Vec(0x1p34f)).round(); }

  static int64_t weight_of(float gap) {
    float weights[kLanes];
    weights_of(Vec(gap)).store(weights);
    return static_cast<int64_t>(weights[0]);
  }

  void load_gaps(int64_t c, float (&gaps)[kChunk]) const {
    for (int64_t i = 0; i < kChunk; i += kLanes) gaps_of(Vec::loadu(chunk(c) + i)).store(gaps + i);
  }

  static void weigh(const float (&gaps)[kChunk], int64_t (&weights)[kChunk]) {
    float rounded[kChunk];
    for (int64_t i = 0; i < kChunk; i += kLanes) weights_of(Vec::loadu(gaps + i)).store(rounded + i);
    for (int64_t i = 0; i < kChunk; ++i) weights[i] = static_cast<int64_t>(rounded[i]);
  }

  static int64_t sum(const int64_t (&weights)[kChunk]) {
    int64_t total = 0;
    for (int64_t weight : weights) total += weight;
    return total;
  }

  /// The point of [0, weight) where a draw falls. A weight below 2**53 times a draw below 1 is less than the weight.
  static int64_t point_of(double draw, int64_t weight) {
    return static_cast<int64_t>(draw * static_cast<double>(weight));
  }

  /// Draws from all tokens that min-p keeps, ordered by id.
  int64_t sample_open(double draw) const {
    const float limit = std::min(selection_.max_gap, kWeightless);
    float gaps[kChunk];
    int64_t weights[kChunk];
    const auto weigh_chunk = [&](int64_t c) {
      load_gaps(c, gaps);
      for (float& gap : gaps) gap = gap <= limit ? gap : kInfinity;
      weigh(gaps, weights);
    };
    auto& chunk_weights = scratch_.weights;
    chunk_weights.assign(chunks_, 0);
    int64_t total = 0;
    for (int64_t c = 0; c < chunks_; ++c) {
      if (scratch_.nearest[c] > limit) continue;
      weigh_chunk(c);
      total += chunk_weights[c] = sum(weights);
    }
    int64_t point = point_of(draw, total), c = 0, i = 0;
    while (point >= chunk_weights[c]) point -= chunk_weights[c++];
    weigh_chunk(c);
    while (point >= weights[i]) point -= weights[i++];
    return c * kChunk + i;
  }

  /// Draws from the tokens that all selections keep, ordered by probability, then by id.
  int64_t sample_ranked(double draw) {
    limit_ = std::min({selection_.max_gap, kWeightless, gap_with_top_k()});
    buckets_per_gap_ = kBuckets / std::max(limit_, 1e-30f);
    const int64_t everything = fill_buckets();
    const double mass = selection_.top_p < 1 ? std::ceil(static_cast<double>(everything) * selection_.top_p) : HUGE_VAL;

    const auto& buckets = scratch_.buckets;
    Bucket before;
    int32_t last = 0;
    for (; last < kBuckets - 1; ++last) {
      const Bucket with{before.weight + buckets[last].weight, before.count + buckets[last].count};
      if (with.count >= selection_.top_k || with.weight >= mass) break;
      before = with;
    }
    sort_bucket(last);
    const int64_t point = point_of(draw, before.weight + kept_weight(before, mass));
    if (point >= before.weight) return token_at(point - before.weight);
    int64_t rest = point;
    int32_t chosen = 0;
    while (rest >= buckets[chosen].weight) rest -= buckets[chosen++].weight;
    sort_bucket(chosen);
    return token_at(rest);
  }

  /// An upper bound of the top_k-th smallest gap: the top_k-th smallest of the chunks' smallest gaps.
  float gap_with_top_k() const {
    if (selection_.top_k > chunks_) return kInfinity;
    auto& sorted = scratch_.sorted;
    sorted.assign(scratch_.nearest.begin(), scratch_.nearest.begin() + chunks_);
    const auto kth = sorted.begin() + (selection_.top_k - 1);
    std::nth_element(sorted.begin(), kth, sorted.end());
    return *kth;
  }

  /// The bucket of each of kChunk gaps; kBuckets for a gap beyond the limit.
  void find_buckets(const float (&gaps)[kChunk], int32_t (&numbers)[kChunk]) const {
    for (int64_t i = 0; i < kChunk; ++i) {
      const int32_t number = static_cast<int32_t>(std::min(gaps[i], limit_) * buckets_per_gap_);
      numbers[i] = gaps[i] <= limit_ ? std::min(number, kBuckets - 1) : kBuckets;
    }
  }

  /// Counts and weighs the tokens within the limit. Returns the weight of all tokens, which top-p needs; without top-p,
  /// the weight of those looked at.
  int64_t fill_buckets() const {
    scratch_.buckets.assign(kBuckets + 1, Bucket());
    Bucket* buckets = scratch_.buckets.data();
    const float looked_at = selection_.top_p < 1 ? kWeightless : limit_;
    float gaps[kChunk];
    int64_t weights[kChunk];
    int32_t numbers[kChunk];
    int64_t everything = 0;
    for (int64_t c = 0; c < chunks_; ++c) {
      if (scratch_.nearest[c] > looked_at) continue;
      load_gaps(c, gaps);
      weigh(gaps, weights);
      everything += sum(weights);
      if (scratch_.nearest[c] > limit_) continue;
      find_buckets(gaps, numbers);
      for (int64_t i = 0; i < kChunk; ++i) {
        buckets[numbers[i]].weight += weights[i];
        buckets[numbers[i]].count += 1;
      }
    }
    return everything;
  }

  /// Puts the tokens of a bucket into scratch_.tokens, sorted.
  void sort_bucket(int32_t bucket) const {
    auto& tokens = scratch_.tokens;
    tokens.clear();
    float gaps[kChunk];
    int32_t numbers[kChunk];
    for (int64_t c = 0; c < chunks_; ++c) {
      if (scratch_.nearest[c] > limit_) continue;
      load_gaps(c, gaps);
      find_buckets(gaps, numbers);
      for (int64_t i = 0; i < kChunk; ++i)
        if (numbers[i] == bucket) tokens.push_back({gaps[i], static_cast<int32_t>(c * kChunk + i)});
    }
    std::sort(tokens.begin(), tokens.end());
  }

  /// The weight of the kept tokens of scratch_.tokens. before: the tokens of all buckets before this one.
  int64_t kept_weight(Bucket before, double mass) const {
    const auto& tokens = scratch_.tokens;
    int64_t weight = 0, strictly_before = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
      // Top-p keeps all tokens with equal gaps or none, so the weight before them is that before the first of them.
      if (i > 0 && tokens[i].gap != tokens[i - 1].gap) strictly_before = weight;
      if (before.count + static_cast<int64_t>(i) >= selection_.top_k || before.weight + strictly_before >= mass) break;
      weight += weight_of(tokens[i].gap);
    }
    return weight;
  }

  /// The first token of scratch_.tokens at which the cumulative weight exceeds `point`.
  int64_t token_at(int64_t point) const {
    const Token* token = scratch_.tokens.data();
    while ((point -= weight_of(token->gap)) >= 0) ++token;
    return token->id;
  }

  const float* logits_;
  int64_t vocab_;
  Selection selection_;
  int64_t chunks_;
  float tail_[kChunk];
  Scratch& scratch_;
  float best_ = 0;
  float limit_ = 0;  // no token with a larger gap is kept
  float buckets_per_gap_ = 0;
};

}  // namespace tercet
