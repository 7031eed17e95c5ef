// Memory that kernels compute in: whole cache lines, large blocks in huge pages where the system has them.
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

// At least `bytes`, from a cache line on; std::bad_alloc. From 256 KiB on they lie in huge pages but for what
// is left over at their end: rows of activations are far apart, and a look-up of a small page for each costs
// a virtual machine two walks.
Lines allocate_lines(std::size_t bytes);

}  // namespace octavo
