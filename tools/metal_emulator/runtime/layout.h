// Memory of a launch: buffers, threadgroup memory and stacks.
//
//   gap | input | gap | input | gap | output | gap | threadgroup memory | gap
//
// The whole layout is one reservation of address space; each gap is kGap unmapped bytes. A buffer ends at its gap
// (up to 16-byte alignment), so that accesses past the end fault even if the kernel is not instrumented.
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
  void lay_out();     // sets the machine's regions, buffers, arena and stacks
  void write_back();  // copies outputs to the host; reports bytes that were never written

 private:
  uint64_t size_ = 0;
  void* base_ = nullptr;
  std::vector<std::pair<void*, uint64_t>> mappings_;

  void* map(uint64_t size, int protection);
  Cell* shadow(uint64_t bytes);
  void place(uint32_t index, uint8_t* space);
};

}  // namespace msl
