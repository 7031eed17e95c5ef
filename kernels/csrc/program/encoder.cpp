#include "program/encoder.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "mlx/backend/cpu/encoder.h"
#include "program/step_memory.h"

namespace octavo {
namespace {

constexpr std::size_t kSmallestSegment = std::size_t{1} << 20;

std::atomic<int64_t> kernel_nanoseconds{0};
thread_local Capture* current_capture = nullptr;

}  // namespace

void Arena::reuse_all() {
  ++capture_;
  for (Segment& segment : segments_) segment.free = {{0, segment.size}};
}

void Arena::allocate(mx::array& output) {
  const std::size_t bytes = output.nbytes();
  const Place place = take(kLine + (bytes + kLine - 1) / kLine * kLine);
  char* const lines = segments_[place.segment].memory.get() + place.range.begin;
  output.set_data(mx::array::Data(buffer_in(lines, bytes),
                                  [arena = shared_from_this(), place, capture = capture_](
                                      mx::allocator::Buffer) { arena->release(place, capture); }));
}

// Takes the first free range that is large enough, and searches the latest and largest segment first.
Arena::Place Arena::take(std::size_t bytes) {
  for (std::size_t i = segments_.size(); i-- > 0;)
    for (auto range = segments_[i].free.begin(); range != segments_[i].free.end(); ++range) {
      if (range->end - range->begin < bytes) continue;
      const Range taken{range->begin, range->begin + bytes};
      range->begin = taken.end;
      if (range->begin == range->end) segments_[i].free.erase(range);
      segments_[i].used = std::max(segments_[i].used, taken.end);
      return {i, taken};
    }
  std::size_t size = std::max(bytes, kSmallestSegment);
  for (const Segment& segment : segments_) size += segment.size;
  segments_.push_back({allocate_lines(size), size, 0, {{0, size}}});
  return take(bytes);
}

std::size_t Arena::nbytes() const {
  std::size_t bytes = 0;
  for (const Segment& segment : segments_) bytes += segment.used;
  return bytes;
}

void Arena::release(const Place& place, int capture) {
  if (capture != capture_) return;
  std::vector<Range>& free = segments_[place.segment].free;
  auto next = std::lower_bound(free.begin(), free.end(), place.range.begin,
                               [](const Range& range, std::size_t begin) { return range.begin < begin; });
  next = free.insert(next, place.range);
  if (next + 1 != free.end() && next->end == next[1].begin) {
    next->end = next[1].end;
    free.erase(next + 1);
  }
  if (next != free.begin() && next[-1].end == next->begin) {
    next[-1].end = next->end;
    free.erase(next);
  }
}

Capture::Capture(std::shared_ptr<Arena> arena) : arena(std::move(arena)) {
  this->arena->reuse_all();
  current_capture = this;
}

Capture::~Capture() { current_capture = nullptr; }

Capture* Capture::current() { return current_capture; }

KernelTime::~KernelTime() {
  const auto passed = std::chrono::steady_clock::now() - began_;
  kernel_nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
}

double KernelTime::seconds() { return static_cast<double>(kernel_nanoseconds.load()) * 1e-9; }

void allocate(mx::array& output) {
  if (Capture* const capture = Capture::current()) capture->arena->allocate(output);
  else allocate_for_step(output);
}

void Encoder::dispatch(std::function<void()> task) {
  if (Capture* const capture = Capture::current()) capture->tasks.push_back(std::move(task));
  else
    mx::cpu::get_command_encoder(stream_).dispatch([task = std::move(task)] {
      const KernelTime timed;
      task();
    });
}

void Encoder::add_temporary(mx::array array) {
  if (Capture* const capture = Capture::current()) capture->temporaries.push_back(std::move(array));
  else mx::cpu::get_command_encoder(stream_).add_temporary(std::move(array));
}

}  // namespace octavo
