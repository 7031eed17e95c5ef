// Memory of the results of graphs that run once: blocks that were given back are kept for the next step.
#pragma once

#include <cstddef>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// Gives an output memory, of a kept block if one fits. A block belongs to its array until that is gone, so
// steps in flight never share one. A system allocator gives large blocks back to the system and takes them
// anew in every step; the kernel then clears each of their pages.
//
// At most kKeptBytes are kept, and none that no array has needed for kPatience allocations.
void allocate_for_step(mx::array& output);

// The buffer of an array of `bytes` whose data begin one cache line after `lines`, which has room for both.
// MLX keeps a size in front of the data of its buffers, and arrays from its own allocator begin 24 bytes into
// a page, so that half of what vectors of 64 bytes load and store would lie in two lines.
mx::allocator::Buffer buffer_in(char* lines, std::size_t bytes);

// Bytes of kept blocks that no array has now.
std::size_t kept_bytes();

// Gives all of them back.
void release_kept();

inline constexpr std::size_t kKeptBytes = std::size_t(128) << 20;
inline constexpr int kPatience = 4096;

}  // namespace octavo
