#include "program/encoder.h"

#include <algorithm>
#include <atomic>

#include "program/step_memory.h"

namespace octavo {
namespace {

std::atomic<int64_t> kernel_nanoseconds{0};
thread_local Recording* current_recording = nullptr;

}  // namespace

void Arena::reuse_all() {
  ++recording_;
  for (Block& block : blocks_) block.used = false;
}

void Arena::allocate(mx::array& output) {
  const std::size_t bytes = std::max<std::size_t>(output.nbytes(), 64);
  std::size_t best = blocks_.size();
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const bool fits = !blocks_[i].used && blocks_[i].size >= bytes;
    if (fits && (best == blocks_.size() || blocks_[i].size < blocks_[best].size)) best = i;
  }
  if (best == blocks_.size()) blocks_.push_back({mx::allocator::malloc(bytes), bytes, false});
  blocks_[best].used = true;
  output.set_data(mx::array::Data(blocks_[best].memory.buffer(),
                                  [arena = shared_from_this(), best, recording = recording_](
                                      mx::allocator::Buffer) { arena->release(best, recording); }));
}

std::size_t Arena::nbytes() const {
  std::size_t bytes = 0;
  for (const Block& block : blocks_) bytes += block.size;
  return bytes;
}

void Arena::release(std::size_t block, int recording) {
  if (recording == recording_) blocks_[block].used = false;
}

Recording::Recording(std::shared_ptr<Arena> arena) : arena(std::move(arena)) {
  this->arena->reuse_all();
  current_recording = this;
}

Recording::~Recording() { current_recording = nullptr; }

Recording* Recording::current() { return current_recording; }

KernelTime::~KernelTime() {
  const auto passed = std::chrono::steady_clock::now() - began_;
  kernel_nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
}

double KernelTime::seconds() { return static_cast<double>(kernel_nanoseconds.load()) * 1e-9; }

void allocate(mx::array& output) {
  if (Recording* const recording = Recording::current()) recording->arena->allocate(output);
  else allocate_for_step(output);
}

}  // namespace octavo
