// A pool of threads. They share the items of one job, then those of the next.
//
// On a small machine other processes use the same cores, so a thread may wake up late or lose its core at any time.
// Threads claim items one by one, and the caller waits for claimed items, never for threads: a thread that has not
// woken up costs nothing. (OpenMP's barriers wait for every thread. With one other busy process on two cores, they made
// a decode step 60 times as long.)
#pragma once

#include <ATen/Parallel.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace tercet {

/// Tells the processor that this is a loop that waits.
inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  /// The pool of this process. Its threads start with the first job.
  static ThreadPool& get() {
    // It is never destroyed: when the process exits, other threads may still compute, and the pool's own may be asleep.
    static ThreadPool& pool = *new ThreadPool;
    return pool;
  }

  ThreadPool(const ThreadPool&) = delete;

  /// Threads that compute, the caller included: what `set_num_threads` was given, else as many as torch has.
  int64_t num_threads() const {
    const int64_t given = num_threads_.load(std::memory_order_relaxed);
    return given ? given : at::get_num_threads();
  }

  /// From the next job on. 0: as many as torch has.
  void set_num_threads(int64_t n) { num_threads_.store(n, std::memory_order_relaxed); }

  /// Calls f(item) once for every item of [0, count), on any thread and in any order. Returns when all are finished.
  /// If an item throws, others may be left out, and the exception of one is thrown at the end. While a job runs, other
  /// callers run their items alone.
  template <typename F>
  void run(int64_t count, const F& f) {
    std::unique_lock<std::mutex> lock(job_mutex_, std::try_to_lock);
    if (count <= 1 || !lock.owns_lock() || !start_threads()) {
      for (int64_t item = 0; item < count; ++item) f(item);
      return;
    }
    call_ = [](const void* context, int64_t item) { (*static_cast<const F*>(context))(item); };
    context_ = &f;
    count_ = count;
    unfinished_.store(count, std::memory_order_relaxed);
    ++job_;
    // A thread that sees this value also sees everything above.
    unclaimed_.store(ticket(count), std::memory_order_release);
    // Both are sequentially consistent: a thread that is about to sleep sees the new epoch, or it is counted here.
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) epoch_.notify_all();
    while (run_one_item()) {
    }
    while (unfinished_.load(std::memory_order_acquire) > 0) pause_cpu();
    if (error_) throw_error();
  }

 private:
  /// How long an idle thread spins before it sleeps. It spins through the pauses within a step, tens of microseconds,
  /// since waking a virtual processor often takes longer than the operation. It sleeps between steps, when other
  /// processes need the core.
  static constexpr std::chrono::microseconds kSpinTime{200};

  ThreadPool() {
    pthread_atfork(nullptr, nullptr, [] { get().forget_threads(); });
  }

  /// To be called in a fork, which has none of the threads. They can be neither joined nor destroyed there. Another
  /// thread may have been in a job, whose items are for the process that was forked.
  void forget_threads() {
    unclaimed_ = 0;
    new (&job_mutex_) std::mutex;
    new (&threads_) std::vector<std::thread>;
    new (&error_mutex_) std::mutex;
    new (&error_) std::exception_ptr;
    sleepers_ = 0;
  }

  /// The number of the job in the upper half, the number of unclaimed items in the lower: a thread cannot take one job
  /// for another.
  uint64_t ticket(int64_t unclaimed) const {
    return static_cast<uint64_t>(job_) << 32 | static_cast<uint64_t>(unclaimed);
  }

  /// Claims an item and runs it. False: none is left.
  bool run_one_item() {
    uint64_t seen = unclaimed_.load(std::memory_order_acquire);
    while (seen & 0xFFFFFFFF) {
      if (unclaimed_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        // The job cannot change while one of its items is claimed and not finished.
        try {
          call_(context_, count_ - static_cast<int64_t>(seen & 0xFFFFFFFF));
        } catch (...) {
          keep_error();
        }
        unfinished_.fetch_sub(1, std::memory_order_acq_rel);
        return true;
      }
    }
    return false;
  }

  /// To be called where an exception is caught.
  [[gnu::noinline]] void keep_error() {
    const std::lock_guard lock(error_mutex_);
    error_ = std::current_exception();
  }

  [[noreturn, gnu::noinline]] void throw_error() { std::rethrow_exception(std::exchange(error_, nullptr)); }

  /// The loop of each thread.
  void run_thread() {
    uint32_t seen = epoch_.load();
    while (!stop_.load()) {
      while (run_one_item()) {
      }
      if (!spin_until_epoch_changes(seen)) {
        sleepers_.fetch_add(1);
        epoch_.wait(seen);
        sleepers_.fetch_sub(1);
      }
      seen = epoch_.load();
    }
  }

  /// False: it did not change within kSpinTime.
  bool spin_until_epoch_changes(uint32_t seen) const {
    const auto end = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int i = 0; i < 50; ++i) {
        if (epoch_.load(std::memory_order_acquire) != seen) return true;
        pause_cpu();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  /// Starts or stops threads until there are as many as wanted. False: the caller is the only one.
  bool start_threads() {
    const size_t wanted = num_threads() - 1;
    if (threads_.size() != wanted) {
      stop_threads();
      stop_ = false;
      for (size_t i = 0; i < wanted; ++i) threads_.emplace_back([this] { run_thread(); });
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

  std::mutex job_mutex_;
  std::atomic<int64_t> num_threads_{0};
  std::vector<std::thread> threads_;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  uint32_t job_ = 0;
  std::mutex error_mutex_;
  std::exception_ptr error_;  // of an item of the job
  alignas(64) std::atomic<uint64_t> unclaimed_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace tercet
