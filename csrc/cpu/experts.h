// A mixture of experts: a router chooses experts for each token, and the gated layers of these experts are summed.
//
// A pair is a token and one of its experts. Pairs are sorted by expert, then by token, so an expert's pairs are
// neighbours. Two passes compute all experts: one is a job of the thread pool, whatever the number of experts.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include "linear.h"
#include "quantized.h"
#include "routing.h"

namespace tercet {

/// Rows of x from row `first` on.
template <typename X>
const X* rows_from(const X* x, int64_t k, int64_t first) {
  return x + first * k;
}
template <typename Value>
QuantizedRows<Value> rows_from(const QuantizedRows<Value>& x, int64_t k, int64_t first) {
  return {x.rows + first * x.row_bytes(k), k};
}

/// Memory of this thread for a block of rows.
template <typename Number>
Number* memory_for_rows(int64_t numbers) {
  static thread_local std::vector<Number> memory;
  if (memory.size() < static_cast<size_t>(numbers)) memory.resize(numbers);
  return memory.data();
}

/// Copies `count` rows of x to memory of this thread.
template <typename X>
const X* gathered_rows(const X* x, int64_t k, const int32_t* rows, int64_t count) {
  X* to = memory_for_rows<X>(count * k);
  for (int64_t i = 0; i < count; ++i) std::copy_n(x + rows[i] * k, k, to + i * k);
  return to;
}
template <typename Value>
QuantizedRows<Value> gathered_rows(const QuantizedRows<Value>& x, int64_t k, const int32_t* rows, int64_t count) {
  const int64_t bytes = x.row_bytes(k);
  return {const_cast<uint8_t*>(gathered_rows<uint8_t>(x.rows, bytes, rows, count)), k};
}

/// These rows of x, in ascending order and next to each other.
template <typename Rows>
Rows selected_rows(const Rows& x, int64_t k, const int32_t* rows, int64_t count) {
  if (rows[count - 1] - rows[0] == count - 1) return rows_from(x, k, rows[0]);
  return gathered_rows(x, k, rows, count);
}

/// A packed weight of any kind for these rows. The experts of a layer may have several kinds.
template <typename Rows, typename Store>
class ExpertWeight {
 public:
  template <typename Weight>
  explicit ExpertWeight(const Weight& weight)
      : panels_(reinterpret_cast<const char*>(weight.panels)),
        panel_distance_(weight.panel_distance()),
        row_bytes_(weight.row_bytes()),
        k_(weight.k),
        multiply_(multiply_run<Weight>) {
    static_assert(sizeof(Weight) <= sizeof(weight_) && std::is_trivially_copyable_v<Weight>);
    std::memcpy(weight_.data(), &weight, sizeof(weight));
  }

  /// Multiplies the first rows of x with a run of panels.
  void multiply(const Rows& x, int64_t rows, const Run& run, const Store& store) const {
    multiply_(weight_.data(), x, rows, run, store);
  }

  const char* panel(int64_t at) const { return panels_ + at * panel_distance_; }
  int64_t k() const { return k_; }

  /// Into how many blocks so many rows are divided.
  int64_t blocks(int64_t rows) const {
    return std::min(
        rows, std::max(ceil_div(rows * row_bytes_, Tuning::get().block_bytes), ceil_div(rows, kMaxBlockRows)));
  }

 private:
  template <typename Weight>
  static void multiply_run(const std::byte* bytes, const Rows& x, int64_t rows, const Run& run, const Store& store) {
    const auto& weight = *reinterpret_cast<const Weight*>(bytes);
    if constexpr (Weight::kFewRows > 0) {
      if (rows <= Weight::kFewRows) {
        for_each_piece<Weight::kFewRows>(
            rows, [&](int64_t, auto few) { multiply_few_rows<few>(x, 0, weight, run, store); });
        return;
      }
    }
    multiply_block(x, 0, rows, weight, run, store);
  }

  alignas(8) std::array<std::byte, 32> weight_;
  const char* panels_;
  int64_t panel_distance_, row_bytes_, k_;
  void (*multiply_)(const std::byte*, const Rows&, int64_t, const Run&, const Store&);
};

/// Stores silu(gate) * up of an expert's rows. A type of its own, so that the compiler inlines the products of linear
/// layers as before.
template <typename Out>
struct StoreExpertSiluMul : StoreGated<Out, Silu> {};

/// Stores gate * sigmoid(alpha * gate) * (up + 1) of an expert's rows in out [rows, n]. Before it, gate is lowered to the
/// limit, and up is moved into [-limit, limit].
template <typename Out>
struct StoreExpertClampedGate {
  Out* out;
  int64_t n;
  float alpha, limit;

