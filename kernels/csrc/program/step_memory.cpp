#include "program/step_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "runtime/lines.h"

namespace octavo {
namespace {

constexpr std::size_t kSmallest = std::size_t(64) << 10;  // the system allocator keeps smaller blocks itself

// Rounds up to one of eight block sizes per power of two, so that steps of similar lengths share blocks.
std::size_t block_size(std::size_t bytes) {
  std::size_t step = kSmallest / 8;
  while (step * 16 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

class KeptBlocks {
 public:
  Lines take(std::size_t size) {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      ++time_;
      for (std::size_t i = blocks_.size(); i-- > 0;) {  // latest first, because it may still be in a cache
        if (blocks_[i].size != size) continue;
        Lines memory = std::move(blocks_[i].memory);
        bytes_ -= size;
        blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(i));
        return memory;
      }
    }
    return allocate_lines(kLine + size);
  }

  void give(Lines memory, std::size_t size) {
    const std::lock_guard<std::mutex> guard(mutex_);
    blocks_.push_back({std::move(memory), size, time_});
    bytes_ += size;
    while (!blocks_.empty() && (bytes_ > kKeptBytes || time_ - blocks_.front().since > kPatience))
      release_oldest();
  }

  void release_all() {
    const std::lock_guard<std::mutex> guard(mutex_);
    while (!blocks_.empty()) release_oldest();
  }

  std::size_t bytes() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return bytes_;
  }

 private:
  struct Block {
    Lines memory;  // one cache line, then `size` bytes
    std::size_t size;
    int64_t since;  // allocations made when it was released
  };

  void release_oldest() {
    bytes_ -= blocks_.front().size;
    blocks_.erase(blocks_.begin());
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;  // in the order in which they were released
  std::size_t bytes_ = 0;
  int64_t time_ = 0;
};

// Never destroyed, because arrays may outlive the process's static objects.
KeptBlocks& kept() {
  static KeptBlocks* const blocks = new KeptBlocks;
  return *blocks;
}

}  // namespace

void allocate_for_step(mx::array& output) {
  const std::size_t bytes = output.nbytes();
  if (bytes < kSmallest || bytes > kKeptBytes) return output.set_data(mx::allocator::malloc(bytes));
  const std::size_t size = block_size(bytes);
  char* const memory = kept().take(size).release();
  output.set_data(mx::array::Data(
      buffer_in(memory, size), [memory, size](mx::allocator::Buffer) { kept().give(Lines(memory), size); }));
}

// MLX's data begin behind a size; raw_ptr() tells the distance.
mx::allocator::Buffer buffer_in(char* lines, std::size_t bytes) {
  mx::allocator::Buffer probe(lines);
  const std::ptrdiff_t front = static_cast<char*>(probe.raw_ptr()) - lines;
  const mx::allocator::Buffer buffer(lines + kLine - front);
  std::memcpy(lines + kLine - front, &bytes, std::min<std::size_t>(front, sizeof bytes));
  return buffer;
}

std::size_t kept_bytes() { return kept().bytes(); }

void release_kept() { kept().release_all(); }

}  // namespace octavo
