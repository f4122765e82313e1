// The tokens that a grammar allows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "dot.h"
#include "thread_pool.h"

namespace tercet {

constexpr int64_t kMaskBits = 32;
static_assert(kMaskBits % kLanes == 0);

/// Sets the logits of all tokens to -inf whose bit is 0, in some lines. A NaN stays. logits: [rows, vocab]; bits:
/// [num_masks, words], where bit i of word w is token 32 * w + i
inline void mask_tokens(
    float* logits, int64_t vocab, const int64_t* lines, const int32_t* bits, int64_t words, int64_t num_masks) {
  constexpr float kBarred = -std::numeric_limits<float>::infinity();
  ThreadPool::get().run(num_masks, [&](int64_t i) {
    float* x = logits + lines[i] * vocab;
    const int32_t* mask = bits + i * words;
    for (int64_t word = 0; word < words; ++word) {
      const uint32_t allowed = static_cast<uint32_t>(mask[word]);
      if (allowed == ~uint32_t{0}) continue;
      const int64_t begin = word * kMaskBits, end = std::min(begin + kMaskBits, vocab);
      if (allowed == 0 && end - begin == kMaskBits) {
        // Most words of most masks. The minimum keeps a NaN.
        for (int64_t at = begin; at < end; at += kLanes) {
          at::vec::minimum(Vec::loadu(x + at), Vec(kBarred)).store(x + at);
        }
        continue;
      }
      for (int64_t at = begin; at < end; ++at) {
        if ((allowed >> (at - begin) & 1) == 0 && !std::isnan(x[at])) x[at] = kBarred;
      }
    }
  });
}

}  // namespace tercet
