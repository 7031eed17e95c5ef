// Products of attention over bf16 pages on AMX tiles, called by the sides in latents_avx512.cpp.
//
// A tile multiplies 16 rows of 32 bf16 values by 16 columns. Rows stand in pages one after the other, so for
// scores they are the rows and queries the columns; for the weighted sum they are the columns, two positions
// a pair.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::amx {

// Rows of 16 positions, `stride` bytes apart, in each of the four blocks of a tile; none of them is null.
struct KeyBlocks {
  const uint8_t* rows[4];
  int64_t stride;
  // Asked for meanwhile, where not null: as many bytes as each block has.
  const uint8_t* soon[4];
};

// scores[row][64] = query . key, for `num_rows` rows and the blocks in `blocks` (bits); what stands in the
// others means nothing. Queries: [num_rows / 16, rounded up][steps][16 pairs][16 rows][2], of 32 dims a step.
void score_tile(const KeyBlocks& keys, uint32_t blocks, const uint16_t* queries, int steps, int num_rows,
                float* scores);

// accumulators[row][width] += weights[row][64] . values, in vectors of 16 floats: values [num_vectors][32
// pairs] [16][2]. `halves` says in which halves of the 64 positions there are any; `num_vectors` is even.
void add_tile(const uint16_t* weights, const uint16_t* values, uint32_t halves, int num_vectors, int num_rows,
              int64_t width, float* accumulators);

}  // namespace octavo::amx
