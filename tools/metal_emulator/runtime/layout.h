// Where buffers, threadgroup memory and stacks lie, for the life of a launch.
//
//   gap | input | gap | input | gap | output | gap | threadgroup memory | gap
//
// One reservation; each gap is kGap of unmapped space. A buffer ends at its gap (up to 16-byte alignment),
// so that even kernels that are not instrumented fault beyond it.
#pragma once
#include <utility>
#include <vector>

#include "machine.h"

namespace msl {

class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  bool reserve();     // false: out of address space
  void lay_out();     // fills machine's regions, buffers, arena and stacks
  void write_back();  // outputs to the host; reports what was never written

 private:
  uint64_t size_ = 0;
  void* base_ = nullptr;
  std::vector<std::pair<void*, uint64_t>> mappings_;

  void* map(uint64_t size, int protection);
  Cell* shadow(uint64_t bytes);
  void place(uint32_t index, uint8_t* space);
};

}  // namespace msl
