// The two halves of a vectorized attention kernel. A *key side* computes float scores of queries and a tile's
// K. A *value side* adds a tile's weighted V to float accumulators. Each level has sides for some page
// formats, and attention/loop.h combines any two of them with an online softmax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/attention.h"

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

constexpr int kDirectRows = 4;  // most rows that convert values as they load them; more share a panel
constexpr int kBlocks = kTileTokens / 16;  // a tile is read in blocks of 16 positions of one page

// Addresses of a tile's blocks, and of the next tile's blocks for prefetching.
struct Tile {
  struct Block {
    const uint8_t* base;  // start of the (page, head); null if no row sees the block
    int offset;           // first row inside the page
  };
  Block blocks[kBlocks], next[kBlocks];
  uint64_t bits;  // positions that any row sees; others have arbitrary contents

  uint16_t mask(int block) const { return uint16_t(bits >> (16 * block)); }
};

struct KeySide {
  size_t (*query_bytes)(int dim, int num_rows);
  size_t (*panel_bytes)(int dim);
  void (*load_queries)(const AttendArgs&, const AttendItem&, void* queries);
  // Computes scores[row][64] = query . key; scores of positions with a 0 bit in the tile are arbitrary.
  void (*score)(const PageLayout&, const Tile&, const void* queries, int num_rows, void* panel,
                float* scores);
};

struct ValueSide {
  int (*width)(int dim);  // floats of an accumulator row, a multiple of 16; each side has its own order
  size_t (*panel_bytes)(int dim, int num_rows);
  // Adds weights[row][64] * values to accumulators[row]; positions with a 0 bit in the tile have weight 0.
  void (*accumulate)(const PageLayout&, const Tile&, const float* weights, int num_rows, void* panel,
                     float* accumulators);
  void (*to_natural)(int dim, const float* accumulator, float* row);
};

// Return the sides for a call; null if this instruction set has none for its codes, types or dimensions.
const KeySide* key_side(const AttendArgs& args);
const ValueSide* value_side(const AttendArgs& args);

namespace {

// Whether queries and weights may be rounded to fewer bits, because the queries have only 16 bits. One byte
// suffices for pages of 4 or 5 bits, whose own error is larger; other pages get 15 bits.
inline bool by_bytes(const AttendArgs& args) { return !args.exact && args.queries.type != Float::f32; }

OCTAVO_INLINE void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

OCTAVO_INLINE size_t round_up64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Calls body(first_row, std::integral_constant n) over all rows, with n = 4, 2 or 1 rows at a time.
template <class Body>
OCTAVO_INLINE void for_rows(int num_rows, Body body) {
  int row = 0;
  for (; row + 4 <= num_rows; row += 4) body(row, std::integral_constant<int, 4>{});
  for (; row + 2 <= num_rows; row += 2) body(row, std::integral_constant<int, 2>{});
  if (row < num_rows) body(row, std::integral_constant<int, 1>{});
}

// Calls body(first_row, std::integral_constant n) until all rows are done, with n = 3, 2 or 1 rows at a time.
// A row's results do not depend on n.
template <class Body>
OCTAVO_INLINE void for_row_blocks(int num_rows, Body body) {
  int row = 0;
  while (num_rows - row >= 3 && num_rows - row != 4) body.template operator()<3>(row), row += 3;
  while (num_rows - row >= 2) body.template operator()<2>(row), row += 2;
  if (row < num_rows) body.template operator()<1>(row);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
