// Attention's products on AMX: for bf16 pages (called by bf16_tiles_avx512.cpp), and for bytes.
//
// An AMX tile has 16 rows of 32 bf16 values and is multiplied by 16 columns. For scores, keys are the rows,
// as in pages, and queries are the columns. In weighted sums, pairs of positions are the columns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::amx {

// The four blocks of a tile, none of them null; each has 16 positions, `stride` bytes apart. `next`: the next
// tile's blocks, for prefetching, or null.
struct KeyBlocks {
  const uint8_t* rows[4];
  const uint8_t* next[4];
  int64_t stride;
};

// Computes scores[row][64] = query . key for `num_rows` rows and the blocks whose bits are set in `blocks`;
// scores of other blocks are arbitrary. Queries are [num_rows / 16, rounded up][steps][16 pairs][16 rows][2],
// with 32 dims per step.
void score_tile(const KeyBlocks& keys, uint32_t blocks, const uint16_t* queries, int steps, int num_rows,
                float* scores);

// This thread's AMX tiles, configured for some rows.
class HeldTiles {
 public:
  HeldTiles() = default;
  ~HeldTiles();
  HeldTiles(const HeldTiles&) = delete;
  HeldTiles& operator=(const HeldTiles&) = delete;

 protected:
  void configure(int upper, int lower);

  int upper_ = 0, lower_ = 0;
};

// Weighted sums of values for `num_rows` rows.
class WeightedSum : HeldTiles {
 public:
  explicit WeightedSum(int num_rows) : num_rows_(num_rows) {}

  // Adds weights[row][64] . values to the first 32 * parts floats of each accumulator; accumulators are
  // `stride` bytes apart. Values are [parts][2 vectors][32 pairs of positions][16][2]. `halves`: bit h is set
  // if half h of the 64 positions has values.
  void add(const uint16_t* weights, const uint16_t* values, int parts, uint32_t halves, int64_t stride,
           float* accumulators);

 private:
  int num_rows_;
};

// ---- rows of bytes: integer products, exact in any order ----
//
// One call takes up to 16 rows with two bytes per value (kParts = 2: all high bytes, then all low bytes), or
// up to 32 rows with one byte per value (kParts = 1).

constexpr int kByteRows = 16;  // rows of a tile
constexpr int kByteProducts =
    kByteRows * 64;  // first the products of high bytes, or of the first 16 rows, then the others

template <int kParts>
class ByteProducts : HeldTiles {
 public:
  static constexpr int kRows = kByteRows * 2 / kParts;  // most rows per call

  // Computes products[2][16][64] of `num_rows` signed rows [row][kParts][dim] and an unsigned panel of keys
  // [dim / 4][64 positions][4]; dim is a multiple of 64.
  void score(const int8_t* queries, int num_rows, int dim, const void* panel, int32_t* products);

  // Loads unsigned weights [row][kParts][64 positions] of `num_rows` rows into tiles, for all later calls.
  void load_weights(const uint8_t* weights, int num_rows);
  // Computes products[2][16][32] of the loaded weights and two vectors of a signed panel of values, [16][row
  // of `stride` bytes][4 positions].
  void weigh(const void* panel, int64_t stride, int32_t* products);

 private:
  void configure_rows(int num_rows);
};

}  // namespace octavo::amx
