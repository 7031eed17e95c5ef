// Memory for results of graphs that run once: released blocks are kept for the next step.
#pragma once

#include <cstddef>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// Allocates an output's memory, from a kept block if one fits. A block belongs to its array until that is
// gone, so steps in flight never share one. A system allocator would return large blocks to the system and
// request them again in every step, and the kernel would clear each of their pages.
//
// At most kKeptBytes are kept, and no block that was unused for kPatience allocations.
void allocate_for_step(mx::array& output);

// Returns the buffer of an array of `bytes` whose data begin one cache line after `lines`, which has space
// for both. MLX keeps a size in front of its buffers' data, and arrays from its own allocator begin 24 bytes
// into a page, so half of all 64-byte loads and stores would cross a cache line.
mx::allocator::Buffer buffer_in(char* lines, std::size_t bytes);

// Bytes of kept blocks that no array uses now.
std::size_t kept_bytes();

// Frees all kept blocks.
void release_kept();

inline constexpr std::size_t kKeptBytes = std::size_t(128) << 20;
inline constexpr int kPatience = 4096;

}  // namespace octavo
