// See layout.h.
#include "layout.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace msl {
namespace {

uint64_t pages(uint64_t bytes) { return (std::max<uint64_t>(bytes, 1) + 0xFFFF) & ~uint64_t{0xFFFF}; }

void check_written(uint32_t index) {
  const MslBuffer& buffer = machine.launch->buffers[index];
  const Cell* cells = machine.regions[index].shadow;
  uint64_t missing = 0, first = 0;
  for (uint64_t i = 0; i < buffer.bytes; ++i) {
    if (cells[i].is_initialised) continue;
    if (missing++ == 0) first = i;
  }
  if (!missing) return;
  const int no_line = -1 - static_cast<int>(index);  // differs for each output, so that each gets a report
  report(false, 0, 0, no_line, "output '%s': %llu of %llu bytes never written (first at byte %llu)",
         buffer.name, static_cast<unsigned long long>(missing), static_cast<unsigned long long>(buffer.bytes),
         static_cast<unsigned long long>(first));
}

}  // namespace

bool Memory::reserve() {
  const MslLaunch& launch = *machine.launch;
  for (uint32_t i = 0; i < launch.num_buffers; ++i) size_ += kGap + pages(launch.buffers[i].bytes);
  size_ += 2 * kGap;
  base_ = map(size_, PROT_NONE);
  return base_ != MAP_FAILED;
}

Memory::~Memory() {
  for (const auto& [address, size] : mappings_) munmap(address, size);
}

void Memory::lay_out() {
  const MslLaunch& launch = *machine.launch;
  uint64_t offset = kGap;
  for (uint32_t i = 0; i < launch.num_buffers; ++i) {
    place(i, static_cast<uint8_t*>(base_) + offset);
    offset += pages(launch.buffers[i].bytes) + kGap;
  }
  machine.arena = static_cast<uint8_t*>(base_) + offset;
  mprotect(machine.arena, kArenaBytes, PROT_READ | PROT_WRITE);
  machine.arena_shadow = launch.checks ? shadow(kArenaBytes) : nullptr;
  const uint64_t num_threads =
      uint64_t{launch.threadgroup[0]} * launch.threadgroup[1] * launch.threadgroup[2];
  machine.stacks = static_cast<uint8_t*>(map(num_threads * kStackBytes, PROT_READ | PROT_WRITE));
}

void Memory::write_back() {
  const MslLaunch& launch = *machine.launch;
  for (uint32_t i = 0; i < launch.num_buffers; ++i) {
    const MslBuffer& buffer = launch.buffers[i];
    if (buffer.kind == kMslInput) continue;
    memcpy(buffer.host, machine.buffers[i], buffer.bytes);
    if (buffer.kind == kMslOutput && launch.checks && !machine.is_aborted) check_written(i);
  }
}

void* Memory::map(uint64_t size, int protection) {
  void* address = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address != MAP_FAILED) mappings_.push_back({address, size});
  return address;
}

Cell* Memory::shadow(uint64_t bytes) {
  return static_cast<Cell*>(map((bytes + 1) * sizeof(Cell), PROT_READ | PROT_WRITE));
}

void Memory::place(uint32_t index, uint8_t* space) {
  const MslBuffer& buffer = machine.launch->buffers[index];
  const uint64_t room = pages(buffer.bytes);
  uint8_t* data = space + ((room - buffer.bytes) & ~uint64_t{15});
  mprotect(space, room, PROT_READ | PROT_WRITE);
  if (buffer.kind == kMslOutput) {
    memset(data, 0xFF, buffer.bytes);  // NaN in every float type
  } else {
    memcpy(data, buffer.host, buffer.bytes);
  }
  if (buffer.kind == kMslInput) mprotect(space, room, PROT_READ);
  const bool is_tracked = buffer.kind != kMslInput && machine.launch->checks;
  Cell* cells = is_tracked ? shadow(buffer.bytes) : nullptr;
  if (cells && buffer.kind == kMslInitialisedOutput) {
    for (uint64_t i = 0; i < buffer.bytes; ++i) cells[i].is_initialised = true;
  }
  const auto begin = reinterpret_cast<uint64_t>(data);
  machine.regions.push_back({begin,
                             begin + buffer.bytes,
                             buffer.name,
                             cells,
                             buffer.valid,
                             index,
                             buffer.kind == kMslInput,
                             {},
                             {}});
  machine.buffers[index] = data;
}

}  // namespace msl
