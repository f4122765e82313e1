// Records operations once and runs them many times, without Python or torch between them: a CUDA graph for a CPU.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "linear.h"

namespace tercet {

/// The memory of a graph's intermediate tensors. A tensor that is freed while recording leaves its memory to the next
/// one of the same size: operations run in the order in which they were recorded.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  ~Arena() {
    for (void* memory : all_) std::free(memory);
  }

  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
    const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
    const size_t size = round_up(std::max<int64_t>(bytes, 1), kAlignment);
    const auto give_back = [arena = shared_from_this(), size](void* memory) { arena->free_.emplace(size, memory); };
    return at::from_blob(take(size), sizes, give_back, options);
  }

 private:
  static constexpr int64_t kAlignment = 64;

  void* take(size_t size) {
    if (const auto found = free_.find(size); found != free_.end()) return free_.extract(found).mapped();
    void* memory = std::aligned_alloc(kAlignment, size);
    if (!memory) throw std::bad_alloc();
    all_.push_back(memory);
    return memory;
  }

  std::vector<void*> all_;
  std::multimap<size_t, void*> free_;
};

/// The sizes of a step, or, of a recording, the largest ones.
struct StepSize {
  int64_t tokens;    // new ones
  int64_t requests;  // with new tokens
  int64_t selected;  // tokens whose logits are computed

  bool has_room_for(const StepSize& step) const {
    return 0 < step.tokens && step.tokens <= tokens && 0 < step.requests && step.requests <= requests &&
        0 <= step.selected && step.selected <= selected;
  }
};

/// A list of recorded operations. It holds addresses, not tensors: its owner must keep the inputs (weights, tokens, KV
/// pools) alive. Intermediate and output tensors are in its arena, which lives as long as any of them.
class Graph : public torch::CustomClassHolder {
 public:
  /// The graph that records the operations of this thread; nullptr: operations run at once.
  static Graph*& recording() {
    static thread_local Graph* graph = nullptr;
    return graph;
  }