  [[gnu::always_inline]] void operator()(int64_t row, int64_t panel, Vec gate, Vec up) const {
    const int64_t column = panel * kLanes;
    gate = at::vec::clamp_max(gate, Vec(limit));
    up = at::vec::clamp(up, Vec(-limit), Vec(limit)) + Vec(1.f);
    const Vec gated = gate / (Vec(1.f) + exp_for<Out>(Vec(-alpha) * gate));
    store_pair(out + row * n + column, {gated * up, Vec(0.f)}, std::min(kLanes, n - column));
  }
  void prefetch(int64_t row, int64_t panel) const { prefetch_to_write(out + row * n + panel * kLanes); }
};

/// The activations of gate and up: what stores them.
struct SiluMul {
  template <typename Out>
  using Store = StoreExpertSiluMul<Out>;

  template <typename Out>
  Store<Out> store(Out* out, int64_t n) const {
    return {{out, n}};
  }
};
struct ClampedGate {
  template <typename Out>
  using Store = StoreExpertClampedGate<Out>;

  float alpha, limit;

  template <typename Out>
  Store<Out> store(Out* out, int64_t n) const {
    return {out, n, alpha, limit};
  }
};

/// Adds the weighted sums of an expert's rows to those of their tokens.
struct AddToTokens {
  /// [panels, num_tokens, kPanel]
  float* sums;
  int64_t num_tokens;
  /// of each row
  const int32_t* tokens;
  const float* weights;

  float* sums_of(int64_t token, int64_t panel) const { return sums + (panel * num_tokens + token) * kPanel; }

  [[gnu::always_inline]] void operator()(int64_t row, int64_t panel, Vec left, Vec right) const {
    const Vec weight(weights[row]);
    float* to = sums_of(tokens[row], panel);
    // Fused in every piece of rows: the compiler alone may choose differently for some.
    at::vec::fmadd(weight, left, Vec::loadu(to)).store(to);
    at::vec::fmadd(weight, right, Vec::loadu(to + kLanes)).store(to + kLanes);
  }
  void prefetch(int64_t row, int64_t panel) const { prefetch_to_write(sums_of(tokens[row], panel)); }
};

/// Experts with pairs, in ascending order, and the items of work of a pass over them.
struct ActiveExpert {
  int64_t expert, first_pair, pairs, blocks, first_item;

