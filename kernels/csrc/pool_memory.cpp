#include "pool_memory.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#if !defined(MADV_POPULATE_WRITE)  // Linux 5.14; the C library's headers may be older
#define MADV_POPULATE_WRITE 23
#endif
#endif

namespace octavo {
namespace {

using Memory = std::shared_ptr<Buffer>;

constexpr std::size_t kSlice = std::size_t{8} << 20;

#if defined(MADV_POPULATE_WRITE)

// Makes the system back the memory with pages, leaving its contents as they are, until nobody else
// holds it any more. Kernels that do not know this advice back pages when they are first used.
void take(const Memory& memory) {
  for (std::size_t at = 0; at < memory->size() && memory.use_count() > 1; at += kSlice)
    if (madvise(memory->data() + at, std::min(kSlice, memory->size() - at), MADV_POPULATE_WRITE) != 0) return;
}

struct Queue {
  std::mutex mutex;
  std::vector<Memory> waiting;
  bool running = false;
};

// Never destroyed: the thread may outlive the process's statics.
Queue& queue() {
  static Queue* const instance = new Queue;
  return *instance;
}

void take_all() {
  while (true) {
    Memory memory;
    {
      const std::lock_guard<std::mutex> guard(queue().mutex);
      if (queue().waiting.empty()) {
        queue().running = false;
        return;
      }
      memory = std::move(queue().waiting.back());
      queue().waiting.pop_back();
    }
    take(memory);
  }
}

void take_in_background(Memory memory) {
  const std::lock_guard<std::mutex> guard(queue().mutex);
  queue().waiting.push_back(std::move(memory));
  if (queue().running) return;
  queue().running = true;
  std::thread(take_all).detach();
}

#endif

}  // namespace

std::shared_ptr<Buffer> pool_memory(std::size_t bytes) {
  auto memory = std::make_shared<Buffer>(bytes);
#if defined(MADV_POPULATE_WRITE)
  if (bytes >= kSlice) take_in_background(memory);
#endif
  return memory;
}

}  // namespace octavo
