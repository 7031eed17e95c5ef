#include "pages/pool_memory.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <thread>

#include "runtime/threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#if !defined(MADV_POPULATE_WRITE)  // Linux 5.14; the C library's headers may be older
#define MADV_POPULATE_WRITE 23
#endif
#endif

namespace octavo {
namespace {

using Memory = std::shared_ptr<Buffer>;

constexpr std::size_t kBackground = std::size_t{8} << 20;  // smaller pools are taken when they are used
constexpr std::size_t kSlice = std::size_t{2} << 20;       // at once: whoever else maps memory waits for it

#if defined(MADV_POPULATE_WRITE)

constexpr auto kPause = std::chrono::milliseconds(50);
constexpr auto kBeside = std::chrono::milliseconds(15);  // between two slices, while kernels run, at least
constexpr int kRest = 9;  // times what a slice took: virtual machines may take 5 ms where others take 0.3

struct Taken {  // as far as the system has backed it with pages
  Memory memory;
  std::size_t bytes;
};

struct Queue {
  std::mutex mutex;
  std::deque<Taken> waiting;
  std::size_t num_pushed = 0;
  bool running = false;
};

// Never destroyed: the thread may outlive the process's statics.
Queue& queue() {
  static Queue* const instance = new Queue;
  return *instance;
}

// Mapping memory waits for every slice that is being taken, so those who map it in a row are let go first:
// returns when nobody has for as long.
void wait_for_pause() {
  std::size_t before = 0, now = 0;
  do {
    before = now;
    std::this_thread::sleep_for(kPause);
    const std::lock_guard<std::mutex> guard(queue().mutex);
    now = queue().num_pushed;
  } while (now != before);
}

// Makes the system back memory with pages, leaving its contents as they are, a slice of each pool in turn,
// for a step writes to all of them. Memory that nobody else holds any more is let go. Kernels that do not
// know this advice back pages when they are first used. While kernels run, only one slice is taken in each
// pause, so that they keep nine tenths of the core.
void take_all() {
  wait_for_pause();
  uint64_t seen = num_parallel_jobs();
  while (true) {
    Taken next;
    {
      const std::lock_guard<std::mutex> guard(queue().mutex);
      if (queue().waiting.empty()) {
        queue().running = false;
        return;
      }
      next = std::move(queue().waiting.front());
      queue().waiting.pop_front();
    }
    if (next.memory.use_count() == 1) continue;
    const std::size_t bytes = std::min(kSlice, next.memory->size() - next.bytes);
    const auto began = std::chrono::steady_clock::now();
    if (madvise(next.memory->data() + next.bytes, bytes, MADV_POPULATE_WRITE) != 0) continue;
    next.bytes += bytes;
    if (next.bytes < next.memory->size()) {
      const std::lock_guard<std::mutex> guard(queue().mutex);
      queue().waiting.push_back(std::move(next));
    }
    if (const uint64_t now = num_parallel_jobs(); now != seen) {
      seen = now;
      const auto took = std::chrono::steady_clock::now() - began;
      std::this_thread::sleep_for(std::max<std::chrono::steady_clock::duration>(kBeside, kRest * took));
    }
  }
}

void take_in_background(Memory memory) {
  const std::lock_guard<std::mutex> guard(queue().mutex);
  queue().waiting.push_back({std::move(memory), 0});
  ++queue().num_pushed;
  if (queue().running) return;
  queue().running = true;
  std::thread(take_all).detach();
}

#endif

}  // namespace

std::shared_ptr<Buffer> pool_memory(std::size_t bytes) {
  auto memory = std::make_shared<Buffer>(bytes);
#if defined(MADV_POPULATE_WRITE)
  if (bytes >= kBackground) take_in_background(memory);
#endif
  return memory;
}

bool backing_pools() {
#if defined(MADV_POPULATE_WRITE)
  const std::lock_guard<std::mutex> guard(queue().mutex);
  return queue().running;
#else
  return false;
#endif
}

}  // namespace octavo