  /// Records the operations from here to `finish`. Their tensors have room for these sizes; `run` may have smaller ones.
  void record(int64_t max_tokens, int64_t max_requests, int64_t max_selected) {
    TORCH_CHECK(!recording() && operations_.empty(), "a graph is recorded once, and one at a time");
    TORCH_CHECK(
        std::min({max_tokens, max_requests, max_selected}) > 0, "a graph must have room for a token, a request and a row");
    max_ = {max_tokens, max_requests, max_selected};
    recording() = this;
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(note_unrecorded).scopes({at::RecordScope::FUNCTION}));
  }

  /// Raises an error if torch computed something since `record`: `run` would leave it out.
  void finish() {
    TORCH_CHECK(recording() == this, "this graph is not being recorded");
    recording() = nullptr;
    at::removeCallback(callback_);
    std::string names;
    for (const std::string& name : unrecorded_) names += (names.empty() ? "" : ", ") + name;
    TORCH_CHECK(unrecorded_.empty(), "cannot be part of a recorded step: ", names);
  }

  /// Runs all operations on the first rows of their tensors.
  void run(int64_t tokens, int64_t requests, int64_t selected) {
    const StepSize step{tokens, requests, selected};
    TORCH_CHECK(!recording(), "a graph cannot be part of another one");
    TORCH_CHECK(
        max_.has_room_for(step), "the graph has room for ", max_.tokens, " tokens of ", max_.requests,
        " requests and ", max_.selected, " selected ones, not ", tokens, ", ", requests, " and ", selected);
    for (const auto& plan : plans_) plan->forget();
    for (const auto& operation : operations_)
      if (const int64_t count = step.*operation.size) operation.call(count);
  }

  /// Adds an operation on rows: one for each token, or, after `select`, for each selected one.
  void add(int64_t rows, std::function<void(int64_t)> call) { add(rows_, rows, std::move(call)); }

  /// Adds an operation on requests.
  void add_for_requests(int64_t requests, std::function<void(int64_t)> call) {
    add(&StepSize::requests, requests, std::move(call));
  }

  /// From here on, rows are those of the selected tokens.
  void select() { rows_ = &StepSize::selected; }

  /// The plan of a batch. Layers that attend to the same batch share it.
  std::shared_ptr<StepPlan> plan(const AttentionBatch& batch, int64_t bytes_per_number) {
    for (const auto& plan : plans_)
      if (plan->is_for(batch, bytes_per_number)) return plan;
    return plans_.emplace_back(std::make_shared<StepPlan>(batch, bytes_per_number));
  }

  /// Where to find the weight of the linear layer that is recorded after this one.
  std::shared_ptr<const NextWeight> add_weight(const NextWeight& weight) {
    if (last_weight_) *last_weight_ = weight;
    return last_weight_ = std::make_shared<NextWeight>();
  }

  Arena& arena() { return *arena_; }
  int64_t num_operations() const { return static_cast<int64_t>(operations_.size()); }

 private:
  using Size = int64_t StepSize::*;

  struct Operation {
    Size size;  // what it is called with
    std::function<void(int64_t)> call;
  };

  void add(Size size, int64_t count, std::function<void(int64_t)> call) {
    TORCH_CHECK(count == max_.*size, "recorded operations must have ", max_.*size, " rows, got ", count);
    operations_.push_back({size, std::move(call)});
  }

  /// Notes an operation of torch's that computes. Views do not: their addresses are known while recording. Operations
  /// of csrc/cpu record themselves.
  static std::unique_ptr<at::ObserverContext> note_unrecorded(const at::RecordFunction& called) {
    const auto schema = called.operator_schema();
    const std::string name = called.name();
    if (!recording() || name.starts_with("tercet_cpu::")) return nullptr;
    const bool is_view = schema && std::ranges::any_of(schema->returns(), [](const auto& result) {
      return result.alias_info() && !result.alias_info()->isWrite();
    });
    if (!is_view) recording()->unrecorded_.insert(name);
    return nullptr;
  }

  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>();
  std::vector<Operation> operations_;
  std::vector<std::shared_ptr<StepPlan>> plans_;
  std::shared_ptr<NextWeight> last_weight_;
  StepSize max_{};
  Size rows_ = &StepSize::tokens;
  at::CallbackHandle callback_ = 0;
  std::set<std::string> unrecorded_;
};

/// Calls operation(rows) now, or, while a graph records, whenever that graph runs.
template <typename F>
void run_or_record(int64_t rows, F operation) {
  if (Graph* graph = Graph::recording())
    graph->add(rows, std::move(operation));
  else
    operation(rows);
}

/// The same for an operation on requests.
template <typename F>
void run_or_record_requests(int64_t requests, F operation) {
  if (Graph* graph = Graph::recording())
    graph->add_for_requests(requests, std::move(operation));
  else
    operation(requests);
}

/// Memory for an operation's result.
inline at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  Graph* graph = Graph::recording();
  return graph ? graph->arena().empty(sizes, options) : at::empty(sizes, options);
}

/// The weight of the next linear layer, or none. `weight` is this one's.
template <typename Weight>
std::shared_ptr<const NextWeight> next_weight(const Weight& weight, int64_t num_panels) {
  static const auto none = std::make_shared<const NextWeight>();
  Graph* graph = Graph::recording();
  if (!graph) return none;
  return graph->add_weight(
      {reinterpret_cast<const char*>(weight.panels), Weight::panel_bytes(weight.k), num_panels});
}

inline std::shared_ptr<StepPlan> step_plan(const AttentionBatch& batch, int64_t bytes_per_number) {
  Graph* graph = Graph::recording();
  return graph ? graph->plan(batch, bytes_per_number) : std::make_shared<StepPlan>(batch, bytes_per_number);
}

}  // namespace tercet
