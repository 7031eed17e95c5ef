// Memory for results of graphs that run once; it keeps released blocks for the next step.
#pragma once

#include <cstddef>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// Allocates an output's memory, from a kept block if one fits. A block belongs to its array until the array
// is destroyed, so steps in flight never share a block. A system allocator would return large blocks to the
// operating system after every step, and then get pages that must be cleared again.
//
// At most kKeptBytes are kept. A block that was unused for kPatience allocations is freed.
void allocate_for_step(mx::array& output);

// Returns a buffer for an array of `bytes` bytes inside `lines`: first a cache line, then the data. MLX
// stores a size before its buffers' data. Its own allocator's arrays begin 24 bytes after a page boundary, so
// every 64-byte load or store would cross a cache line.
mx::allocator::Buffer buffer_in(char* lines, std::size_t bytes);

// Returns the bytes of kept blocks that no array uses.
std::size_t kept_bytes();

// Frees all kept blocks.
void release_kept();

inline constexpr std::size_t kKeptBytes = std::size_t(128) << 20;
inline constexpr int kPatience = 4096;

}  // namespace octavo
