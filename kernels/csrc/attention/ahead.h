// Prefetching of the next blocks while one is computed.
#pragma once

#include "attention/rows.h"
#include "attention/sides.h"
#include "runtime/dispatch.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Prefetch distance for long rows, in blocks of 16 positions. A whole tile of them would fill the L1 cache.
constexpr int kDistance = 2;

// A later block of K or V, prefetched in parts while another block is computed. If all its lines were
// requested at once, they would occupy the fill buffers and delay other loads.
struct Ahead {
  const uint8_t* codes = nullptr;
  int64_t bytes = 0;

  // `step` is a block number: 0 to 3 are the tile's K, 4 to 7 its V, and larger numbers are the next tile's.
  Ahead(const PageLayout& layout, const Tile& tile, int step) : Ahead(layout, tile, step, 0) {}

  // Selects the `distance`-th visible block after `step`, because a tile may have only two visible blocks.
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

  // Prefetches one of `parts` equal parts of the block; `part` counts from 0.
  __attribute__((always_inline)) void prefetch_part(int part, int parts) const {
    const int64_t size = bytes / parts;
    for (int64_t i = 0; i < size; i += 64) prefetch_byte(part * size + i);
  }
  __attribute__((always_inline)) void prefetch_line(int line) const { prefetch_byte(int64_t{64} * line); }

 private:
  // Prefetches into L2 only: a step reads this line once, and L1's few fill buffers are needed for loads.
  __attribute__((always_inline)) void prefetch_byte(int64_t byte) const {
    if (codes == nullptr) return;
    if (kCore == Core::zen5) __builtin_prefetch(codes + byte, 0, 0);
    else __builtin_prefetch(codes + byte, 0, 2);
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
