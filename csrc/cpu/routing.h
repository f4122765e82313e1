// The choice of a router: the experts of each token, and the (token, expert) pairs sorted by expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

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
  /// What the weights are multiplied by.
  float scale;
  /// The experts are so many groups of neighbours, of equal size; 1: there are no groups.
  int64_t num_groups;
  /// A token chooses its experts from so many groups.
  int64_t groups_per_token;
};

/// Groups of experts: the numbers of the groups, in ascending order, and the experts of each.
struct ExpertGroups {
  const int32_t* numbers;
  int64_t count, size;
};

/// Finds the experts of `groups` with the largest of the numbers number_of(expert), and of equal ones those with the
/// smaller index. Writes both, the largest number first. There are at least `count` experts.
template <typename NumberOf>
void largest_experts(
    const ExpertGroups& groups, int64_t count, int32_t* experts, float* numbers, const NumberOf& number_of) {
  int64_t found = 0;
  for (int64_t group = 0; group < groups.count; ++group) {
    const int64_t first = groups.numbers[group] * groups.size;
    for (int64_t expert = first; expert < first + groups.size; ++expert) {
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
}

/// Chooses the groups from which a token chooses its experts.
class GroupChoice {
 public:
  GroupChoice(const RoutingRule& rule, int64_t num_experts)
      : num_groups_(rule.num_groups),
        size_(num_experts / rule.num_groups),
        num_scored_(rule.corrections ? 2 : 1),
        numbers_(rule.groups_per_token),
        scores_(rule.groups_per_token) {}

  /// The groups with the highest scores, and of equal ones those with the smaller index. The score of a group is the
  /// largest of the numbers number_of(expert). With corrections, it is the sum of the two largest.
  template <typename NumberOf>
  ExpertGroups operator()(const NumberOf& number_of) {
    const auto kept = static_cast<int64_t>(numbers_.size());
    if (num_groups_ > 1) {
      const int32_t zero = 0;  // the groups take the place of the experts of a group 0 that has all of them
      largest_experts({&zero, 1, num_groups_}, kept, numbers_.data(), scores_.data(), [&](int64_t group) {
        const auto number = static_cast<int32_t>(group);
        int32_t experts[2];
        float numbers[2] = {0, 0};
        largest_experts({&number, 1, size_}, num_scored_, experts, numbers, number_of);
        return numbers[0] + numbers[1];
      });
      std::sort(numbers_.begin(), numbers_.end());
    }
    return {numbers_.data(), kept, size_};
  }

 private:
  int64_t num_groups_, size_, num_scored_;
  std::vector<int32_t> numbers_;
  std::vector<float> scores_;
};

/// Chooses the experts of one token by the probabilities of a softmax over all experts, which are their weights. If a
/// logit is NaN, any experts are chosen, and all weights are NaN.
inline void choose_by_softmax(
    const float* logits, const RoutingRule& rule, int64_t num_experts, int64_t count, GroupChoice& choose_groups,
    int32_t* experts, float* shares) {
  const auto logit = [=](int64_t expert) { return logits[expert]; };
  // The largest logit of all experts is in a group with the highest score.
  largest_experts(choose_groups(logit), count, experts, shares, logit);
  const float largest = shares[0];
  float total = 0, chosen = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) total += std::exp(logits[expert] - largest);
  std::sort(experts, experts + count);
  for (int64_t i = 0; i < count; ++i) {
    shares[i] = std::exp(logits[experts[i]] - largest) / total;
    chosen += shares[i];
  }
  const float divisor = rule.normalized ? chosen : 1.f;
  for (int64_t i = 0; i < count; ++i) shares[i] = shares[i] / divisor * rule.scale;
}

/// Chooses the experts of one token by their weights and the corrections. If all logits are NaN, any experts are chosen,
/// and all weights are NaN.
inline void choose_corrected(
    const float* logits, const RoutingRule& rule, int64_t num_experts, int64_t count, GroupChoice& choose_groups,
    int32_t* experts, float* shares) {
  float largest = 0, total = 1;
  if (!rule.sigmoids) {
    largest = *std::max_element(logits, logits + num_experts);
    total = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) total += std::exp(logits[expert] - largest);
  }
  const auto weight = [&](int64_t expert) {
    return rule.sigmoids ? 1.f / (1.f + std::exp(-logits[expert])) : std::exp(logits[expert] - largest) / total;
  };
  const auto corrected = [&](int64_t expert) { return weight(expert) + rule.corrections[expert]; };
  largest_experts(choose_groups(corrected), count, experts, shares, corrected);
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
    GroupChoice choose_groups(rule, to.num_experts);
    for (int64_t token = first; token < end; ++token) {
      const int64_t at = token * per_token;
      const float* of_token = logits + token * to.num_experts;
      const auto choose = rule.corrections ? choose_corrected : choose_by_softmax;
      choose(of_token, rule, to.num_experts, per_token, choose_groups, to.experts + at, to.shares + at);
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
