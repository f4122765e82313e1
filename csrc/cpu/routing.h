// The choice of a router: the experts of each token, and the (token, expert) pairs sorted by expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "norm.h"

namespace tercet {

/// What a router has chosen. The memory belongs to the caller.
struct Routing {
  int64_t num_experts, per_token;
  /// [tokens, per_token]: the experts of each token in ascending order, and their weights
  int32_t* experts;
  float* shares;
  /// [num_experts + 2]: the first pair of each expert, then the number of pairs
  int32_t* first_pairs;
  /// [tokens * per_token]: the token and the weight of each pair
  int32_t* tokens;
  float* weights;

  int64_t first_pair(int64_t expert) const { return first_pairs[expert]; }
  int64_t num_pairs(int64_t expert) const { return first_pairs[expert + 1] - first_pairs[expert]; }
};

/// How a router chooses.
struct RoutingRule {
  /// Whether the weights of a token's experts are divided by their sum.
  bool normalized;
  /// Whether the weights are sigmoids of logits. If not, they are the probabilities of a softmax over all experts.
  bool sigmoids;
  /// [num_experts]: what is added to the weights for the choice; nullptr: there are none, and no sigmoids
  const float* corrections;
  /// With corrections: what the sum of a token's weights is at least, where they are divided by it.
  float least_sum;
  /// With corrections: what the weights are multiplied by.
  float scale;
};

/// Finds the experts with the largest of the numbers number_of(expert), and of equal ones those with the smaller index.
/// Writes both, the largest number first.
template <typename NumberOf>
void largest_experts(int64_t num_experts, int64_t count, int32_t* experts, float* numbers, const NumberOf& number_of) {
  for (int64_t expert = 0, found = 0; expert < num_experts; ++expert) {
    const float number = number_of(expert);
    if (found == count && !(number > numbers[count - 1])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && number > numbers[at - 1]; --at) {
      experts[at] = experts[at - 1];
      numbers[at] = numbers[at - 1];
    }
    experts[at] = static_cast<int32_t>(expert);
    numbers[at] = number;
  }
}

/// Chooses the experts of one token by the probabilities of a softmax over all experts, which are their weights. If a
/// logit is NaN, any experts are chosen, and all weights are NaN.
inline void choose_by_softmax(
    const float* logits, int64_t num_experts, int64_t count, bool normalized, int32_t* experts, float* shares) {
  largest_experts(num_experts, count, experts, shares, [=](int64_t expert) { return logits[expert]; });
  const float largest = shares[0];
  float total = 0, chosen = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) total += std::exp(logits[expert] - largest);
  std::sort(experts, experts + count);
  for (int64_t i = 0; i < count; ++i) {
    shares[i] = std::exp(logits[experts[i]] - largest) / total;
    chosen += shares[i];
  }
  if (normalized)
    for (int64_t i = 0; i < count; ++i) shares[i] /= chosen;
}

/// Chooses the experts of one token by their weights and the corrections. If all logits are NaN, any experts are chosen,
/// and all weights are NaN.
inline void choose_corrected(
    const float* logits, const RoutingRule& rule, int64_t num_experts, int64_t count, int32_t* experts, float* shares) {
  float largest = 0, total = 1;
  if (!rule.sigmoids) {
    largest = *std::max_element(logits, logits + num_experts);
    total = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) total += std::exp(logits[expert] - largest);
  }
  const auto weight = [&](int64_t expert) {
    return rule.sigmoids ? 1.f / (1.f + std::exp(-logits[expert])) : std::exp(logits[expert] - largest) / total;
  };
  largest_experts(
      num_experts, count, experts, shares, [&](int64_t expert) { return weight(expert) + rule.corrections[expert]; });
  std::sort(experts, experts + count);
  float chosen = 0;
  for (int64_t i = 0; i < count; ++i) {
    shares[i] = weight(experts[i]);
    chosen += shares[i];
  }
  const float divisor = rule.normalized ? std::max(chosen, rule.least_sum) : 1.f;
  for (int64_t i = 0; i < count; ++i) shares[i] = shares[i] / divisor * rule.scale;
}

/// Chooses the experts of all tokens and sorts the pairs. logits: [tokens, num_experts]
inline void route(const float* logits, int64_t tokens, const RoutingRule& rule, const Routing& to) {
  const int64_t per_token = to.per_token;
  constexpr int64_t kWorkOfLogit = 8;  // in numbers of other operations
  for_each_row_block(tokens, kWorkOfLogit * to.num_experts, [&](int64_t first, int64_t end) {
    for (int64_t token = first; token < end; ++token) {
      const int64_t at = token * per_token;
      const float* of_token = logits + token * to.num_experts;
      if (rule.corrections)
        choose_corrected(of_token, rule, to.num_experts, per_token, to.experts + at, to.shares + at);
      else
        choose_by_softmax(of_token, to.num_experts, per_token, rule.normalized, to.experts + at, to.shares + at);
    }
  });
  const int64_t pairs = tokens * per_token;
  std::fill_n(to.first_pairs, to.num_experts + 2, 0);
  for (int64_t i = 0; i < pairs; ++i) ++to.first_pairs[to.experts[i] + 2];
  // While the pairs are placed, entry `expert + 1` is the place of the expert's next pair.
  for (int64_t expert = 1; expert <= to.num_experts; ++expert) to.first_pairs[expert + 1] += to.first_pairs[expert];
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t pair = to.first_pairs[to.experts[i] + 1]++;
    to.tokens[pair] = static_cast<int32_t>(i / per_token);
    to.weights[pair] = to.shares[i];
  }
}

}  // namespace tercet
