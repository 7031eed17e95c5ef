// The two halves of a vectorized attention kernel. A *key side* computes float scores of a tile's K and the
// queries. A *value side* adds a tile's weighted V to float accumulators. A level has either for some kinds
// of page codes, and attention/loop.h joins any two with an online softmax.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

constexpr int kDirectRows = 4;  // up to this many rows multiply directly what they read; more share a panel
constexpr int kBlocks = kTileTokens / 16;  // a tile is read in blocks of 16 positions of one page

// Addresses of a tile's blocks, and those of the next tile for prefetching.
struct Tile {
  struct Block {
    const uint8_t* base;  // of the (page, head); null if no position of the block is visible
    int offset;           // first row inside the page
  };
  Block blocks[kBlocks], next[kBlocks];
  uint64_t bits;  // positions of the tile that some row sees; others may hold anything

  uint16_t mask(int block) const { return uint16_t(bits >> (16 * block)); }
};

struct KeySide {
  size_t (*query_bytes)(int dim, int num_rows);
  size_t (*panel_bytes)(int dim);
  void (*load_queries)(const AttendArgs&, const AttendItem&, void* queries);
  // scores[row][64] = query . key, except for 0-bits of the tile
  void (*score)(const PageLayout&, const Tile&, const void* queries, int num_rows, void* panel,
                float* scores);
};

struct ValueSide {
  int (*width)(int dim);  // floats of an accumulator, a multiple of 16, in the side's own order
  size_t (*panel_bytes)(int dim, int num_rows);
  // accumulators[row] += sum of weights[row][64] * values; weights of 0-bits of the tile are 0
  void (*accumulate)(const PageLayout&, const Tile&, const float* weights, int num_rows, void* panel,
                     float* accumulators);
  void (*to_natural)(int dim, const float* accumulator, float* row);
};

// The sides of a call, or null if the level has none for its codes, types or dimensions.
const KeySide* key_side(const AttendArgs& args);
const ValueSide* value_side(const AttendArgs& args);

namespace {

// Whether bytes suffice: 16-bit rows carry no more than bytes keep, compared with the error of 4-bit pages,
// and no more than 15 bits with other pages.
inline bool by_bytes(const AttendArgs& args) { return !args.exact && args.queries.type != Float::f32; }

OCTAVO_INLINE void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

OCTAVO_INLINE size_t round_up64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Calls body(first_row, std::integral_constant n) over all rows, n of 3, 2 or 1 rows at a time. A row's
// computation does not depend on n.
template <class Body>
OCTAVO_INLINE void for_row_blocks(int num_rows, Body body) {
  int row = 0;
  while (num_rows - row >= 3 && num_rows - row != 4) body.template operator()<3>(row), row += 3;
  while (num_rows - row >= 2) body.template operator()<2>(row), row += 2;
  if (row < num_rows) body.template operator()<1>(row);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
