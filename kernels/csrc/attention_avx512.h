// The two halves of the AVX-512 attention kernel. A *key side* turns a tile's K and the queries into
// float scores, a *value side* adds a tile's V, weighted, to float accumulators; either exists per kind
// of page code, and attention_avx512.cpp joins any two around an online softmax.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "attention.h"

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

constexpr int kBlocks = kTileTokens / 16;  // a tile is read in blocks of 16 positions of one page

// Where a tile's blocks lie, and those of the tile after it, to be prefetched meanwhile.
struct Tile {
  struct Block {
    const uint8_t* base;  // of the (page, head); null where no position of the block is visible
    int offset;           // first row inside the page
  };
  Block blocks[kBlocks], next[kBlocks];
  uint64_t bits;  // positions of the tile that some row sees; the others may hold anything

  __mmask16 mask(int block) const { return __mmask16(bits >> (16 * block)); }
};

struct KeySide {
  size_t (*query_bytes)(int dim, int num_rows);
  size_t (*panel_bytes)(int dim);
  void (*load_queries)(const AttendArgs&, const AttendItem&, void* queries);
  // scores[row][64] = query . key, 0-bits of the tile excepted
  void (*score)(const PageLayout&, const Tile&, const void* queries, int num_rows, void* panel,
                float* scores);
};

struct ValueSide {
  int (*width)(int dim);  // floats of an accumulator, a multiple of 16, in an order of the side's own
  size_t (*panel_bytes)(int dim, int num_rows);
  // accumulators[row] += sum of weights[row][64] * values; weights of 0-bits of the tile are 0
  void (*accumulate)(const PageLayout&, const Tile&, const float* weights, int num_rows, void* panel,
                     float* accumulators);
  void (*to_natural)(int dim, const float* accumulator, float* row);
};

extern const KeySide fp4_keys, bf16_keys;
extern const ValueSide fp4_values, bf16_values;

namespace {

// Rows of 32-bit words to columns: lane i of word j becomes lane j of word i.
OCTAVO_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

OCTAVO_INLINE void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
}

OCTAVO_INLINE size_t round_up64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// body(first_row, std::integral_constant n) over all rows, n of 3, 2 or 1 rows at a time. What a row
// computes does not depend on n.
template <class Body>
OCTAVO_INLINE void for_row_blocks(int num_rows, Body body) {
  int row = 0;
  while (num_rows - row >= 3 && num_rows - row != 4) body.template operator()<3>(row), row += 3;
  while (num_rows - row >= 2) body.template operator()<2>(row), row += 2;
  if (row < num_rows) body.template operator()<1>(row);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
