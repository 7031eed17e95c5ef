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

// Returns at least `bytes`, aligned to a cache line; throws std::bad_alloc. From 256 KiB on the block lies in
// huge pages, except for a remainder at its end. Rows of activations are far apart, and a look-up of a small
// page for each row costs a virtual machine two walks.
Lines allocate_lines(std::size_t bytes);

}  // namespace octavo
