#include "runtime/threads.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include "runtime/lines.h"

namespace octavo {
namespace {

constexpr int kMaxThreads = 1024;
constexpr auto kSpin = std::chrono::microseconds(50);  // longer than pauses between a step's operations

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One thread's remaining items of a job. The thread itself takes items from the front, others from the end.
class alignas(64) Share {
 public:
  // Packs items [first, end) into one word, so that they change atomically.
  static uint64_t items(int64_t first, int64_t end) {
    return static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(first);
  }

  void set(uint64_t items) { left_.store(items, std::memory_order_relaxed); }

  // Takes the first item and returns it; -1 if none is left.
  int take() {
    uint64_t left = left_.load(std::memory_order_relaxed);
    while (first(left) < end(left))
      if (left_.compare_exchange_weak(left, left + 1, std::memory_order_relaxed)) return first(left);
    return -1;
  }

  // Takes the later half of the items, rounded up, and returns them packed; 0 if none is left.
  uint64_t take_half() {
    uint64_t left = left_.load(std::memory_order_relaxed);
    while (first(left) < end(left)) {
      const int middle = first(left) + (end(left) - first(left)) / 2;
      if (left_.compare_exchange_weak(left, items(first(left), middle), std::memory_order_relaxed))
        return items(middle, end(left));
    }
    return 0;
  }

 private:
  static int first(uint64_t items) { return static_cast<int>(items & 0xffffffff); }
  static int end(uint64_t items) { return static_cast<int>(items >> 32); }

  std::atomic<uint64_t> left_{0};
};

class ThreadPool {
 public:
  explicit ThreadPool(int n) { start(n); }

  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int n) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (n == size()) return;
    stop();
    start(n);
  }

  void run(int items, void (*task)(void*, int), void* context) {
    if (size() == 1 || items <= 1) {
      for (int item = 0; item < items; ++item) task(context, item);
      return;
    }
    std::lock_guard<std::mutex> guard(mutex_);  // one job at a time, although several streams may call
    task_ = task;
    context_ = context;
    deal(items);
    wanted_.store(static_cast<uint32_t>(items - 1), std::memory_order_relaxed);
    state_.store(kOpen, std::memory_order_seq_cst);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) epoch_.notify_all();
    work(0);
    // Closes the job: helpers that are not yet inside stay outside, and the caller waits for helpers inside.
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; state_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < 2000) relax();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31;  // bit of state_; the other bits count helpers inside

  void start(int n) {
    quit_.store(false);
    const uint32_t epoch = epoch_.load();
    shares_ = std::make_unique<Share[]>(n);
    for (int i = 1; i < n; ++i) helpers_.emplace_back([this, i, epoch] { help(i, epoch); });
    size_.store(n);
  }

  void stop() {
    quit_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
  }

  // Gives each thread consecutive items. Their memory is usually adjacent, so what a thread prefetches beyond
  // the end of an item is often its own next item.
  void deal(int items) {
    const int threads = size(), shares = std::min(threads, items);
    for (int i = 0; i < threads; ++i)
      shares_[i].set(i < shares ? Share::items(int64_t{items} * i / shares, int64_t{items} * (i + 1) / shares)
                                : 0);
  }

  void work(int self) {
    do
      for (int item; (item = shares_[self].take()) >= 0;) task_(context_, item);
    while (steal(self));
  }

  // Steals half of another thread's remaining items; returns false if no thread has any left.
  bool steal(int self) {
    const int threads = size();
    for (int i = 1; i < threads; ++i) {
      const uint64_t half = shares_[(self + i) % threads].take_half();
      if (half == 0) continue;
      shares_[self].set(half);
      return true;
    }
    return false;
  }

  // Joins the job as a helper; returns false if the job is closed, or if every item has a thread already. So
  // a late helper does not delay the job.
  bool enter() {
    uint32_t state = state_.load(std::memory_order_acquire);
    while ((state & kOpen) && (state & ~kOpen) < wanted_.load(std::memory_order_relaxed))
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  // Returns once the epoch differs from `seen`.
  uint32_t await(uint32_t seen) {
    const auto start = std::chrono::steady_clock::now();
    for (int spins = 1;; ++spins) {
      const uint32_t epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != seen) return epoch;
      relax();
      if (spins % 16 == 0 && std::chrono::steady_clock::now() - start > kSpin) break;
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    epoch_.wait(seen, std::memory_order_seq_cst);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return epoch_.load(std::memory_order_acquire);
  }

  void help(int self, uint32_t seen) {
    while (true) {
      seen = await(seen);
      if (quit_.load()) return;
      if (!enter()) continue;
      work(self);
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::atomic<uint32_t> epoch_{0};  // number of jobs so far, on which helpers spin and then sleep
  std::atomic<uint32_t> state_{0};
  std::atomic<uint32_t> wanted_{0};  // number of helpers that can get an item
  std::atomic<int> sleepers_{0};
  std::unique_ptr<Share[]> shares_;  // the caller's, then each helper's; written while no helper is in a job
  void (*task_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> quit_{false};
  std::atomic<int> size_{1};
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
};

// Never destroyed, because MLX's streams may still run when the process destroys its static objects.
ThreadPool& pool() {
  static ThreadPool* const instance = new ThreadPool(default_threads());
  return *instance;
}

struct Scratch {
  Lines lines;
  std::size_t size = 0;
};

}  // namespace

int num_threads() { return pool().size(); }

void set_threads(int n) {
  if (n < 1 || n > kMaxThreads)
    throw std::invalid_argument("threads must lie in [1, 1024], got " + std::to_string(n));
  pool().resize(n);
}

int default_threads() {
  if (const char* text = std::getenv("OCTAVO_CPU_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    errno = 0;
    const long n = std::strtol(text, &end, 10);
    if (errno != 0 || *end != '\0' || n < 1 || n > kMaxThreads)
      throw std::invalid_argument("OCTAVO_CPU_THREADS must be a whole number from 1 to 1024, got \"" +
                                  std::string(text) + "\"; unset it to use every CPU");
    return static_cast<int>(n);
  }
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int>(n) : 1;
}

void run_parallel(int items, void (*task)(void*, int), void* context) { pool().run(items, task, context); }

void* thread_scratch(std::size_t bytes, int slot) {
  static thread_local Scratch slots[4];
  Scratch& scratch = slots[slot];
  if (scratch.size < bytes) {
    scratch = {};  // the old buffer is freed first, so that both do not exist at once
    scratch = {allocate_lines(bytes), bytes};
  }
  return scratch.lines.get();
}

}  // namespace octavo
