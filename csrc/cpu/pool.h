// Threads that share the items of one job after another.
//
// Cores that serve a model on a small machine are shared with the processes around it, so a thread may be late or be
// taken off its core at any time. Items are claimed one by one, and the caller waits for claimed items only, never for
// threads: one that has not woken up costs nothing. (OpenMP's barriers wait for every thread; with one other busy
// process on two cores, a decode step took 60 times as long.)
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace tercet {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  /// The pool of this process. Its threads start with the first job.
  static Pool& get() {
    // It is never destroyed: when the process exits, other threads may still compute, and the pool's own may be asleep.
    static Pool& pool = *new Pool;
    return pool;
  }

  Pool(const Pool&) = delete;

  /// Threads that compute, the caller included: what `set_num_threads` was given, else as many as torch has.
  int64_t num_threads() const {
    const int64_t given = num_threads_.load(std::memory_order_relaxed);
    return given ? given : at::get_num_threads();
  }

  /// From the next job on. 0: as many as torch has.
  void set_num_threads(int64_t n) { num_threads_.store(n, std::memory_order_relaxed); }

  /// f(item) for every item of [0, count), each once, on any thread and in any order; returns when all are done.
  /// f must not throw. Another caller at the same time does its items alone.
  template <typename F>
  void run(int64_t count, const F& f) {
    std::unique_lock<std::mutex> lock(caller_, std::try_to_lock);
    if (count <= 1 || !lock.owns_lock() || !start_threads()) {
      for (int64_t item = 0; item < count; ++item) f(item);
      return;
    }
    call_ = [](const void* context, int64_t item) { (*static_cast<const F*>(context))(item); };
    context_ = &f;
    count_ = count;
    unfinished_.store(count, std::memory_order_relaxed);
    ++job_;
    // Everything above is seen by whoever sees this.
    unclaimed_.store(ticket(count), std::memory_order_release);
    // In one order for all: either a thread that is about to sleep sees the new epoch, or it is seen to sleep.
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) epoch_.notify_all();
    while (do_one()) {
    }
    while (unfinished_.load(std::memory_order_acquire) > 0) relax();
  }

 private:
  // How long an idle thread looks for the next job before it sleeps: the pauses within a step, tens of microseconds,
  // should not cost a wake-up (of a virtual processor, often more than the operation); those between two steps should
  // not cost a core.
  static constexpr std::chrono::microseconds kPatience{200};

  Pool() = default;

  /// Number of the job above, unclaimed items below: a claim cannot mistake one job for the next.
  uint64_t ticket(int64_t unclaimed) const { return static_cast<uint64_t>(job_) << 32 | static_cast<uint64_t>(unclaimed); }

  bool do_one() {
    uint64_t seen = unclaimed_.load(std::memory_order_acquire);
    while (seen & 0xFFFFFFFF) {
      if (unclaimed_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        // The job stays as it is while one of its items is claimed and not finished.
        call_(context_, count_ - static_cast<int64_t>(seen & 0xFFFFFFFF));
        unfinished_.fetch_sub(1, std::memory_order_acq_rel);
        return true;
      }
    }
    return false;
  }

  void work() {
    uint32_t seen = epoch_.load();
    while (!stop_.load()) {
      while (do_one()) {
      }
      if (!wait_for_other_than(seen)) {
        sleepers_.fetch_add(1);
        epoch_.wait(seen);
        sleepers_.fetch_sub(1);
      }
      seen = epoch_.load();
    }
  }

  bool wait_for_other_than(uint32_t seen) const {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    do {
      for (int i = 0; i < 50; ++i) {
        if (epoch_.load(std::memory_order_acquire) != seen) return true;
        relax();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  bool start_threads() {
    const size_t wanted = num_threads() - 1;
    if (threads_.size() != wanted) {
      stop_threads();
      stop_ = false;
      for (size_t i = 0; i < wanted; ++i) threads_.emplace_back([this] { work(); });
    }
    return wanted > 0;
  }

  void stop_threads() {
    stop_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  std::mutex caller_;
  std::atomic<int64_t> num_threads_{0};
  std::vector<std::thread> threads_;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  uint32_t job_ = 0;
  alignas(64) std::atomic<uint64_t> unclaimed_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace tercet