  int64_t first_of_block(int64_t block) const { return pairs * block / blocks; }
};

/// The experts that have pairs. Each has blocks * num_runs items, where num_runs is what `choose_runs` returns for the
/// blocks of all experts. The memory is that of this thread, until its next call.
template <typename Weights, typename F>
const std::vector<ActiveExpert>& active_experts(const Routing& routing, const Weights& weights, const F& choose_runs) {
  static thread_local std::vector<ActiveExpert> active;
  active.clear();
  int64_t blocks = 0;
  for (int64_t expert = 0; expert < routing.num_experts; ++expert) {
    const int64_t pairs = routing.num_pairs(expert);
    if (pairs == 0) continue;
    active.push_back({expert, routing.first_pair(expert), pairs, weights[expert].blocks(pairs), blocks});
    blocks += active.back().blocks;
  }
  const int64_t num_runs = choose_runs(blocks);
  for (auto& one : active) one.first_item *= num_runs;
  return active;
}

/// Computes the activation of every pair: x of the tokens -> out [pairs, n]. Threads claim runs of panels of one expert,
/// for one block of its rows at a time.
template <typename Rows, typename Activation, typename Out, typename Next>
void activate_experts(
    const Rows& x,
    const Routing& routing,
    const std::vector<ExpertWeight<Rows, typename Activation::template Store<Out>>>& weights,
    const std::vector<Next>& next_weights,
    const Activation& activation,
    int64_t n,
    Out* out) {
  constexpr int64_t kItemsOfThread = 8;
  const int64_t threads = ThreadPool::get().num_threads(), panels = ceil_div(n, kLanes);
  int64_t num_runs = 1, items = 0;
  const auto& active = active_experts(routing, weights, [&](int64_t blocks) {
    num_runs = std::clamp<int64_t>(ceil_div(kItemsOfThread * threads, std::max<int64_t>(blocks, 1)), 1, panels);
    items = blocks * num_runs;
    return num_runs;
  });
  const auto expert_of = [&](int64_t item) -> const ActiveExpert& {
    const auto after = std::upper_bound(
        active.begin(), active.end(), item, [](int64_t item, const ActiveExpert& one) { return item < one.first_item; });
    return *(after - 1);
  };
  const auto first_panel = [&](int64_t run) { return panels * run / num_runs; };
  ThreadPool::get().run(items, [&](int64_t item) {
    const ActiveExpert& one = expert_of(item);
    // All blocks of rows multiply a run before the next run begins, so its panels are read from memory once.
    const int64_t block = (item - one.first_item) % one.blocks, run = (item - one.first_item) / one.blocks;
    const int64_t begin = one.first_of_block(block), count = one.first_of_block(block + 1) - begin;
    const int64_t pair = one.first_pair + begin, next_item = item + threads;
    const char* next = next_weights[active.front().expert].panel(0);
    if (next_item < items) {
      const ActiveExpert& other = expert_of(next_item);
      next = weights[other.expert].panel(first_panel((next_item - other.first_item) / other.blocks));
    }
    const auto& weight = weights[one.expert];
    const auto store = activation.store(out + pair * n, n);
    weight.multiply(
        selected_rows(x, weight.k(), routing.tokens + pair, count), count,
        Run{first_panel(run), first_panel(run + 1), next}, store);
  });
}

/// Multiplies the rows of all pairs with their expert's weight, and sums the products of each token, multiplied by the
/// weights of its experts, in float and in the order of the experts: x [pairs, k] -> out [tokens, n]. Threads claim runs
/// of panels. A run multiplies the same columns of one expert after the other, so no other thread adds to its sums.
/// sums: memory for ceil_div(n, kPanel) * kPanel * tokens floats
template <typename Rows, typename Out>
void sum_experts(
    const Rows& x,
    int64_t tokens,
    const Routing& routing,
    const std::vector<ExpertWeight<Rows, AddToTokens>>& weights,
    const NextWeight& next_weight,
    int64_t n,
    float* sums,
    Out* out) {
  const int64_t threads = ThreadPool::get().num_threads();
  const Runs runs(ceil_div(n, kPanel), threads);
  const auto& active = active_experts(routing, weights, [](int64_t) { return 1; });
  ThreadPool::get().run(runs.count(), [&](int64_t index) {
    const int64_t begin = runs.first_panel(index), end = runs.first_panel(index + 1);
    std::fill_n(sums + begin * tokens * kPanel, (end - begin) * tokens * kPanel, 0.f);
    for (size_t i = 0; i < active.size(); ++i) {
      const ActiveExpert& one = active[i];
      const auto& weight = weights[one.expert];
      const char* next_run = weight.panel(begin);
      if (i + 1 < active.size())
        next_run = weights[active[i + 1].expert].panel(begin);
      else if (index + threads < runs.count())
        next_run = weights[active[0].expert].panel(runs.first_panel(index + threads));
      else if (next_weight.panels) {
        const Runs next_runs(next_weight.num_panels, threads);
        const int64_t run = std::min(next_runs.count() - 1, index + threads - runs.count());
        next_run = next_weight.panels + next_runs.first_panel(run) * next_weight.panel_bytes;
      }
      for (int64_t block = 0; block < one.blocks; ++block) {
        const int64_t first = one.first_of_block(block), count = one.first_of_block(block + 1) - first;
        const int64_t pair = one.first_pair + first;
        const char* next = block + 1 < one.blocks ? weight.panel(begin) : next_run;
        weight.multiply(
            rows_from(x, weight.k(), pair), count, Run{begin, end, next},
            AddToTokens{sums, tokens, routing.tokens + pair, routing.weights + pair});
      }
    }
    const AddToTokens all{sums, tokens, nullptr, nullptr};
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t token = 0; token < tokens; ++token)
        store_pair(out + token * n + panel * kPanel, load_pair(all.sums_of(token, panel)), n - panel * kPanel);
  });
}

}  // namespace tercet
