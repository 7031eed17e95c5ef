// Memory for kernels: whole cache lines, with huge pages for large blocks if the system has them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace octavo {

inline constexpr std::size_t kLine = 64;  // bytes of a cache line

struct FreeLines {
  void operator()(char* memory) const { std::free(memory); }
};
using Lines = std::unique_ptr<char, FreeLines>;

// Returns at least `bytes` bytes, aligned to a cache line; throws std::bad_alloc. Blocks of 256 KiB or more
// use huge pages, except for a remainder at the end. Rows of activations are far apart, so small pages would
// cost a TLB miss for each row, and in a virtual machine two page walks.
Lines allocate_lines(std::size_t bytes);

}  // namespace octavo
