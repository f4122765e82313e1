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

/// A list of recorded operations, and alternative endings: further lists, of which a step runs one. It holds addresses,
/// not tensors: its owner must keep the inputs (weights, tokens, KV pools) alive. Intermediate and output tensors are in
/// its arena, which lives as long as any of them.
class Graph : public torch::CustomClassHolder {
 public:
  ~Graph() override {
    if (recording() == this) stop();
  }

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

  /// Operations from here to the next call, or to `finish`, are an ending of the graph. All endings begin where the
  /// other operations end.
  void begin_ending() {
    TORCH_CHECK(recording() == this, "this graph is not being recorded");
    if (endings_.empty()) body_end_ = end_;
    end_ = body_end_;
    endings_.emplace_back();
  }

  /// Raises an error if torch computed something since `record`: `run` would leave it out.
  void finish() {
    TORCH_CHECK(recording() == this, "this graph is not being recorded");
    stop();
    std::string names;
    for (const std::string& name : unrecorded_) names += (names.empty() ? "" : ", ") + name;
    TORCH_CHECK(unrecorded_.empty(), "cannot be part of a recorded step: ", names);
  }

  /// Runs all operations, without the endings, on the first rows of their tensors.
  void run(int64_t tokens, int64_t requests, int64_t selected) {
    const StepSize step{tokens, requests, selected};
    TORCH_CHECK(!recording(), "a graph cannot be part of another one");
    TORCH_CHECK(
        max_.has_room_for(step), "the graph has room for ", max_.tokens, " tokens of ", max_.requests,
        " requests and ", max_.selected, " selected ones, not ", tokens, ", ", requests, " and ", selected);
    for (const auto& plan : plans_) plan->forget();
    step_ = step;
    call(operations_);
  }

  /// Runs an ending of the step of the last `run`.
  void run_ending(int64_t index) {
    const int64_t count = static_cast<int64_t>(endings_.size());
    TORCH_CHECK(0 <= index && index < count, "there is no ending ", index, ", but ", count, " endings");
    TORCH_CHECK(!recording() && step_.tokens > 0, "an ending runs after the rest of its graph");
    call(endings_[index]);
  }

  /// Adds an operation on rows: one for each token, or, after `select`, for each selected one.
  void add(int64_t rows, std::function<void(int64_t)> call) { add(end_.rows, rows, std::move(call)); }

  /// Adds an operation on requests.
  void add_for_requests(int64_t requests, std::function<void(int64_t)> call) {
    add(&StepSize::requests, requests, std::move(call));
  }

  /// From here on, rows are those of the selected tokens.
  void select() { end_.rows = &StepSize::selected; }

  /// The plan of a batch. Layers that attend to the same batch share it.
  std::shared_ptr<StepPlan> plan(const AttentionBatch& batch, int64_t bytes_per_number) {
    for (const auto& plan : plans_)
      if (plan->is_for(batch, bytes_per_number)) return plan;
    return plans_.emplace_back(std::make_shared<StepPlan>(batch, bytes_per_number));
  }

  /// Where to find the weight of the linear layer that is recorded after this one.
  std::shared_ptr<const NextWeight> add_weight(const NextWeight& weight) {
    if (end_.next_weight) *end_.next_weight = weight;
    return end_.next_weight = std::make_shared<NextWeight>();
  }

  Arena& arena() { return *arena_; }
  /// Without those of endings.
  int64_t num_operations() const { return static_cast<int64_t>(operations_.size()); }

 private:
  using Size = int64_t StepSize::*;

  struct Operation {
    Size size;  // what it is called with
    std::function<void(int64_t)> call;
  };

  using Operations = std::vector<Operation>;

  /// What the next recorded operation follows.
  struct End {
    Size rows = &StepSize::tokens;
    std::shared_ptr<NextWeight> next_weight;  // of the last linear layer
  };

  void stop() {
    recording() = nullptr;
    at::removeCallback(callback_);
  }

  void call(const Operations& operations) const {
    for (const auto& operation : operations)
      if (const int64_t count = step_.*operation.size) operation.call(count);
  }

  void add(Size size, int64_t count, std::function<void(int64_t)> call) {
    TORCH_CHECK(count == max_.*size, "recorded operations must have ", max_.*size, " rows, got ", count);
    (endings_.empty() ? operations_ : endings_.back()).push_back({size, std::move(call)});
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
  Operations operations_;
  std::vector<Operations> endings_;
  std::vector<std::shared_ptr<StepPlan>> plans_;
  StepSize max_{}, step_{};
  End end_, body_end_;
  at::CallbackHandle callback_ = 0;
  std::set<std::string> unrecorded_;
};

/// To be called by operations that are never part of a recorded step.
inline void check_not_recording(const char* what) { TORCH_CHECK(!Graph::recording(), what, " cannot be recorded"); }

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

/// The weight of the next linear layer, or none. `weight` is this one's, which the layer before prefetches.
inline std::shared_ptr<const NextWeight> next_weight(const NextWeight& weight) {
  static const auto none = std::make_shared<const NextWeight>();
  Graph* graph = Graph::recording();
  return graph ? graph->add_weight(weight) : none;
}

template <typename Weight>
std::shared_ptr<const NextWeight> next_weight(const Weight& weight, int64_t num_panels) {
  return next_weight({reinterpret_cast<const char*>(weight.panels), weight.panel_distance(), num_panels});
}

inline std::shared_ptr<StepPlan> step_plan(const AttentionBatch& batch, int64_t bytes_per_number) {
  Graph* graph = Graph::recording();
  return graph ? graph->plan(batch, bytes_per_number) : std::make_shared<StepPlan>(batch, bytes_per_number);
}

}  // namespace tercet
