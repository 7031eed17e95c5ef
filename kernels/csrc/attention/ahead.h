// Prefetching: the next blocks, while one is computed.
#pragma once

#include "attention/rows.h"
#include "attention/sides.h"
#include "runtime/dispatch.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Blocks between what is computed and what is prefetched, where a tile of K and V would fill the L1.
constexpr int kDistance = 2;

// A block that comes soon, K or V, prefetched bit by bit while another is computed: all at once, its lines
// would wait for each other, and other loads behind them.
struct Ahead {
  const uint8_t* codes = nullptr;
  int64_t bytes = 0;

  // `step`: 0 to 3 are the tile's blocks of K, the next four those of V, then those of the next tile.
  Ahead(const PageLayout& layout, const Tile& tile, int step) : Ahead(layout, tile, step, 0) {}

  // The `distance`-th after it of those that are there: of a tile may be seen two blocks only.
  Ahead(const PageLayout& layout, const Tile& tile, int step, int distance) {
    const auto block = [&](int i) -> const Tile::Block& {
      return i < 2 * kBlocks ? tile.blocks[i % kBlocks] : tile.next[i % kBlocks];
    };
    for (; distance > 0 && ++step < 4 * kBlocks;) distance -= block(step).base != nullptr;
    if (step >= 4 * kBlocks || block(step).base == nullptr) return;
    const auto [base, offset] = block(step);
    const bool is_key = step / kBlocks % 2 == 0;
    codes = is_key ? k_codes(layout, base, offset) : v_codes(layout, base, offset);
    bytes = 16 * (is_key ? layout.k.row_bytes : layout.v.row_bytes);
  }

  // The part-th of `parts` parts.
  __attribute__((always_inline)) void prefetch_part(int part, int parts) const {
    const int64_t size = bytes / parts;
    for (int64_t i = 0; i < size; i += 64) prefetch_byte(part * size + i);
  }
  __attribute__((always_inline)) void prefetch_line(int line) const { prefetch_byte(int64_t{64} * line); }

 private:
  // A step reads it once. Not into the first cache, whose few lines under way are for loads.
  __attribute__((always_inline)) void prefetch_byte(int64_t byte) const {
    if (codes == nullptr) return;
    if (kCore == Core::zen5) __builtin_prefetch(codes + byte, 0, 0);
    else __builtin_prefetch(codes + byte, 0, 2);
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
