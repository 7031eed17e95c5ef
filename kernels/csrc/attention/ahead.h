// Prefetching: what of the next blocks is asked for while one is computed.
#pragma once

#include "attention/rows.h"
#include "attention/sides.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A block that comes soon, K or V, asked for bit by bit while another is computed: all at once, its lines
// would wait for each other, and other loads behind them.
struct Ahead {
  const uint8_t* codes = nullptr;
  int64_t bytes = 0;

  // `step`: 0 to 3 are the tile's blocks of K, the next four those of V, then those of the next tile.
  Ahead(const PageLayout& layout, const Tile& tile, int step) {
    const Tile::Block& block = step < 2 * kBlocks ? tile.blocks[step % kBlocks] : tile.next[step % kBlocks];
    if (block.base == nullptr) return;
    const bool is_key = step / kBlocks % 2 == 0;
    codes = is_key ? k_codes(layout, block.base, block.offset) : v_codes(layout, block.base, block.offset);
    bytes = 16 * (is_key ? layout.k.row_bytes : layout.v.row_bytes);
  }

  // The part-th of `parts` parts.
  OCTAVO_INLINE void ask(const Ahead& ahead, int part, int parts) {
    const int64_t size = ahead.bytes / parts;
    if (ahead.codes != nullptr) prefetch(ahead.codes + part * size, size);
  }
  __attribute__((always_inline)) void ask_line(int line) const {
    if (codes != nullptr) __builtin_prefetch(codes + 64 * line);
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
