// Products of attention on AMX tiles: over bf16 pages, called by the sides in bf16_tiles_avx512.cpp, and of
// bytes.
//
// A tile multiplies 16 rows of 32 bf16 values by 16 columns. Keys stand in pages row by row, so for scores
// they are the rows and queries the columns; of the weighted sum values are the columns, two positions a
// pair.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::amx {

// Rows of 16 positions, `stride` bytes apart, in each of the four blocks of a tile; none of them is null.
// `next`: where those of the tile after it begin, to be prefetched, or null.
struct KeyBlocks {
  const uint8_t* rows[4];
  const uint8_t* next[4];
  int64_t stride;
};

// scores[row][64] = query . key, for `num_rows` rows and the blocks in `blocks` (bits); what stands in the
// others means nothing. Queries: [num_rows / 16, rounded up][steps][16 pairs][16 rows][2], of 32 dims a step.
void score_tile(const KeyBlocks& keys, uint32_t blocks, const uint16_t* queries, int steps, int num_rows,
                float* scores);

// Columns of a weighted sum of values under `num_rows` rows. The tiles of this thread are in use for the life
// of the object.
class WeightedSum {
 public:
  explicit WeightedSum(int num_rows);
  ~WeightedSum();
  WeightedSum(const WeightedSum&) = delete;
  WeightedSum& operator=(const WeightedSum&) = delete;

  // accumulators[row][stride bytes, the first 32 * parts floats] += weights[row][64] . values [parts][2
  // vectors] [32 pairs of positions][16][2]. `halves` says in which halves of the 64 positions there are any.
  void add(const uint16_t* weights, const uint16_t* values, int parts, uint32_t halves, int64_t stride,
           float* accumulators);

 private:
  int num_rows_, upper_, lower_;
};

// ---- rows of bytes: integer products, exact in any order ----
//
// Up to 16 rows in two bytes a value (parts 2: their high bytes, then their low ones), or up to 32 in one.

constexpr int kByteRows = 16;  // of a tile
constexpr int kByteProducts =
    kByteRows * 64;  // of high bytes, or of the first 16 rows; as many others follow

// Products of rows of queries with a panel of keys.
template <int kParts>
class ByteScores {
 public:
  static constexpr int kRows = kByteRows * 2 / kParts;  // of a call, at most

  ByteScores() = default;
  ~ByteScores();
  ByteScores(const ByteScores&) = delete;
  ByteScores& operator=(const ByteScores&) = delete;

  // products[2][16][64] of `num_rows` rows, [row][kParts][dim] signed, with a panel [dim / 4][64
  // positions][4] unsigned; dim is a multiple of 64.
  void multiply(const int8_t* queries, int num_rows, int dim, const void* panel, int32_t* products);

 private:
  int num_rows_ = 0;
};

// Products of weights with a panel of values.
template <int kParts>
class ByteSums {
 public:
  static constexpr int kRows = kByteRows * 2 / kParts;  // of a call, at most

  ByteSums() = default;
  ~ByteSums();
  ByteSums(const ByteSums&) = delete;
  ByteSums& operator=(const ByteSums&) = delete;

  // Of `num_rows` rows, the weights [row][kParts][64 positions] unsigned: those of the calls that follow.
  void load_weights(const uint8_t* weights, int num_rows);

  // products[2][16][32] with two vectors of the panel [16][row of `stride` bytes][4 positions] signed.
  void multiply(const void* panel, int64_t stride, int32_t* products);

 private:
  int num_rows_ = 0;
};

}  // namespace octavo::amx
