// Operations that are recorded once, then performed again and again with neither Python nor torch in between: what a
// CUDA graph is to a GPU.
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

namespace tercet {

/// Memory of a graph's intermediate tensors. What one gives back is the next one's of the same size, as operations are
/// performed in the order in which they were recorded.
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

/// It keeps addresses, not tensors: whoever records it keeps alive what goes in (weights, inputs, pools). Intermediate
/// tensors are in its arena; so is what comes out, which keeps its memory as long as there is a tensor of it.
class Graph : public torch::CustomClassHolder {
 public:
  /// The one that operations of this thread are recorded in; nullptr: they are performed.
  static Graph*& recording() {
    static thread_local Graph* graph = nullptr;
    return graph;
  }

  /// From here to `finish` operations are recorded, each for so many rows, which `run` may have fewer of.
  void record(int64_t most_rows) {
    TORCH_CHECK(!recording() && operations_.empty(), "a graph is recorded once, and one at a time");
    TORCH_CHECK(most_rows > 0, "a graph must have room for rows, got ", most_rows);
    most_rows_ = most_rows;
    recording() = this;
    watch_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(note_what_is_not_recorded).scopes({at::RecordScope::FUNCTION}));
  }

  /// Fails if torch computed something meanwhile: `run` would leave that out.
  void finish() {
    TORCH_CHECK(recording() == this, "this graph is not being recorded");
    recording() = nullptr;
    at::removeCallback(watch_);
    std::string names;
    for (const std::string& name : not_recorded_) names += (names.empty() ? "" : ", ") + name;
    TORCH_CHECK(not_recorded_.empty(), "cannot be part of a recorded step: ", names);
  }

  /// Performs everything for the first rows of all tensors.
  void run(int64_t rows) {
    TORCH_CHECK(!recording(), "a graph cannot be part of another one");
    TORCH_CHECK(0 < rows && rows <= most_rows_, "the graph has room for ", most_rows_, " rows, not ", rows);
    for (const auto& plan : plans_) plan->forget();
    for (const auto& operation : operations_) operation(rows);
  }

  void add(int64_t rows, std::function<void(int64_t)> operation) {
    TORCH_CHECK(rows == most_rows_, "recorded operations must have ", most_rows_, " rows, got ", rows);
    operations_.push_back(std::move(operation));
  }

  /// Layers that attend to the same batch share a plan.
  std::shared_ptr<StepPlan> plan(const AttentionBatch& batch, int64_t bytes_per_number) {
    for (const auto& plan : plans_)
      if (plan->is_for(batch, bytes_per_number)) return plan;
    return plans_.emplace_back(std::make_shared<StepPlan>(batch, bytes_per_number));
  }

  Arena& arena() { return *arena_; }
  int64_t num_operations() const { return static_cast<int64_t>(operations_.size()); }

 private:
  /// Views are settled while recording, and the operations of this file add themselves.
  static std::unique_ptr<at::ObserverContext> note_what_is_not_recorded(const at::RecordFunction& called) {
    const auto schema = called.operator_schema();
    const std::string name = called.name();
    if (!recording() || name.starts_with("tercet_cpu::")) return nullptr;
    const bool is_view = schema && std::ranges::any_of(schema->returns(), [](const auto& result) {
      return result.alias_info() && !result.alias_info()->isWrite();
    });
    if (!is_view) recording()->not_recorded_.insert(name);
    return nullptr;
  }

  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>();
  std::vector<std::function<void(int64_t)>> operations_;
  std::vector<std::shared_ptr<StepPlan>> plans_;
  int64_t most_rows_ = 0;
  at::CallbackHandle watch_ = 0;
  std::set<std::string> not_recorded_;
};

/// operation(rows): now, or whenever the graph runs that is being recorded.
template <typename F>
void perform(int64_t rows, F operation) {
  if (Graph* graph = Graph::recording())
    graph->add(rows, std::move(operation));
  else
    operation(rows);
}

/// Where an operation leaves its result.
inline at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  Graph* graph = Graph::recording();
  return graph ? graph->arena().empty(sizes, options) : at::empty(sizes, options);
}

inline std::shared_ptr<StepPlan> step_plan(const AttentionBatch& batch, int64_t bytes_per_number) {
  Graph* graph = Graph::recording();
  return graph ? graph->plan(batch, bytes_per_number) : std::make_shared<StepPlan>(batch, bytes_per_number);
}

}  // namespace tercet
